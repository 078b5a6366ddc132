"""On a rank: the inputs of every cell, all cells of a mesh in one go, and results that can be sent."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch.utils import _pytree as pytree

import cheap_kernels
import dbuf
import reference
from dbuf import DBuffer, Partial
from table.cells import KERNELS_AT, OPTIONS, Cell, cells, fill, is_partial, seed_of
from table.left_out import reason_to_leave_out
from table.row import Refusals, entry, evaluate
from table.rows import ROWS


def inputs(c: Cell) -> dict[str, Any]:
    """This rank's arguments: trees, numbers, and buffers at every placement."""
    coordinate = tuple(c.mesh.get_coordinate())
    rank = c.coordinates.index(coordinate)
    make = functools.partial(dbuf.shard, mesh=c.mesh, layout=c.layout)

    def at(placements: tuple[Any, ...], kind: str = "") -> DBuffer:
        has_partial = any(map(is_partial, placements))
        tree = c.tree(kind or ("whole" if has_partial else "any"), seed_of(placements, coordinate))
        return make(tree, placements=placements)

    small = at(c.sharded, "small")
    is_content = make(fill([torch.ones(shape) for shape in c.shapes]), placements=c.sharded).local.bool()
    part = dbuf.select(at(c.sharded), c.kept_paths)
    return {
        "tree": c.tree("any"),
        "own tree": c.tree("any", rank),
        "at": {name: at(placements) for name, placements in c.stops.items()},
        "small": small,
        "small replicated": at(c.replicated, "small"),
        "small inner": at(c.inner, "small"),
        "random": at(c.sharded, "random"),
        "random partial": at(c.partial, "random"),
        "random average": at((Partial("avg"),) * c.ndim, "random"),
        "dirty": DBuffer(torch.where(is_content, small.local, math.nan), small.spec),
        "rows": reference.unpack(c.expected(c.sharded))[rank],
        "part": DBuffer(-part.local, part.spec),
        "number": torch.tensor(rank + 1.0, dtype=c.dtype),
        "numbers": torch.tensor([[1.0, -2.0], [0.0, 12.0]], dtype=c.dtype) * (rank + 1),
    }


def run_cells(mode: str, mesh_shape: tuple[int, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """All cells of a mesh on this rank: results by row and cell, and refusals by row and cell."""
    names = ("dp",) if len(mesh_shape) == 1 else ("outer", "inner")
    table = cells(mode, mesh_shape, dbuf.init_mesh(names, mesh_shape))
    given = {c.key: inputs(c) for c in table}
    todo = {f: [c for c in table if reason_to_leave_out(f, c) is None] for f in ROWS}
    if mode == "eager":
        results = {f: {c.key: evaluate(ROWS[f], c, given[c.key]) for c in todo[f]} for f in ROWS}
    elif mesh_shape in KERNELS_AT:
        results = _run_compiled(todo, given, kernels=True)
    else:
        with cheap_kernels.graphs_alone():
            results = _run_compiled(todo, given, kernels=False)
    refusals = {
        f: {
            c.key: _refuse(ROWS[f].refusals(c, given[c.key]), mode == "compiled" and bool(ROWS[f].how)) for c in todo[f]
        }
        for f in ROWS
    }
    return pytree.tree_map(_portable, results, is_leaf=_is_whole), refusals


def _run_compiled(todo: dict[str, list[Cell]], given: dict[str, Any], kernels: bool) -> dict[str, Any]:
    results = {}
    for how in ("compile", "jit"):
        rows = {f: todo[f] for f in ROWS if ROWS[f].how == how and todo[f]}

        def program(given: dict[str, Any], rows: dict[str, list[Cell]] = rows) -> dict[str, Any]:
            return {f: {c.key: evaluate(ROWS[f], c, given[c.key]) for c in rows[f]} for f in rows}

        if how == "jit":
            run = dbuf.jit(program, options=OPTIONS)
        elif kernels:
            run = torch.compile(program, fullgraph=True, options=OPTIONS)
        else:
            run = torch.compile(program, fullgraph=True, backend="aot_eager")
        results.update(run(given))
    for f in ROWS:
        if ROWS[f].all_at_once is not None and todo[f]:
            results[f] = ROWS[f].all_at_once(todo[f], given)
    return results


def _refuse(refusals: Refusals, jitted: bool) -> dict[str, Any]:
    """For each call that must be refused what it raised, and what it should have raised."""
    found = {}
    for label, (call, error, message) in refusals.items():
        try:
            (dbuf.jit(call) if jitted else call)()
            raised: Any = ("nothing", "")
        except Exception as caught:
            raised = (type(caught).__name__, str(caught))
        found[label] = (raised, (error.__name__, message))
    return found


def _is_whole(node: Any) -> bool:
    return isinstance(node, DBuffer | torch.Size)


def _portable(leaf: Any) -> Any:
    if isinstance(leaf, DBuffer):
        return entry(leaf.local, leaf)
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
