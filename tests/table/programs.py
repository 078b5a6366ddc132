"""jit, inspect, disable_jit: whole programs."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

import cheap_kernels  # noqa: F401
import dbuf
import reference
from dbuf import DBuffer, PlacementError, Replicate, TreeError
from table.cells import OPTIONS, Cell
from table.row import Refusals, Row, entry


def _double(buf: DBuffer, number: torch.Tensor) -> tuple[DBuffer, torch.Tensor]:
    return pytree.tree_map(lambda x: x * 2, buf), number + 1


def _copy(buf: DBuffer) -> DBuffer:
    return DBuffer(buf.local.clone(), buf.spec)


def call_jit(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    def debug() -> dict[str, Any]:
        buf, step = _copy(x["small"]), dbuf.jit(_double, donate_argnums=0)
        with dbuf.disable_jit():
            doubled, number = step(buf, x["number"])
        return {"doubled": doubled, "number": number, "argument": buf, "compiles": step.compiles}

    return {"disabled": debug}


def expect_jit(c: Cell) -> dict[str, Any]:
    small = c.expected(c.sharded, "small")
    of_rank = []
    for rank, local in enumerate(small.locals):
        doubled, number = entry(2 * local, small), torch.tensor(rank + 2.0, dtype=c.dtype)
        if c.compiled:
            more = {"in the old memory": True, "compiles": 1}
        else:
            more = {"argument": entry(local, small), "compiles": 0}
        of_rank.append({"doubled": doubled, "number": number, **more})
    return {"donated" if c.compiled else "disabled": of_rank}


def jit_all(table: list[Cell], given: dict[str, Any]) -> dict[str, Any]:
    """One donating step over the buffers of all cells."""
    bufs = {c.key: _copy(given[c.key]["small"]) for c in table}
    numbers = {c.key: given[c.key]["number"] for c in table}
    pointers = {key: buf.local.data_ptr() for key, buf in bufs.items()}

    def double_all(bufs: dict[str, DBuffer], numbers: dict[str, torch.Tensor]) -> Any:
        pairs = {key: _double(buf, numbers[key]) for key, buf in bufs.items()}
        return {key: pair[0] for key, pair in pairs.items()}, {key: pair[1] for key, pair in pairs.items()}

    step = dbuf.jit(double_all, donate_argnums=0, options=OPTIONS)
    doubled, more = step(bufs, numbers)
    results = {}
    for key, buf in doubled.items():
        same = buf.local.data_ptr() == pointers[key]
        results[key] = {"doubled": buf, "number": more[key], "in the old memory": same, "compiles": step.compiles}
    return {key: {"donated": result} for key, result in results.items()}


def refuse_jit(c: Cell, x: dict[str, Any]) -> Refusals:
    buf, number = x["small"], x["number"]
    gather = dbuf.jit(dbuf.allgather, donate_argnums=0)
    out = {"no such argument": (lambda: dbuf.jit(_double, donate_argnums=2)(buf, number), dbuf.DbufError, "donate")}
    if c.ranks > 1:
        out["no partner"] = (lambda: gather(buf), TreeError, "argument 0 is donated, but result 0 does not fit")
        mine = dbuf.shard({"w": torch.ones(4 + dist.get_rank())}, c.mesh, c.replicated)
        out["ranks differ"] = (lambda: dbuf.jit(_double)(mine, number), TreeError, r"dbuf.jit\(.*ranks disagree")
    return out


def call_disable_jit(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    def debug() -> dict[str, Any]:
        step = dbuf.jit(lambda buf: (dbuf.allgather(buf), torch.compiler.is_compiling()))
        with dbuf.disable_jit():
            gathered, compiling = step(x["small"])
        return {"gathered": gathered, "is compiling": compiling, "compiles": step.compiles}

    return {"disabled": debug}


def expect_disable_jit(c: Cell) -> dict[str, Any]:
    gathered = reference.allgather(c.expected(c.sharded, "small"))
    entries = [entry(local, gathered) for local in gathered.locals]
    return {"disabled": [{"gathered": entry, "is compiling": False, "compiles": 0} for entry in entries]}


def inspect_all(table: list[Cell], given: dict[str, Any]) -> dict[str, Any]:
    """One report of the gathers of all cells, cut into theirs: they stand in the graph in the buffers' order."""
    report = dbuf.inspect(dbuf.jit(dbuf.allgather, options=OPTIONS), {c.key: given[c.key]["small"] for c in table})
    found = [(g.kind, g.axis, g.numel, str(g.dtype), g.nbytes, g.backward) for g in report.sequence]
    each = sum(n > 1 for n in table[0].mesh_shape)
    assert len(found) == each * len(table)
    return {
        c.key: {
            "collectives": found[i * each : (i + 1) * each],
            "counts": report.collectives == ({"all_gather": len(found)} if found else {}),
            "graph breaks": report.graph_breaks,
            "compiles": report.compiles,
        }
        for i, c in enumerate(table)
    }


def expect_inspect(c: Cell) -> dict[str, Any]:
    placements, gathers = list(c.sharded), []
    names = ("dp",) if c.ndim == 1 else ("outer", "inner")
    for axis, n in enumerate(c.mesh_shape):
        spans = [reference.span(c.layout, placements, c.mesh_shape, coordinate) for coordinate in c.coordinates]
        numel = n * max(stop - start for start, stop in spans)
        if n > 1:
            nbytes = numel * c.dtype.itemsize
            gathers.append(("all_gather", names[axis], numel, str(c.dtype), nbytes, False))
        placements[axis] = Replicate()
    out = {"collectives": gathers, "counts": True, "graph breaks": 0, "compiles": 0}
    return {name: c.everywhere(value) for name, value in out.items()}


def refuse_inspect(c: Cell, x: dict[str, Any]) -> Refusals:
    call = functools.partial(dbuf.inspect, dbuf.unpack, x["at"][c.at_partial])
    return {"partial": (call, PlacementError, "holds contributions")}


ROWS = {
    "jit": Row(call_jit, expect_jit, refuse_jit, how="", all_at_once=jit_all),
    "inspect": Row(lambda c, x: {}, expect_inspect, refuse_inspect, how="", all_at_once=inspect_all),
    "disable_jit": Row(call_disable_jit, expect_disable_jit, how=""),
}
