"""Every public function of dbuf x {eager, compiled} x layouts x meshes of 1, 2, 3 and 4 ranks x {fp32, bf16}.

A row of the table is a function: how it is called in a cell, what `reference.py` expects of every rank, and what it
must refuse there. All cells of a mesh run in one go on its ranks, and one compiled program covers all of them: a
compile costs seconds. Results are compared here, bit by bit; those whose name starts with "about" are sums of random
numbers and are compared within the tolerance of `dbuf.testing.assert_close`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

import dbuf
import dbuf.testing
import reference
from dbuf import (
    BlockAtomic,
    DBuffer,
    LayoutError,
    Partial,
    PlacementError,
    Replicate,
    RowAtomic,
    ShardLayout,
    TensorAtomic,
    TreeError,
)
from dbuf.placement import describe, is_sharded
from dbuf.testing import assert_bitwise, assert_close

# --- the cells --------------------------------------------------------------------------------------------

MODES = ("eager", "compiled")
MESHES = ((1,), (2,), (3,), (4,), (2, 2))
LAYOUTS = ("row padded", "row unpadded", "block", "tensor")
DTYPES = (torch.float32, torch.bfloat16)
QUICK = {("eager", (2,)), ("eager", (3,))}

# A third less to compile: kernels without a vectorised copy of themselves, and a shorter search for fusions.
OPTIONS = {"cpp.simdlen": 1, "max_fusion_buffer_group_pairwise_attempts": 2}

# Leaves are indices of shapes. Odd sizes, a scalar, an empty tensor, a None, and a row so long that some rank owns
# nothing of an UNPADDED buffer (3 and 4 ranks), or nothing but padding of a PADDED one.
TREE = {"wide": 0, "w": 1, "list": [2, None], "deep": {"pair": (3, 4), "b": 5}}
ROW_SHAPES = ((1, 80), (5, 3), (7,), (), (0, 3), (3, 4))
BLOCK_SHAPES = ((2, 40), (6, 3), (4,), (2,), (0, 3), (2, 5))  # blocks of two rows: no scalar, even numbers of rows

# Cells left out: the functions (none named: all), why, and where. Counted below.
LEFT_OUT: tuple[tuple[str, str, Callable[[Cell], bool]], ...] = (
    (
        "init_mesh plan_row_atomic plan_tensor_atomic changed_mesh_axis check disable_jit",
        "runs before a step or around it, outside any trace: there is nothing to compile",
        lambda c: c.compiled,
    ),
    (
        "init_mesh plan_row_atomic plan_tensor_atomic changed_mesh_axis",
        "takes no tensor: one dtype stands for both",
        lambda c: not c.compiled and c.dtype is torch.bfloat16,
    ),
    ("inspect", "compiles whatever it is given: there is no eager inspection", lambda c: not c.compiled),
    ("init_mesh", "takes no layout: one stands for all", lambda c: _first_dtype(c) and c.name != "row padded"),
    (
        "changed_mesh_axis",
        "takes placements alone: both layouts of RowAtomic are the same there",
        lambda c: _first_dtype(c) and c.name == "row unpadded",
    ),
    ("plan_row_atomic", "plans no TensorAtomic", lambda c: _first_dtype(c) and c.name == "tensor"),
    ("plan_tensor_atomic", "plans no rows", lambda c: _first_dtype(c) and c.name != "tensor"),
    (
        "",
        "four ranks are compiled on one axis: on two, programs differ by the groups that they name, and a compile of "
        "the table costs more than all eager cells",
        lambda c: c.compiled and c.ndim > 1,
    ),
    (
        "",
        "bf16 is compiled at 2 and 3 ranks: at 1 and 4 the same programs once more would cost more than they show",
        lambda c: c.compiled and c.ranks in (1, 4) and c.dtype is torch.bfloat16,
    ),
)
# Compiled, compiled on two axes, compiled bf16 at 1 and 4 ranks, eager.
NUM_LEFT_OUT = 4 * (6 * 8) + 30 * 8 + 2 * 24 * 4 + 5 * (4 * 4 + 8 + 3 + 1 + 1 + 3)
NUM_RUN = 1616
NUM_REFUSED = {  # calls that must be refused, by mode and mesh
    ("eager", (1,)): 623,
    ("eager", (2,)): 647,
    ("eager", (3,)): 647,
    ("eager", (4,)): 649,
    ("eager", (2, 2)): 1839,
    ("compiled", (1,)): 306,
    ("compiled", (2,)): 628,
    ("compiled", (3,)): 628,
    ("compiled", (4,)): 315,
}


class Cell:
    """One mode, mesh, layout and dtype: what a row's call and expectation need, all of it constants."""

    def __init__(self, mode: str, mesh_shape: tuple[int, ...], name: str, dtype: torch.dtype, mesh: Any = None) -> None:
        self.compiled = mode == "compiled"
        self.mesh_shape, self.name, self.dtype, self.mesh = mesh_shape, name, dtype, mesh
        self.key = f"{name} {dtype}"
        self.ranks, self.ndim = math.prod(mesh_shape), len(mesh_shape)
        self.kind = {"block": BlockAtomic(2), "tensor": TensorAtomic()}.get(name, RowAtomic())
        self.shapes = BLOCK_SHAPES if name == "block" else ROW_SHAPES
        self.layout = _plan(name, self.shapes, self.ranks)
        padding = ShardLayout.UNPADDED if name == "row unpadded" else ShardLayout.PADDED
        self.layout_argument = self.layout if name == "tensor" else padding
        self.sharded = (self.kind,) * self.ndim
        self.inner = (Replicate(),) * (self.ndim - 1) + (self.kind,)  # the same as `sharded` on one axis
        self.replicated = (Replicate(),) * self.ndim
        self.partial = (Partial("sum"),) * self.ndim
        self.at_sharded, self.at_inner = describe(self.sharded), describe(self.inner)
        self.at_replicated, self.at_partial = describe(self.replicated), describe(self.partial)
        self.other_dtype = torch.bfloat16 if dtype is torch.float32 else torch.float32
        self.stops = _stops(self.kind, self.ndim)
        self.moves = {function: self._moves(function) for function in PURE}
        self.relayouts = self._relayouts()
        paths = [pytree.keystr(path) for path, leaf in pytree.tree_flatten_with_path(TREE)[0] if leaf is not None]
        self.kept_paths = tuple(path for path in paths if keep(path))
        self.kept = tuple(keep(path) for path in paths)

    def _moves(self, function: str) -> tuple[tuple[str, str, tuple[Any, ...]], ...]:
        """Name, name of the source and target of every change that is made of one function alone."""
        pairs = [(a, b) for a in self.stops.values() for b in self.stops.values() if _is_legal(a, b)]
        if function != "redistribute":
            pairs = [(a, b) for a, b in pairs if a != b and _made_of(a, b, PURE[function])]
        if self.compiled:  # one of each row of the transition table, on all axes at once
            uniform = (self.replicated, self.partial, self.sharded)
            pairs = [(a, b) for a, b in pairs if a in uniform and b in uniform and a != b]
            if function == "redistribute":
                pairs = [(a, b) for a, b in pairs if b == self.partial]
        return tuple((f"{describe(a)} -> {describe(b)}", describe(a), b) for a, b in pairs)

    def _relayouts(self) -> tuple[tuple[str, str, tuple[Any, ...], Any], ...]:
        """Name, name of the source, target and target's layout of moves to other layouts."""
        sources = list(_stops(self.kind, self.ndim).values())
        if self.ndim > 1:
            sources = [p for p in sources if not _mixes(p) and Partial("avg") not in p]
        sources = [self.sharded] if self.compiled else sources
        others = [o for o in _other_layouts(self) if not self.compiled or o[0] in PROGRAM_LAYOUTS[self.name]]
        moves = []
        for label, kind, layout in others:
            targets = [tuple(kind if is_sharded(p) else p for p in source) for source in sources]
            for a, b in itertools.product(sources, targets):
                # Which rank of a new partial axis keeps an element is free in another layout: only their sum counts.
                free = any(is_sharded(x) and _is_partial(y) for x, y in zip(a, b, strict=True))
                name = f"{'about ' if free else ''}{describe(a)} -> {describe(b)} {label}"
                if _is_legal(a, b):
                    moves.append((name, describe(a), b, layout))
        return tuple(dict((move[0], move) for move in moves).values())

    # -- what the oracle starts from ----------------------------------------------------------------------

    @property
    def coordinates(self) -> list[tuple[int, ...]]:
        return reference.coordinates(self.mesh_shape)

    def tree(self, kind: str, seed: int = 0) -> Any:
        return fill(_tensors(self.shapes, self.dtype, kind, seed))

    def contributions(self, placements: tuple[Any, ...], kind: str) -> list[Any]:
        """One tree a rank, which differ along partial axes alone."""
        return [self.tree(kind, _seed(placements, coordinate)) for coordinate in self.coordinates]

    @functools.cache  # noqa: B019  (one buffer serves many rows, and the cells are kept anyway)
    def expected(self, placements: tuple[Any, ...], kind: str = "") -> reference.Buffer:
        """What the buffer `inputs` holds at these placements."""
        has_partial = any(isinstance(p, Partial) for p in placements)
        kind = kind or ("whole" if has_partial else "any")
        return reference.shard(self.contributions(placements, kind), self.mesh_shape, placements, self.layout)

    def everywhere(self, value: Any) -> list[Any]:
        return [value] * self.ranks


# Where a compiled `redistribute` goes from each layout.
PROGRAM_LAYOUTS = {
    "row padded": ("unpadded rows",),
    "row unpadded": ("owners",),
    "block": ("padded rows",),
    "tensor": ("twice as many segments",),
}
PURE = {
    "allgather": ("shard", "replicate"),
    "reduce_scatter": ("partial", "shard"),
    "allreduce": ("partial", "replicate"),
    "view": ("replicate", "shard"),
    "redistribute": (),
}


def keep(path: str) -> bool:
    """The rule of `select`."""
    return "list" in path or "deep" in path


def fill(tensors: Any) -> Any:
    return pytree.tree_map(lambda index: None if index is None else tensors[index], TREE)


@functools.cache
def cells(mode: str, mesh_shape: tuple[int, ...], mesh: Any = None) -> list[Cell]:
    return [Cell(mode, mesh_shape, name, dtype, mesh) for name in LAYOUTS for dtype in DTYPES]


def reason_to_leave_out(function: str, c: Cell) -> str | None:
    for functions, reason, applies in LEFT_OUT:
        if (not functions or function in functions.split()) and applies(c):
            return reason
    return None


def _first_dtype(c: Cell) -> bool:
    return not c.compiled and c.dtype is DTYPES[0]


def _plan(name: str, shapes: Any, ranks: int) -> Any:
    if name == "tensor":
        return dbuf.plan_tensor_atomic(shapes, ranks, tensor_owners=_owners(ranks))
    padding = ShardLayout.UNPADDED if name == "row unpadded" else ShardLayout.PADDED
    return dbuf.plan_row_atomic(shapes, ranks, block_size=2 if name == "block" else 1, shard_layout=padding)


def _owners(ranks: int) -> list[int]:
    """Of two ranks the first owns nothing, of more all but the first and the last."""
    return [ranks - 1, 0 if ranks > 2 else ranks - 1] + [ranks - 1] * 4


def _stops(kind: Any, ndim: int) -> dict[str, tuple[Any, ...]]:
    """Every legal tuple of placements."""
    choices = (Replicate(), Partial("sum"), Partial("avg"), kind)
    tuples = itertools.product(choices, repeat=ndim)
    return {describe(p): p for p in tuples if list(map(is_sharded, p)) == sorted(map(is_sharded, p))}


def _is_legal(a: Any, b: Any) -> bool:
    """Whether no partial axis changes its reduction."""
    return not any(isinstance(x, Partial) and isinstance(y, Partial) and x != y for x, y in zip(a, b, strict=True))


def _made_of(a: Any, b: Any, row: tuple[str, str]) -> bool:
    return all(x == y or (_kind(x), _kind(y)) == row for x, y in zip(a, b, strict=True))


def _kind(placement: Any) -> str:
    if is_sharded(placement):
        return "shard"
    return "partial" if isinstance(placement, Partial) else "replicate"


def _mixes(placements: Any) -> bool:
    return Partial("sum") in placements and Partial("avg") in placements


def _other_layouts(c: Cell) -> list[tuple[str, Any, Any]]:
    rows = functools.partial(dbuf.plan_row_atomic, c.shapes)
    owners = [(owner + 1) % c.ranks for owner in _owners(c.ranks)]
    out = [
        ("padded rows", RowAtomic(), rows(c.ranks)),
        ("unpadded rows", RowAtomic(), rows(c.ranks, shard_layout=ShardLayout.UNPADDED, align=4)),
        ("twice as many segments", RowAtomic(), rows(2 * c.ranks, align=8)),
        ("owners", TensorAtomic(), dbuf.plan_tensor_atomic(c.shapes, c.ranks, tensor_owners=owners)),
    ]
    if c.name == "block":
        unpadded = rows(c.ranks, block_size=2, shard_layout=ShardLayout.UNPADDED)
        out.append(("unpadded blocks", BlockAtomic(2), unpadded))
    return out


def _seed(placements: tuple[Any, ...], coordinate: tuple[int, ...]) -> int:
    return sum(10**axis * i for axis, (p, i) in enumerate(zip(placements, coordinate, strict=True)) if _is_partial(p))


def _is_partial(placement: Any) -> bool:
    return isinstance(placement, Partial)


def _tensors(shapes: Any, dtype: torch.dtype, kind: str, seed: int) -> list[torch.Tensor]:
    """Data: "any" for moves, "whole" and "small" for sums that are exact in bf16, "random" for sums that are not."""
    generator = torch.Generator().manual_seed(seed + 1)
    out = []
    for shape in shapes:
        if kind in ("whole", "small"):  # multiples of 12, so that averages over 2, 3 and 4 ranks are whole, too
            x = torch.randint(-3, 4, shape, generator=generator) * (12 if kind == "whole" else 1)
        else:
            x = torch.randn(shape, generator=generator)
        out.append(x.to(dtype))
    if kind == "any":
        out[0].view(-1)[:4] = torch.tensor([-0.0, math.inf, -math.inf, math.nan])
    return out


# --- on a rank --------------------------------------------------------------------------------------------


def inputs(c: Cell) -> dict[str, Any]:
    """This rank's arguments: trees, numbers, and buffers at every placement."""
    coordinate = tuple(c.mesh.get_coordinate())
    rank = c.coordinates.index(coordinate)
    make = functools.partial(dbuf.shard, mesh=c.mesh, layout=c.layout)

    def at(placements: tuple[Any, ...], kind: str = "") -> DBuffer:
        has_partial = any(map(_is_partial, placements))
        tree = c.tree(kind or ("whole" if has_partial else "any"), _seed(placements, coordinate))
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
    else:
        results = _run_compiled(todo, given)
    refusals = {
        f: {
            c.key: _refuse(ROWS[f].refusals(c, given[c.key]), mode == "compiled" and bool(ROWS[f].how)) for c in todo[f]
        }
        for f in ROWS
    }
    return pytree.tree_map(_portable, results, is_leaf=_is_whole), refusals


def _run_compiled(todo: dict[str, list[Cell]], given: dict[str, Any]) -> dict[str, Any]:
    results = {}
    for how in ("compile", "jit"):
        rows = {f: todo[f] for f in ROWS if ROWS[f].how == how and todo[f]}

        def program(given: dict[str, Any], rows: dict[str, list[Cell]] = rows) -> dict[str, Any]:
            return {f: {c.key: evaluate(ROWS[f], c, given[c.key]) for c in rows[f]} for f in rows}

        if how == "compile":
            run = torch.compile(program, fullgraph=True, options=OPTIONS)
        else:
            run = dbuf.jit(program, options=OPTIONS)
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
        return _entry(leaf.local, leaf)
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _entry(local: torch.Tensor, buf: Any) -> dict[str, Any]:
    layout = buf.layout  # the offset of a tensor without elements means nothing
    offsets = [
        offset for offset, shape in zip(layout.tensor_to_offset, layout.tensor_shapes, strict=True) if 0 not in shape
    ]
    return {
        "local": local.detach().clone(),
        "placements": describe(buf.placements),
        "layout": f"{layout.tensor_shapes} at {offsets}, {layout.size} cut at {layout.rank_to_offset}",
    }


# --- the rows ---------------------------------------------------------------------------------------------

Refusals = Mapping[str, tuple[Callable[[], Any], type[Exception], str]]


def _no_refusals(c: Cell, x: dict[str, Any]) -> Refusals:
    return {}


@dataclass(frozen=True)
class Row:
    """A public function: its calls on a rank by name, what every rank should get, and what is refused.

    Attributes:
        call: From a cell and its inputs to calls by name.
        expect: From a cell to the same names: a `reference.Buffer`, or a list with a value for each rank.
        refusals: Calls that raise, with the error and a pattern of its message.
        program: Names of the calls that are compiled, too: each costs, and there are hundreds of cells.
        how: What compiles it, with all other such rows in one program: "compile" for `torch.compile`, "jit" for
            `dbuf.jit`, "" for nothing.
        all_at_once: For rows that compile by themselves: from cells and inputs to results by cell.
    """

    call: Callable[[Cell, dict[str, Any]], dict[str, Any]]
    expect: Callable[[Cell], dict[str, Any]]
    refusals: Callable[[Cell, dict[str, Any]], Refusals] = _no_refusals
    program: tuple[str, ...] = ()
    how: str = "compile"
    all_at_once: Callable[[list[Cell], dict[str, Any]], dict[str, Any]] | None = None

    def runs(self, name: str, c: Cell) -> bool:
        """Whether a call belongs to this mode. Moves from one place to another are chosen in `Cell`."""
        return not c.compiled or not self.how or name in self.program or "->" in name or name == f"at {c.at_sharded}"


def evaluate(row: Row, c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    return {name: call() for name, call in row.call(c, x).items() if row.runs(name, c)}


def _later(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    return lambda: function(*arguments)


# shard, pack, unpack, select, merge, shapes, cast


def call_shard(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    tree, own, layout = x["tree"], x["own tree"], c.layout_argument
    out = {
        "sharded": lambda: dbuf.shard(tree, c.mesh, c.sharded, layout=layout),
        "inner": lambda: dbuf.shard(tree, c.mesh, c.inner, layout=layout),
        "planned": lambda: dbuf.shard(tree, c.mesh, c.sharded, layout=c.layout),
        "replicated": lambda: dbuf.shard(tree, c.mesh, c.replicated, layout=c.layout),
        "partial": lambda: dbuf.shard(own, c.mesh, c.partial, layout=c.layout),
        "broadcast": lambda: dbuf.shard(own, c.mesh, c.sharded, layout=c.layout, broadcast_from=c.ranks - 1),
    }
    if c.name != "tensor":
        out["finer"] = lambda: dbuf.shard(tree, c.mesh, c.sharded, layout=layout, dp_size=2 * c.ranks, align=8)
        out["coarser"] = lambda: dbuf.shard(tree, c.mesh, c.inner, layout=layout, dp_size=c.mesh_shape[-1])
    return out


def expect_shard(c: Cell) -> dict[str, Any]:
    make = functools.partial(reference.shard, c.tree("any"), c.mesh_shape)
    own = [c.tree("any", rank) for rank in range(c.ranks)]
    sharded = make(c.sharded, c.layout)
    out = {"sharded": sharded, "inner": make(c.inner, c.layout), "planned": sharded}
    out["replicated"] = make(c.replicated, c.layout)
    out["partial"] = reference.shard(own, c.mesh_shape, c.partial, c.layout)
    out["broadcast"] = reference.shard(own[-1], c.mesh_shape, c.sharded, c.layout)
    if c.name != "tensor":
        plan = functools.partial(
            dbuf.plan_row_atomic,
            c.shapes,
            block_size=2 if c.name == "block" else 1,
            shard_layout=c.layout_argument,
        )
        out["finer"] = make(c.sharded, plan(2 * c.ranks, align=8))
        out["coarser"] = make(c.inner, plan(c.mesh_shape[-1]))
    return out


def refuse_shard(c: Cell, x: dict[str, Any]) -> Refusals:
    def shard(tree: Any, placements: Any = c.sharded, **more: Any) -> Callable[[], Any]:
        return lambda: dbuf.shard(tree, c.mesh, placements, **({"layout": c.layout} | more))

    tree = x["tree"]
    mixed = {**tree, "w": tree["w"].double()}
    out = {
        "mixed dtypes": (shard(mixed), TreeError, r"share one dtype.*\['w'\]: torch.float64"),
        "a number": (shard({**tree, "w": 1.0}), TreeError, r"not every leaf is a plain tensor.*\['w'\]: float"),
        "other shapes": (shard({"w": tree["w"]}), LayoutError, "planned for other tensors"),
        "too many axes": (shard(tree, (*c.sharded, c.kind)), PlacementError, "for a mesh of"),
        "no mean": (shard(tree, (Partial("max"),) * c.ndim), PlacementError, "the reduction 'max'"),
    }
    if c.name == "tensor":
        out["no owners"] = (shard(tree, layout=ShardLayout.PADDED), LayoutError, "does not say who owns")
    if c.name == "block":
        odd = {"w": torch.ones(3, 2)}
        out["odd rows"] = (shard(odd, layout=ShardLayout.PADDED), LayoutError, "block_size")
    if c.ndim > 1 and c.name != "tensor":
        coarse = shard(tree, layout=c.layout_argument, dp_size=c.mesh_shape[-1])
        out["finer than planned"] = (coarse, LayoutError, "cannot shard 4 ways a layout that was planned for 2")
    return out


def call_unpack(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    return {f"at {name}": _later(dbuf.unpack, x["at"][name]) for name in _whole_names(c)}


def expect_unpack(c: Cell) -> dict[str, Any]:
    return {f"at {name}": reference.unpack(c.expected(c.stops[name])) for name in _whole_names(c)}


def refuse_unpack(c: Cell, x: dict[str, Any]) -> Refusals:
    return {
        name: (lambda buf=x["at"][name]: dbuf.unpack(buf), PlacementError, "holds contributions, not values")
        for name in _partial_names(c)
    }


def call_pack(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    rows, at = x["rows"], x["at"]
    return {
        "rows": lambda: dbuf.pack(rows, at[c.at_sharded]),
        "contributions": lambda: dbuf.pack(x["own tree"], at[c.at_partial]),
        "other dtype": lambda: dbuf.pack(pytree.tree_map(_to(c.other_dtype), rows), at[c.at_sharded]),
    }


def expect_pack(c: Cell) -> dict[str, Any]:
    rows = reference.unpack(c.expected(c.sharded))
    own = [c.tree("any", rank) for rank in range(c.ranks)]
    like = c.expected(c.sharded)
    return {
        "rows": reference.pack(rows, like),
        "contributions": reference.pack(own, c.expected(c.partial)),
        "other dtype": reference.pack(pytree.tree_map(_to(c.other_dtype), rows), like),
    }


def refuse_pack(c: Cell, x: dict[str, Any]) -> Refusals:
    rows, like = x["rows"], x["at"][c.at_sharded]
    wrong = {**rows, "wide": torch.ones(9, 9, dtype=c.dtype)}
    return {
        "wrong shape": (lambda: dbuf.pack(wrong, like), TreeError, r"\['wide'\]: \(9, 9\), should be"),
        "wrong tree": (lambda: dbuf.pack(rows["deep"], like), TreeError, "do not match the buffer"),
        "mixed dtypes": (
            lambda: dbuf.pack({**rows, "w": rows["w"].double()}, like),
            TreeError,
            "share one dtype",
        ),
    }


def _to(dtype: torch.dtype) -> Callable[[Any], Any]:
    return lambda leaf: None if leaf is None else leaf.to(dtype)


def call_select(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    out = {f"rule {name}": _later(dbuf.select, x["at"][name], keep) for name in _every_kind(c)}
    out["paths"] = _later(dbuf.select, x["at"][c.at_sharded], c.kept_paths)
    out["nothing"] = _later(dbuf.select, x["at"][c.at_sharded], ())
    return out


def expect_select(c: Cell) -> dict[str, Any]:
    out = {f"rule {name}": reference.select(c.expected(c.stops[name]), c.kept) for name in _every_kind(c)}
    out["paths"] = reference.select(c.expected(c.sharded), c.kept)
    out["nothing"] = reference.select(c.expected(c.sharded), [False] * len(c.kept))
    return out


def refuse_select(c: Cell, x: dict[str, Any]) -> Refusals:
    buf = x["at"][c.at_sharded]
    return {"no such path": (lambda: dbuf.select(buf, ["['v']"]), TreeError, r"no tensor has that path.*\['v'\]")}


def call_merge(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    return {"negated": _later(dbuf.merge, x["at"][c.at_sharded], x["part"])}


def expect_merge(c: Cell) -> dict[str, Any]:
    buf = c.expected(c.sharded)
    part = reference.select(buf, c.kept)
    negated = reference.Buffer(part.mesh_shape, part.placements, part.layout, part.tree, tuple(-x for x in part.locals))
    return {"negated": reference.merge(buf, c.kept, negated)}


def refuse_merge(c: Cell, x: dict[str, Any]) -> Refusals:
    buf, part = x["at"][c.at_sharded], x["part"]
    whole = x["at"][c.at_replicated]
    return {
        "part of another": (lambda: dbuf.merge(whole, part), PlacementError, "not a selection of this buffer"),
        "other dtype": (lambda: dbuf.merge(buf, dbuf.cast(part, c.other_dtype)), TreeError, "the dtypes differ"),
    }


def call_shapes(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    return {f"at {name}": _later(dbuf.shapes, x["at"][name]) for name in _every_kind(c)}


def expect_shapes(c: Cell) -> dict[str, Any]:
    return {f"at {name}": c.everywhere(reference.shapes(c.expected(c.stops[name]))) for name in _every_kind(c)}


def call_cast(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    bufs = {"a": x["at"][c.at_sharded], "b": [x["at"][c.at_replicated], x["at"][c.at_partial]]}
    return {
        "one": lambda: dbuf.cast(bufs["a"], c.other_dtype),
        "tree": lambda: dbuf.cast(bufs, c.other_dtype)["b"][0],
        "partial": lambda: dbuf.cast(bufs, c.other_dtype)["b"][1],
        "same": lambda: dbuf.cast(x["random"], c.dtype),
    }


def expect_cast(c: Cell) -> dict[str, Any]:
    return {
        "one": reference.cast(c.expected(c.sharded), c.other_dtype),
        "tree": reference.cast(c.expected(c.replicated), c.other_dtype),
        "partial": reference.cast(c.expected(c.partial), c.other_dtype),
        "same": c.expected(c.sharded, "random"),
    }


def refuse_check(c: Cell, x: dict[str, Any]) -> Refusals:
    if c.ranks == 1:
        return {}
    mine = x["tree"] if dist.get_rank() else {**x["tree"], "list": [torch.ones(8, dtype=c.dtype), None]}
    spread = dbuf.shard(mine, c.mesh, c.replicated)
    return {"ranks differ": (lambda: dbuf.check(spread), TreeError, r"ranks disagree.*\['list'\]\[0\]: \(8,\)")}


# movement


def call_move(function: str) -> Callable[[Cell, dict[str, Any]], dict[str, Any]]:
    def call(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
        move = getattr(dbuf, function)
        return {name: _later(move, x["at"][source], target) for name, source, target in c.moves[function]}

    return call


def expect_move(function: str) -> Callable[[Cell], dict[str, Any]]:
    def expect(c: Cell) -> dict[str, Any]:
        return {
            name: reference.redistribute(c.expected(c.stops[source]), target)
            for name, source, target in c.moves[function]
        }

    return expect


def call_allgather(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    sharded, whole = x["at"][c.at_sharded], x["at"][c.at_replicated]
    tree, specs = {"a": sharded, "b": [whole]}, {"a": c.replicated, "b": c.replicated}
    return {
        **call_move("allgather")(c, x),
        "default": lambda: dbuf.allgather(sharded),
        "other wire": lambda: dbuf.allgather(sharded, dtype=c.other_dtype, grad_dtype=torch.float32),
        "tree": lambda: dbuf.allgather(tree, specs)["a"],
        "identity": lambda: dbuf.allgather(tree, specs)["b"][0],
    }


def expect_allgather(c: Cell) -> dict[str, Any]:
    sharded = c.expected(c.sharded)
    return {
        **expect_move("allgather")(c),
        "default": reference.allgather(sharded),
        "other wire": reference.allgather(sharded, c.other_dtype),
        "tree": reference.allgather(sharded),
        "identity": c.expected(c.replicated),
    }


def call_reduce_scatter(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    partial = x["at"][c.at_partial]
    return {
        **call_move("reduce_scatter")(c, x),
        "other wire": lambda: dbuf.reduce_scatter(partial, c.sharded, dtype=c.other_dtype),
        "about random": lambda: dbuf.reduce_scatter(x["random partial"], c.sharded),
        "about random average": lambda: dbuf.reduce_scatter(x["random average"], c.sharded),
    }


def expect_reduce_scatter(c: Cell) -> dict[str, Any]:
    average = (Partial("avg"),) * c.ndim
    return {
        **expect_move("reduce_scatter")(c),
        "other wire": reference.reduce_scatter(c.expected(c.partial), c.sharded, c.other_dtype),
        "about random": reference.reduce_scatter(c.expected(c.partial, "random"), c.sharded),
        "about random average": reference.reduce_scatter(c.expected(average, "random"), c.sharded),
    }


def call_allreduce(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    return {
        **call_move("allreduce")(c, x),
        "default": lambda: dbuf.allreduce(x["at"][c.at_partial]),
        "about random": lambda: dbuf.allreduce(x["random partial"]),
        "about random average": lambda: dbuf.allreduce([x["random average"]])[0],
    }


def expect_allreduce(c: Cell) -> dict[str, Any]:
    average = (Partial("avg"),) * c.ndim
    return {
        **expect_move("allreduce")(c),
        "default": reference.allreduce(c.expected(c.partial)),
        "about random": reference.allreduce(c.expected(c.partial, "random")),
        "about random average": reference.allreduce(c.expected(average, "random")),
    }


def call_redistribute(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    out = call_move("redistribute")(c, x)
    for name, source, target, layout in c.relayouts:
        out[name] = _later(_relayout, x["at"][source], target, layout, name.startswith("about"))
    if c.name == "block":
        out["to rows -> to blocks"] = _later(_to_rows_and_back, c, x["at"][c.at_sharded])
    return out


def _relayout(buf: DBuffer, placements: Any, layout: Any, only_the_sum: bool) -> DBuffer:
    moved = dbuf.redistribute(buf, placements, layout=layout)
    return dbuf.allreduce(moved) if only_the_sum else moved


def _to_rows_and_back(c: Cell, buf: DBuffer) -> DBuffer:
    rows = dbuf.redistribute(buf, (RowAtomic(),) * c.ndim, layout=c.relayouts[0][3])
    return dbuf.redistribute(rows, c.sharded, layout=ShardLayout.PADDED)


def expect_redistribute(c: Cell) -> dict[str, Any]:
    out = expect_move("redistribute")(c)
    for name, source, target, layout in c.relayouts:
        moved = reference.redistribute(c.expected(c.stops[source]), target, layout)
        out[name] = reference.allreduce(moved) if name.startswith("about") else moved
    if c.name == "block":
        out["to rows -> to blocks"] = c.expected(c.sharded)
    return out


def refuse_move(function: str) -> Callable[[Cell, dict[str, Any]], Refusals]:
    """Every legal change that holds anything but rows of this name is refused."""

    def refuse(c: Cell, x: dict[str, Any]) -> Refusals:
        move, out = getattr(dbuf, function), {}
        for (name, a), (other, b) in itertools.product(c.stops.items(), repeat=2):
            if c.ndim > 1 and (Partial("avg") in a or Partial("avg") in b):
                continue
            if _is_legal(a, b) and not _made_of(a, b, PURE[function]):
                call = functools.partial(move, x["at"][name], b)
                out[f"{name} -> {other}"] = (call, PlacementError, rf"dbuf.{function}: .*cannot go {re.escape(name)}")
        tensors = functools.partial(move, {"w": x["number"]}, c.replicated)
        out["no buffer"] = (tensors, TreeError, r"not every leaf is a DBuffer.*\['w'\]: Tensor")
        return out

    return refuse


def refuse_redistribute(c: Cell, x: dict[str, Any]) -> Refusals:
    at, average = x["at"], (Partial("avg"),) * c.ndim
    sharded, partial = at[c.at_sharded], at[c.at_partial]
    other = dbuf.plan_row_atomic([(3, 2)], c.ranks)

    def call(buf: DBuffer, placements: Any, layout: Any = None) -> Callable[[], Any]:
        return lambda: dbuf.redistribute({"a": [buf]}, placements, layout=layout)

    change = "a partial value cannot change its reduction"
    out = {
        "sum to avg": (call(partial, average), PlacementError, rf"bufs\['a'\]\[0\] {change}"),
        "avg to sum": (call(at[describe(average)], c.partial), PlacementError, change),
        "other tensors": (call(sharded, c.sharded, other), LayoutError, "planned for other tensors"),
        "no owners": (call(sharded, (TensorAtomic(),) * c.ndim, "padded"), LayoutError, "does not say who owns"),
        "not a prefix": (call(sharded, {"b": c.sharded}), TreeError, "not a prefix"),
        "torch's shard": (
            call(sharded, (torch.distributed.tensor.Shard(0),) * c.ndim),
            PlacementError,
            "torch's Shard",
        ),
    }
    if not c.layout.admits(TensorAtomic()):
        wants = (TensorAtomic(),) * c.ndim
        out["does not fit"] = (call(sharded, wants), LayoutError, r"the layout does not fit TensorAtomic\(\)")
    return out


def _every_kind(c: Cell) -> list[str]:
    return [*_whole_names(c), c.at_partial]


def _whole_names(c: Cell) -> list[str]:
    return [c.at_sharded, c.at_replicated] + ([c.at_inner] if c.ndim > 1 else [])


def _partial_names(c: Cell) -> list[str]:
    return [name for name, placements in c.stops.items() if any(map(_is_partial, placements))]


# reductions


def call_norms(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    names = ("small", "small replicated", "small inner", "dirty", "random")
    return {f"about {name}": _later(dbuf.norms, x[name]) for name in names}


def expect_norms(c: Cell) -> dict[str, Any]:
    small = c.everywhere(reference.norms(c.expected(c.replicated, "small")))
    random = c.everywhere(reference.norms(c.expected(c.sharded, "random")))
    names = ("small", "small replicated", "small inner", "dirty")
    return {f"about {name}": small for name in names} | {"about random": random}


def call_global_norm(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    return {
        "about one": lambda: dbuf.global_norm(x["small"]),
        "about replicas": lambda: dbuf.global_norm([x["small replicated"], {"b": x["small inner"]}]),
        "about padding": lambda: dbuf.global_norm(x["dirty"]),
        "about random": lambda: dbuf.global_norm((x["random"], x["small replicated"])),
    }


def expect_global_norm(c: Cell) -> dict[str, Any]:
    small, random = c.expected(c.sharded, "small"), c.expected(c.sharded, "random")
    return {
        "about one": c.everywhere(reference.global_norm(small)),
        "about replicas": c.everywhere(reference.global_norm(small, small)),
        "about padding": c.everywhere(reference.global_norm(small)),
        "about random": c.everywhere(reference.global_norm(random, small)),
    }


def call_vdot(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    return {
        "small": lambda: dbuf.vdot(x["small"], x["dirty"]),
        "replicated": lambda: dbuf.vdot([x["small replicated"]], [x["small replicated"]]),
        "about random": lambda: dbuf.vdot(x["random"], x["random"]),
    }


def expect_vdot(c: Cell) -> dict[str, Any]:
    small, random = c.expected(c.sharded, "small"), c.expected(c.sharded, "random")
    value = c.everywhere(reference.vdot(small, small))
    return {"small": value, "replicated": value, "about random": c.everywhere(reference.vdot(random, random))}


def refuse_norm(function: str) -> Callable[[Cell, dict[str, Any]], Refusals]:
    def refuse(c: Cell, x: dict[str, Any]) -> Refusals:
        norm = getattr(dbuf, function)
        arguments = 2 if function == "vdot" else 1
        out = {
            name: (functools.partial(norm, *[x["at"][name]] * arguments), PlacementError, "holds contributions")
            for name in _partial_names(c)
        }
        if function == "vdot":
            other = functools.partial(norm, x["small"], x["small replicated"])
            out["other specs"] = (other, PlacementError, "the two trees are laid out differently")
        if function == "global_norm":
            out["a tensor"] = (functools.partial(norm, [x["number"]]), TreeError, "not every leaf is a DBuffer")
        return out

    return refuse


def call_all_finite(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    return {
        "finite": lambda: dbuf.all_finite([x["small"], x["small replicated"], x["at"][c.at_partial]]),
        "padding does not count": lambda: dbuf.all_finite(x["dirty"]),
        "one rank has it": lambda: dbuf.all_finite({"a": x["small"], "b": x["at"][c.at_sharded]}),
        "replicated": lambda: dbuf.all_finite(x["at"][c.at_replicated]),
    }


def expect_all_finite(c: Cell) -> dict[str, Any]:
    small, bad = c.expected(c.sharded, "small"), c.expected(c.sharded)
    return {
        "finite": c.everywhere(reference.all_finite(small, c.expected(c.partial))),
        "padding does not count": c.everywhere(reference.all_finite(small)),
        "one rank has it": c.everywhere(reference.all_finite(small, bad)),
        "replicated": c.everywhere(reference.all_finite(bad)),
    }


def call_sum(function: str) -> Callable[[Cell, dict[str, Any]], dict[str, Any]]:
    def call(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
        reduce = getattr(dbuf, function)
        out = {f"numbers over {axis}": _later(reduce, x["numbers"], c.mesh, axis) for axis in range(c.ndim)}
        out["numbers"] = lambda: reduce(x["numbers"], c.mesh)
        out["about number"] = lambda: reduce(x["number"] * 0.3, c.mesh)
        return out

    return call


def expect_sum(function: str) -> Callable[[Cell], dict[str, Any]]:
    def expect(c: Cell) -> dict[str, Any]:
        reduce, every = getattr(reference, function), range(c.ndim)
        numbers = [torch.tensor([[1.0, -2.0], [0.0, 12.0]], dtype=c.dtype) * (rank + 1) for rank in range(c.ranks)]
        number = [torch.tensor(0.3 * (rank + 1), dtype=c.dtype) for rank in range(c.ranks)]
        out = {f"numbers over {axis}": reduce(numbers, c.mesh_shape, [axis]) for axis in every}
        out["numbers"] = reduce(numbers, c.mesh_shape, every)
        out["about number"] = reduce(number, c.mesh_shape, every)
        return out

    return expect


def refuse_sum(function: str) -> Callable[[Cell, dict[str, Any]], Refusals]:
    def refuse(c: Cell, x: dict[str, Any]) -> Refusals:
        call = functools.partial(getattr(dbuf, function), x["number"], c.mesh, "tp")
        return {"no such axis": (call, PlacementError, r"no such mesh axis.*\['tp'\]")}

    return refuse


# transforms: the loss is a sum, so with whole numbers and reduction="sum" gradients are exact in bf16


def loss(tree: Any, number: torch.Tensor) -> torch.Tensor:
    """Of some tensors: autograd keeps the first, and the others that it does not read get zeros."""
    tensors = [tensor for tensor in pytree.tree_leaves(tree) if tensor is not None]
    return (tensors[0] * tensors[0]).sum() + (tensors[1] * number).sum() + tensors[3].sum()


def loss_of_buffer(buf: DBuffer, number: torch.Tensor) -> torch.Tensor:
    return loss(dbuf.unpack(dbuf.allgather(buf)), number)


def _gradients(function: Callable[..., Any], c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    """Losses and gradients of sharded, replicated and partly sharded buffers."""
    whole = dbuf.value_and_grad(function, reduction="sum")
    mean = dbuf.value_and_grad(function)
    return {
        "sharded": lambda: _named(whole(x["small"], x["number"])),
        "replicated": lambda: _named(whole(x["small replicated"], x["number"])),
        "inner": lambda: _named(whole(x["small inner"], x["number"])),
        "about mean": lambda: _named(mean(x["random"], x["number"])),
    }


def _named(loss_and_gradient: tuple[Any, Any]) -> dict[str, Any]:
    return {"about loss": loss_and_gradient[0], "gradient": loss_and_gradient[1]}


def expect_gradients(c: Cell) -> dict[str, Any]:
    def of(placements: Any, kind: str, reduction: str) -> list[Any]:
        numbers = [torch.tensor(rank + 1.0) for rank in range(c.ranks)]
        values, grads = reference.value_and_grad(loss, c.expected(placements, kind), numbers, reduction)
        return [_named((v, _entry(g, grads))) for v, g in zip(values, grads.locals, strict=True)]

    return {
        "sharded": of(c.sharded, "small", "sum"),
        "replicated": of(c.replicated, "small", "sum"),
        "inner": of(c.inner, "small", "sum"),
        "about mean": of(c.sharded, "random", "mean"),
    }


def _gradients_of(rows: list[Any]) -> list[Any]:
    return [row["gradient"] for row in rows]


def call_value_and_grad(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    def of_used(bufs: dict[str, Any], number: torch.Tensor) -> torch.Tensor:
        return loss_of_buffer(bufs["used"], number)

    def of_reduced(buf: DBuffer, number: torch.Tensor) -> torch.Tensor:
        return loss_of_buffer(dbuf.allreduce(buf), number)

    both = dbuf.value_and_grad(of_used, reduction="sum")
    partial = dbuf.value_and_grad(of_reduced, reduction="sum")
    bufs = {"used": x["small"], "unused": [x["at"][c.at_replicated]]}
    return {
        **_gradients(loss_of_buffer, c, x),
        "used": lambda: both(bufs, x["number"])[1]["used"],
        "unused": lambda: both(bufs, x["number"])[1]["unused"][0],
        "partial": lambda: partial(x["at"][c.at_partial], x["number"])[1],
    }


def expect_value_and_grad(c: Cell) -> dict[str, Any]:
    numbers = [torch.tensor(rank + 1.0) for rank in range(c.ranks)]
    out = expect_gradients(c)
    zeros = fill([torch.zeros(shape, dtype=c.dtype) for shape in c.shapes])
    _, own = reference.value_and_grad(loss, reference.allreduce(c.expected(c.partial)), numbers, "sum")
    return {
        **out,
        "used": _gradients_of(out["sharded"]),
        "unused": reference.shard(zeros, c.mesh_shape, c.partial, c.layout),
        "partial": reference.allreduce(own),
    }


def refuse_value_and_grad(function: str) -> Callable[[Cell, dict[str, Any]], Refusals]:
    def refuse(c: Cell, x: dict[str, Any]) -> Refusals:
        differentiate, number, buf = getattr(dbuf, function), x["number"], x["small"]
        return {
            "a tensor": (
                lambda: differentiate(loss_of_buffer, argnums=1)(buf, number),
                TreeError,
                "may hold floating DBuffers alone.*the argument: Tensor",
            ),
            "no scalar": (
                lambda: differentiate(lambda buf: buf.local * 2)(buf),
                TreeError,
                "the loss is not a floating scalar",
            ),
            "no such reduction": (
                lambda: differentiate(loss_of_buffer, reduction="max"),
                dbuf.DbufError,
                "no such reduction.*'max'",
            ),
        }

    return refuse


def call_grad(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    def with_aux(number: torch.Tensor, buf: DBuffer) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return loss_of_buffer(buf, number), {"twice": number * 2}

    second = dbuf.grad(with_aux, argnums=1, has_aux=True, reduction="sum")
    several = dbuf.grad(with_aux, argnums=(1,), has_aux=True)
    return {
        "gradient and aux": lambda: list(second(x["number"], x["small"])),
        "about mean": lambda: several(x["number"], x["random"])[0][0],
    }


def expect_grad(c: Cell) -> dict[str, Any]:
    out = expect_gradients(c)
    aux = [{"twice": torch.tensor(2.0 * (rank + 1), dtype=c.dtype)} for rank in range(c.ranks)]
    pairs = [list(pair) for pair in zip(_gradients_of(out["sharded"]), aux, strict=True)]
    return {"gradient and aux": pairs, "about mean": _gradients_of(out["about mean"])}


def call_gathered(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    wire = dbuf.value_and_grad(dbuf.gathered(loss, dtype=torch.bfloat16), reduction="sum")
    twice = dbuf.gathered(lambda trees: pytree.tree_map(lambda t: None if t is None else t * 2, trees))
    return {
        **_gradients(dbuf.gathered(loss), c, x),
        "bf16 wire": lambda: wire(x["small"], x["number"].bfloat16())[1],
        "tensors": lambda: twice({"a": x["small"], "b": x["small inner"]}),
    }


def expect_gathered(c: Cell) -> dict[str, Any]:
    out = expect_gradients(c)
    doubled = fill([2 * tensor for tensor in _tensors(c.shapes, c.dtype, "small", 0)])
    tensors = c.everywhere({"a": doubled, "b": doubled})
    return {**out, "bf16 wire": _gradients_of(out["sharded"]), "tensors": tensors}


def refuse_gathered(c: Cell, x: dict[str, Any]) -> Refusals:
    buf, number = x["at"][c.at_partial], x["number"]
    return {"partial": (lambda: dbuf.gathered(loss)(buf, number), PlacementError, "holds contributions")}


def call_remat(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    inside = dbuf.grad(dbuf.gathered(dbuf.remat(loss)), reduction="sum")
    return {
        **_gradients(dbuf.remat(dbuf.gathered(loss)), c, x),
        "inside": lambda: inside(x["small"], x["number"]),
    }


def expect_remat(c: Cell) -> dict[str, Any]:
    out = expect_gradients(c)
    return {**out, "inside": _gradients_of(out["sharded"])}


# jit and what stands around a step


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
        doubled, number = _entry(2 * local, small), torch.tensor(rank + 2.0, dtype=c.dtype)
        if c.compiled:
            more = {"in the old memory": True, "compiles": 1}
        else:
            more = {"argument": _entry(local, small), "compiles": 0}
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
    entries = [_entry(local, gathered) for local in gathered.locals]
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


def call_check(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    return {"agree": lambda: dbuf.check([x["at"], x["small"]])}


def expect_check(c: Cell) -> dict[str, Any]:
    return {"agree": c.everywhere(None)}


def call_init_mesh(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    def describe_mesh(*arguments: Any) -> list[Any]:
        mesh = dbuf.init_mesh(*arguments)
        return [mesh.mesh_dim_names, tuple(mesh.shape), tuple(mesh.get_coordinate())]

    return {"flat": describe_mesh, "deep": _later(describe_mesh, ("a", "b", "c"), (1, -1, 1))}


def expect_init_mesh(c: Cell) -> dict[str, Any]:
    ranks = range(c.ranks)
    return {
        "flat": [[("dp",), (c.ranks,), (rank,)] for rank in ranks],
        "deep": [[("a", "b", "c"), (1, c.ranks, 1), (0, rank, 0)] for rank in ranks],
    }


def refuse_init_mesh(c: Cell, x: dict[str, Any]) -> Refusals:
    return {
        "too many": (lambda: dbuf.init_mesh(("dp",), (5,)), PlacementError, "does not cover the processes"),
        "too few": (lambda: dbuf.init_mesh(("a", "b"), (c.ranks,)), PlacementError, "one size an axis"),
    }


def call_plan_row_atomic(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    if c.name == "row unpadded":
        return {"layout": lambda: _integers(_plan(c.name, c.shapes, c.ranks))}
    return {"laws": lambda: _laws(_plan(c.name, c.shapes, c.ranks), 2 if c.name == "block" else 1)}


def expect_plan_row_atomic(c: Cell) -> dict[str, Any]:
    if c.name != "row unpadded":
        return {"laws": c.everywhere(dict.fromkeys(("equal", "apart", "whole rows"), True))}
    numels = [math.prod(shape) for shape in c.shapes]
    offsets = [sum(numels[:i]) for i in range(len(numels))]
    legal = {sum(numels)}
    for offset, numel, shape in zip(offsets, numels, c.shapes, strict=True):
        legal |= set(range(offset, offset + numel, math.prod(shape[1:])))
    size = sum(numels)
    cuts = [min(sorted(legal), key=lambda cut: abs(cut * c.ranks - r * size)) for r in range(c.ranks)]
    return {"layout": c.everywhere([tuple(offsets), size, tuple(cuts)])}


def refuse_plan_row_atomic(c: Cell, x: dict[str, Any]) -> Refusals:
    plan = functools.partial(dbuf.plan_row_atomic, c.shapes)
    return {
        "no ranks": (lambda: plan(0), LayoutError, "dp_size is not a positive int"),
        "odd rows": (lambda: dbuf.plan_row_atomic([(3, 2)], 1, block_size=2), LayoutError, "block_size"),
        "no such layout": (lambda: plan(1, shard_layout="tight"), PlacementError, "no such layout.*'tight'"),
    }


def call_plan_tensor_atomic(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    plan = functools.partial(dbuf.plan_tensor_atomic, c.shapes, c.ranks, tensor_owners=_owners(c.ranks))
    return {
        "unpadded": lambda: _integers(plan()),
        "padded": lambda: _integers(plan(shard_layout=ShardLayout.PADDED)),
    }


def expect_plan_tensor_atomic(c: Cell) -> dict[str, Any]:
    owners, numels = _owners(c.ranks), [math.prod(shape) for shape in c.shapes]
    loads = [sum(n for n, owner in zip(numels, owners, strict=True) if owner == k) for k in range(c.ranks)]
    out = {}
    for name, segments in (("unpadded", loads), ("padded", [max(loads)] * c.ranks)):
        cuts = [sum(segments[:k]) for k in range(c.ranks)]
        before = [
            sum(n for n, o in zip(numels[:t], owners, strict=False) if o == owners[t]) for t in range(len(numels))
        ]
        offsets = [cuts[owner] + start for owner, start in zip(owners, before, strict=True)]
        out[name] = c.everywhere([tuple(offsets), sum(segments), tuple(cuts)])
    return out


def refuse_plan_tensor_atomic(c: Cell, x: dict[str, Any]) -> Refusals:
    plan = functools.partial(dbuf.plan_tensor_atomic, c.shapes, c.ranks)
    return {
        "too few": (lambda: plan(tensor_owners=[0]), LayoutError, "owners and shapes do not pair up"),
        "no segment": (lambda: plan(tensor_owners=[c.ranks] * 6), LayoutError, "6 of 6 owners are not segments"),
    }


def _integers(layout: Any) -> list[Any]:
    return [layout.tensor_to_offset, layout.size, layout.rank_to_offset]


def _laws(layout: Any, block_size: int) -> dict[str, bool]:
    spans = sorted(span for span in reference.spans_of_tensors(layout) if span[0] < span[1])
    bounds = (*layout.rank_to_offset, layout.size)
    whole = True
    for (start, stop), shape in zip(reference.spans_of_tensors(layout), layout.tensor_shapes, strict=True):
        unit = block_size * math.prod(shape[1:])
        whole &= all((cut - start) % unit == 0 for cut in bounds if start < cut < stop)
    return {
        "equal": len({b - a for a, b in itertools.pairwise(bounds)}) == 1,
        "apart": all(a[1] <= b[0] for a, b in itertools.pairwise(spans)) and spans[-1][1] <= layout.size,
        "whole rows": whole,
    }


def call_changed_mesh_axis(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    return {
        "the last": lambda: dbuf.changed_mesh_axis(c.inner, c.replicated),
        "none": lambda: dbuf.changed_mesh_axis(c.sharded, c.sharded),
    }


def expect_changed_mesh_axis(c: Cell) -> dict[str, Any]:
    return {"the last": c.everywhere(c.ndim - 1), "none": c.everywhere(None)}


def refuse_changed_mesh_axis(c: Cell, x: dict[str, Any]) -> Refusals:
    call, two = dbuf.changed_mesh_axis, (c.kind, c.kind)
    return {
        "two": (lambda: call(two, (Replicate(), Replicate())), PlacementError, "differ on 2 mesh axes"),
        "lengths": (lambda: call((c.kind,), two), PlacementError, "meshes of different sizes"),
    }


def _move(function: str, call: Any = None, expect: Any = None, program: tuple[str, ...] = ()) -> Row:
    return Row(call or call_move(function), expect or expect_move(function), refuse_move(function), program)


ROWS: dict[str, Row] = {
    "shard": Row(call_shard, expect_shard, refuse_shard, ("sharded",)),
    "unpack": Row(call_unpack, expect_unpack, refuse_unpack),
    "pack": Row(call_pack, expect_pack, refuse_pack, ("rows",)),
    "select": Row(call_select, expect_select, refuse_select, ("paths",)),
    "merge": Row(call_merge, expect_merge, refuse_merge, ("negated",)),
    "shapes": Row(call_shapes, expect_shapes),
    "cast": Row(call_cast, expect_cast, program=("one",)),
    "check": Row(call_check, expect_check, refuse_check, how=""),
    "allgather": _move("allgather", call_allgather, expect_allgather, ("other wire",)),
    "reduce_scatter": _move("reduce_scatter", call_reduce_scatter, expect_reduce_scatter, ("about random",)),
    "allreduce": _move("allreduce", call_allreduce, expect_allreduce),
    "view": _move("view"),
    "redistribute": Row(call_redistribute, expect_redistribute, refuse_redistribute),
    "norms": Row(call_norms, expect_norms, refuse_norm("norms"), ("about dirty",)),
    "global_norm": Row(call_global_norm, expect_global_norm, refuse_norm("global_norm"), ("about padding",)),
    "vdot": Row(call_vdot, expect_vdot, refuse_norm("vdot"), ("small",)),
    "all_finite": Row(call_all_finite, expect_all_finite, program=("one rank has it",)),
    "psum": Row(call_sum("psum"), expect_sum("psum"), refuse_sum("psum"), ("numbers",)),
    "pmean": Row(call_sum("pmean"), expect_sum("pmean"), refuse_sum("pmean"), ("numbers",)),
    "value_and_grad": Row(
        call_value_and_grad,
        expect_value_and_grad,
        refuse_value_and_grad("value_and_grad"),
        ("sharded",),
        how="jit",
    ),
    "grad": Row(call_grad, expect_grad, refuse_value_and_grad("grad"), ("gradient and aux",), how="jit"),
    "gathered": Row(call_gathered, expect_gathered, refuse_gathered, ("sharded",), how="jit"),
    "remat": Row(call_remat, expect_remat, program=("sharded",), how="jit"),
    "jit": Row(call_jit, expect_jit, refuse_jit, how="", all_at_once=jit_all),
    "inspect": Row(lambda c, x: {}, expect_inspect, refuse_inspect, how="", all_at_once=inspect_all),
    "disable_jit": Row(call_disable_jit, expect_disable_jit, how=""),
    "init_mesh": Row(call_init_mesh, expect_init_mesh, refuse_init_mesh, how=""),
    "plan_row_atomic": Row(call_plan_row_atomic, expect_plan_row_atomic, refuse_plan_row_atomic, how=""),
    "plan_tensor_atomic": Row(call_plan_tensor_atomic, expect_plan_tensor_atomic, refuse_plan_tensor_atomic, how=""),
    "changed_mesh_axis": Row(call_changed_mesh_axis, expect_changed_mesh_axis, refuse_changed_mesh_axis, how=""),
}

# --- the tests --------------------------------------------------------------------------------------------


@functools.cache
def results(mode: str, mesh_shape: tuple[int, ...]) -> list[Any]:
    """What `run_cells` returned on each rank."""
    return dbuf.testing.run(run_cells, mode, mesh_shape, world_size=math.prod(mesh_shape), timeout_s=600)


def expectation(row: Row, c: Cell) -> list[dict[str, Any]]:
    """By rank, what the row's results are in a cell."""
    named = row.expect(c)
    out = []
    for rank in range(c.ranks):
        of_rank = {}
        for name, value in named.items():
            if not row.runs(name, c):
                continue
            if isinstance(value, reference.Buffer):
                of_rank[name] = _entry(value.locals[rank], value)
            else:
                of_rank[name] = value[rank]
        out.append(of_rank)
    return out


def compare(got: Any, expected: Any, where: str, about: bool = False) -> None:
    """Bit by bit, except what stands below a name that says "about"."""
    if isinstance(expected, dict) and isinstance(got, dict):
        assert list(got) == list(expected), where
        for name, value in expected.items():
            compare(got[name], value, f"{where}, {name!r}", about or str(name).startswith("about"))
        return
    try:
        (assert_close if about else assert_bitwise)(got, expected)
    except AssertionError as error:
        raise AssertionError(f"{where}: {error}") from None


def compare_refusal(raised: tuple[str, str], expected: tuple[str, str], where: str) -> None:
    assert raised[0] == expected[0], f"{where}: {raised[0]} instead of {expected[0]}\n{raised[1]}"
    assert re.search(expected[1], raised[1], re.DOTALL), f"{where}: no {expected[1]!r} in\n{raised[1]}"


COLUMNS = [
    pytest.param(
        mode,
        mesh_shape,
        marks=[] if (mode, mesh_shape) in QUICK else [pytest.mark.slow],
        id=f"{mode}-{'x'.join(map(str, mesh_shape))}",
    )
    for mode, mesh_shape in NUM_REFUSED
]


@pytest.mark.parametrize("mode, mesh_shape", COLUMNS)
@pytest.mark.parametrize("function", ROWS)
def test_cells(function: str, mode: str, mesh_shape: tuple[int, ...]) -> None:
    for c in cells(mode, mesh_shape):
        if reason_to_leave_out(function, c):
            continue
        expected_of_rank = expectation(ROWS[function], c)
        for rank, (found, refusals) in enumerate(results(mode, mesh_shape)):
            where = f"{function}, {mode}, {c.key}, rank {rank} of {mesh_shape}"
            assert expected_of_rank[rank], f"{where}: nothing is compared"
            compare(found[function][c.key], expected_of_rank[rank], where)
            for label, (raised, expected) in refusals[function][c.key].items():
                compare_refusal(raised, expected, f"{where}, {label!r}")


@pytest.mark.parametrize("mode, mesh_shape", COLUMNS)
def test_refused_calls_are_counted(mode: str, mesh_shape: tuple[int, ...]) -> None:
    for _, refusals in results(mode, mesh_shape):
        found = [len(of_cell) for of_row in refusals.values() for of_cell in of_row.values()]
        assert sum(found) == NUM_REFUSED[mode, mesh_shape]


def test_every_public_function_has_a_row() -> None:
    assert set(ROWS) == _public(dbuf)
    namespace = dict(vars(dbuf), __all__=[*dbuf.__all__, "new"], new=lambda bufs: bufs)
    assert set(ROWS) != _public(types.SimpleNamespace(**namespace))


def _public(module: Any) -> set[str]:
    return {name for name in module.__all__ if inspect.isfunction(getattr(module, name))}


def test_cells_left_out_are_counted_and_have_a_reason() -> None:
    every = [(f, c) for f in ROWS for mode in MODES for mesh in MESHES for c in cells(mode, mesh)]
    reasons = [reason_to_leave_out(f, c) for f, c in every]
    assert len([reason for reason in reasons if reason]) == NUM_LEFT_OUT
    assert reasons.count(None) == NUM_RUN
    assert all(reason in reasons for _, reason, _ in LEFT_OUT)


# The row of `inspect` has compiled cells alone.
CAN_FAIL = [pytest.param(f, marks=[pytest.mark.slow] if f == "inspect" else []) for f in ROWS]


@pytest.mark.parametrize("function", CAN_FAIL)
def test_every_row_can_fail(function: str) -> None:
    """Each leaf of what is expected, changed on its own, is noticed; so is a call that is not refused, or otherwise."""
    mode = "compiled" if function == "inspect" else "eager"
    c = next(c for c in cells(mode, (2,)) if reason_to_leave_out(function, c) is None)
    expected = expectation(ROWS[function], c)[0]
    mutants = list(_mutants(expected))
    assert mutants
    for mutant in mutants:
        with pytest.raises(AssertionError):
            compare(expected, mutant, function)
    _, refusals = results(mode, (2,))[0]
    for raised, wanted in refusals[function][c.key].values():
        for other in (("nothing", ""), (raised[0], "another message"), ("KeyError", raised[1])):
            with pytest.raises(AssertionError):
                compare_refusal(other, wanted, function)


def _mutants(tree: Any) -> Iterator[Any]:
    leaves, spec = pytree.tree_flatten(tree)
    for i, leaf in enumerate(leaves):
        changed = _changed(leaf)
        if changed is not None:
            yield pytree.tree_unflatten([*leaves[:i], changed, *leaves[i + 1 :]], spec)


def _changed(leaf: Any) -> Any:
    """Another value of the same type, or None where there is none: a tensor without elements."""
    if isinstance(leaf, torch.Tensor):
        if not leaf.numel():
            return None
        other = leaf.clone()
        other.view(-1)[0] = not leaf.view(-1)[0] if leaf.dtype is torch.bool else 1000.0
        return other
    if isinstance(leaf, bool):
        return not leaf
    if isinstance(leaf, str):
        return leaf + "!"
    return 7 if leaf is None else leaf + 1
