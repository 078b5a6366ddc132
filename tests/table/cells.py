"""One mode, mesh, layout and dtype: the constants of a cell, its data, and which moves are legal there."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import torch
from torch.utils import _pytree as pytree

import dbuf
import reference
from dbuf import BlockAtomic, Partial, Replicate, RowAtomic, ShardLayout, TensorAtomic
from dbuf.placement import describe, is_sharded

MODES = ("eager", "compiled")
MESHES = ((1,), (2,), (3,), (4,), (2, 2))
LAYOUTS = ("row padded", "row unpadded", "block", "tensor")
DTYPES = (torch.float32, torch.bfloat16)

# Elsewhere compiled programs are run operation by operation, as the graphs that Inductor would make kernels of.
KERNELS_AT = ((2,),)

# Hundreds of cells in one program: the search for fusions is the shorter one.
OPTIONS = {"max_fusion_buffer_group_pairwise_attempts": 2}

# Leaves are indices of shapes. Odd sizes, a scalar, an empty tensor, a None, and a row so long that some rank owns
# nothing of an UNPADDED buffer (3 and 4 ranks), or nothing but padding of a PADDED one.
TREE = {"wide": 0, "w": 1, "list": [2, None], "deep": {"pair": (3, 4), "b": 5}}
ROW_SHAPES = ((1, 80), (5, 3), (7,), (), (0, 3), (3, 4))
BLOCK_SHAPES = ((2, 40), (6, 3), (4,), (2,), (0, 3), (2, 5))  # blocks of two rows: no scalar, even numbers of rows

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


class Cell:
    """One mode, mesh, layout and dtype: what a row's call and expectation need, all of it constants."""

    def __init__(self, mode: str, mesh_shape: tuple[int, ...], name: str, dtype: torch.dtype, mesh: Any = None) -> None:
        self.compiled = mode == "compiled"
        self.mesh_shape, self.name, self.dtype, self.mesh = mesh_shape, name, dtype, mesh
        self.key = f"{name} {dtype}"
        self.ranks, self.ndim = math.prod(mesh_shape), len(mesh_shape)
        self.kind = {"block": BlockAtomic(2), "tensor": TensorAtomic()}.get(name, RowAtomic())
        self.shapes = BLOCK_SHAPES if name == "block" else ROW_SHAPES
        self.layout = plan_layout(name, self.shapes, self.ranks)
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
        pairs = [(a, b) for a in self.stops.values() for b in self.stops.values() if is_legal(a, b)]
        if function != "redistribute":
            pairs = [(a, b) for a, b in pairs if a != b and is_made_of(a, b, PURE[function])]
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
                free = any(is_sharded(x) and is_partial(y) for x, y in zip(a, b, strict=True))
                name = f"{'about ' if free else ''}{describe(a)} -> {describe(b)} {label}"
                if is_legal(a, b):
                    moves.append((name, describe(a), b, layout))
        return tuple(dict((move[0], move) for move in moves).values())

    # -- some of the stops ---------------------------------------------------------------------------------

    @property
    def whole_names(self) -> list[str]:
        return [self.at_sharded, self.at_replicated] + ([self.at_inner] if self.ndim > 1 else [])

    @property
    def partial_names(self) -> list[str]:
        return [name for name, placements in self.stops.items() if any(map(is_partial, placements))]

    @property
    def every_kind(self) -> list[str]:
        return [*self.whole_names, self.at_partial]

    # -- what the oracle starts from ----------------------------------------------------------------------

    @property
    def coordinates(self) -> list[tuple[int, ...]]:
        return reference.coordinates(self.mesh_shape)

    def tree(self, kind: str, seed: int = 0) -> Any:
        return fill(make_tensors(self.shapes, self.dtype, kind, seed))

    def contributions(self, placements: tuple[Any, ...], kind: str) -> list[Any]:
        """One tree a rank, which differ along partial axes alone."""
        return [self.tree(kind, seed_of(placements, coordinate)) for coordinate in self.coordinates]

    @functools.cache  # noqa: B019  (one buffer serves many rows, and the cells are kept anyway)
    def expected(self, placements: tuple[Any, ...], kind: str = "") -> reference.Buffer:
        """What the buffer `inputs` holds at these placements."""
        has_partial = any(isinstance(p, Partial) for p in placements)
        kind = kind or ("whole" if has_partial else "any")
        return reference.shard(self.contributions(placements, kind), self.mesh_shape, placements, self.layout)

    def everywhere(self, value: Any) -> list[Any]:
        return [value] * self.ranks


def keep(path: str) -> bool:
    """The rule of `select`."""
    return "list" in path or "deep" in path


def fill(tensors: Any) -> Any:
    return pytree.tree_map(lambda index: None if index is None else tensors[index], TREE)


@functools.cache
def cells(mode: str, mesh_shape: tuple[int, ...], mesh: Any = None) -> list[Cell]:
    return [Cell(mode, mesh_shape, name, dtype, mesh) for name in LAYOUTS for dtype in DTYPES]


def plan_layout(name: str, shapes: Any, ranks: int) -> Any:
    if name == "tensor":
        return dbuf.plan_tensor_atomic(shapes, ranks, tensor_owners=choose_owners(ranks))
    padding = ShardLayout.UNPADDED if name == "row unpadded" else ShardLayout.PADDED
    return dbuf.plan_row_atomic(shapes, ranks, block_size=2 if name == "block" else 1, shard_layout=padding)


def choose_owners(ranks: int) -> list[int]:
    """Of two ranks the first owns nothing, of more all but the first and the last."""
    return [ranks - 1, 0 if ranks > 2 else ranks - 1] + [ranks - 1] * 4


def _stops(kind: Any, ndim: int) -> dict[str, tuple[Any, ...]]:
    """Every legal tuple of placements."""
    choices = (Replicate(), Partial("sum"), Partial("avg"), kind)
    tuples = itertools.product(choices, repeat=ndim)
    return {describe(p): p for p in tuples if list(map(is_sharded, p)) == sorted(map(is_sharded, p))}


def is_legal(a: Any, b: Any) -> bool:
    """Whether no partial axis changes its reduction."""
    return not any(isinstance(x, Partial) and isinstance(y, Partial) and x != y for x, y in zip(a, b, strict=True))


def is_made_of(a: Any, b: Any, row: tuple[str, str]) -> bool:
    return all(x == y or (_kind(x), _kind(y)) == row for x, y in zip(a, b, strict=True))


def _kind(placement: Any) -> str:
    if is_sharded(placement):
        return "shard"
    return "partial" if isinstance(placement, Partial) else "replicate"


def _mixes(placements: Any) -> bool:
    return Partial("sum") in placements and Partial("avg") in placements


def _other_layouts(c: Cell) -> list[tuple[str, Any, Any]]:
    rows = functools.partial(dbuf.plan_row_atomic, c.shapes)
    owners = [(owner + 1) % c.ranks for owner in choose_owners(c.ranks)]
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


def seed_of(placements: tuple[Any, ...], coordinate: tuple[int, ...]) -> int:
    return sum(10**axis * i for axis, (p, i) in enumerate(zip(placements, coordinate, strict=True)) if is_partial(p))


def is_partial(placement: Any) -> bool:
    return isinstance(placement, Partial)


def make_tensors(shapes: Any, dtype: torch.dtype, kind: str, seed: int) -> list[torch.Tensor]:
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
