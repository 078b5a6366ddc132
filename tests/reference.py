"""The slow oracle: all ranks of a mesh in one process, with loops, slices, concatenations and sums.

Nothing here plans, traces or communicates, and nothing asks `dbuf` where a rank's part lies: of the library only
inert values are read, placements and the raw integers of a layout. A distributed value is a list with one entry a
rank, in row-major order of the mesh. Sums run in float64 and are rounded once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils import _pytree as pytree

from dbuf.layout import GlobalLayout
from dbuf.placement import BlockAtomic, RowAtomic

Coordinate = tuple[int, ...]
Span = tuple[int, int]


@dataclass(frozen=True)
class Buffer:
    """What a DBuffer is on all ranks at once.

    Attributes:
        mesh_shape: Ranks along each axis, outermost first.
        placements: One entry an axis.
        layout: Read for its integers alone.
        tree: The user's containers, with the index of each tensor at its leaf and None where there is none.
        locals: The flat tensor of each rank.
    """

    mesh_shape: tuple[int, ...]
    placements: tuple[Any, ...]
    layout: GlobalLayout
    tree: Any
    locals: tuple[torch.Tensor, ...]

    @property
    def coordinates(self) -> list[Coordinate]:
        return coordinates(self.mesh_shape)

    def span(self, coordinate: Coordinate) -> Span:
        return span(self.layout, self.placements, self.mesh_shape, coordinate)


def coordinates(mesh_shape: Sequence[int]) -> list[Coordinate]:
    """The place of every rank in the mesh, in rank order."""
    return list(itertools.product(*map(range, mesh_shape)))


def span(layout: GlobalLayout, placements: Sequence[Any], mesh_shape: Sequence[int], coordinate: Sequence[int]) -> Span:
    """Start and stop of a rank's part: the buffer is cut from the innermost axis to the outermost."""
    segments = list(range(len(layout.rank_to_offset)))
    for axis in reversed(range(len(mesh_shape))):
        if isinstance(placements[axis], Shard):
            share = len(segments) // mesh_shape[axis]
            assert share * mesh_shape[axis] == len(segments), "cut more finely than planned"
            segments = segments[coordinate[axis] * share : (coordinate[axis] + 1) * share]
    bounds = (*layout.rank_to_offset, layout.size)
    return bounds[segments[0]], bounds[segments[-1] + 1]


def spans_of_tensors(layout: GlobalLayout) -> list[Span]:
    """Start and stop of each tensor in the flat buffer."""
    pairs = zip(layout.tensor_to_offset, layout.tensor_shapes, strict=True)
    return [(offset, offset + math.prod(shape)) for offset, shape in pairs]


# --- making and taking apart ------------------------------------------------------------------------------


def shard(trees: Any, mesh_shape: tuple[int, ...], placements: tuple[Any, ...], layout: GlobalLayout) -> Buffer:
    """One tree of full tensors for every rank, or a list of them, one a rank."""
    ranks = coordinates(mesh_shape)
    if not isinstance(trees, list):
        trees = [trees] * len(ranks)
    buffers = []
    for tree, coordinate in zip(trees, ranks, strict=True):
        leaves = [leaf for leaf in pytree.tree_leaves(tree) if leaf is not None]
        flat = torch.zeros(layout.size, dtype=leaves[0].dtype)
        for leaf, (start, stop) in zip(leaves, spans_of_tensors(layout), strict=True):
            flat[start:stop] = leaf.reshape(-1)
        start, stop = span(layout, placements, mesh_shape, coordinate)
        buffers.append(flat[start:stop].clone())
    return Buffer(mesh_shape, placements, layout, _numbered(trees[0]), tuple(buffers))


def unpack(buf: Buffer) -> list[Any]:
    """The user's tree of each rank: the rows it holds."""
    return [
        _fill(buf.tree, _tensors_in(local, buf, buf.span(coordinate)))
        for local, coordinate in zip(buf.locals, buf.coordinates, strict=True)
    ]


def pack(trees: Sequence[Any], like: Buffer) -> Buffer:
    """The buffer whose `unpack` these trees are; zeros in gaps and padding."""
    packed = []
    for tree, coordinate in zip(trees, like.coordinates, strict=True):
        leaves = [leaf for leaf in pytree.tree_leaves(tree) if leaf is not None]
        first, last = like.span(coordinate)
        local = torch.zeros(last - first, dtype=leaves[0].dtype)
        for leaf, (start, stop) in zip(leaves, spans_of_tensors(like.layout), strict=True):
            low, high = max(start, first), min(stop, last)
            if low < high:
                local[low - first : high - first] = leaf.reshape(-1)
        packed.append(local)
    return replace(like, locals=tuple(packed))


def select(buf: Buffer, keep: Sequence[bool]) -> Buffer:
    """The tensors that `keep` names, packed in buffer order; each rank keeps what it holds of them."""
    spans = spans_of_tensors(buf.layout)
    kept = [tensor for tensor, wanted in enumerate(keep) if wanted]
    in_order = sorted(kept, key=lambda tensor: spans[tensor][0])
    numel_before = {t: sum(_numel(spans[s]) for s in in_order[:i]) for i, t in enumerate(in_order)}
    cuts = [sum(max(0, min(cut, spans[t][1]) - spans[t][0]) for t in kept) for cut in buf.layout.rank_to_offset]
    layout = GlobalLayout(
        tuple(buf.layout.tensor_shapes[t] for t in kept),
        tuple(numel_before[t] for t in kept),
        sum(_numel(spans[t]) for t in kept),
        tuple(cuts),
        buf.layout.align,
        buf.layout.row_dims,
    )
    tree = pytree.tree_map(lambda t: kept.index(t) if t in kept else None, buf.tree)
    taken = []
    for local, coordinate in zip(buf.locals, buf.coordinates, strict=True):
        parts = [local[low:high] for t in in_order for low, high in [_overlap(spans[t], buf.span(coordinate))]]
        taken.append(torch.cat([*parts, local[:0]]))
    return Buffer(buf.mesh_shape, buf.placements, layout, tree, tuple(taken))


def merge(buf: Buffer, keep: Sequence[bool], part: Buffer) -> Buffer:
    """`buf` with the tensors that `keep` names taken from `part`, which `select` made."""
    spans = spans_of_tensors(buf.layout)
    in_order = sorted((t for t, wanted in enumerate(keep) if wanted), key=lambda t: spans[t][0])
    merged = []
    for local, taken, coordinate in zip(buf.locals, part.locals, buf.coordinates, strict=True):
        whole, cursor = local.clone(), 0
        for low, high in (_overlap(spans[t], buf.span(coordinate)) for t in in_order):
            whole[low:high] = taken[cursor : cursor + high - low]
            cursor += high - low
        merged.append(whole)
    return replace(buf, locals=tuple(merged))


def shapes(buf: Buffer) -> Any:
    """The tree of global shapes."""
    return _fill(buf.tree, [torch.Size(shape) for shape in buf.layout.tensor_shapes])


def cast(buf: Buffer, dtype: torch.dtype) -> Buffer:
    """The same numbers in another dtype."""
    return replace(buf, locals=tuple(local.to(dtype) for local in buf.locals))


# --- movement ---------------------------------------------------------------------------------------------


def redistribute(buf: Buffer, placements: tuple[Any, ...], layout: GlobalLayout | None = None) -> Buffer:
    """From any placements to any others, element by element: who holds a part of this element's new value?

    Every rank's new part is filled by what each rank holds now, if on every axis the two ranks fit: see `_weight`.
    """
    layout = buf.layout if layout is None else layout
    pairs = list(zip(buf.placements, placements, strict=True))
    adds = any(isinstance(old, Partial) and not isinstance(new, Partial) for old, new in pairs)
    old_spans, new_spans = spans_of_tensors(buf.layout), spans_of_tensors(layout)
    moved = []
    for to in buf.coordinates:
        first, last = span(layout, placements, buf.mesh_shape, to)
        out = torch.zeros(last - first, dtype=torch.float64)
        for source, local in zip(buf.coordinates, buf.locals, strict=True):
            weight = _weight(pairs, buf.mesh_shape, source, to)
            if weight is None:
                continue
            start, stop = buf.span(source)
            for old, new in zip(old_spans, new_spans, strict=True):  # compared in the tensor's own elements
                low = max(start - old[0], first - new[0], 0)
                high = min(stop - old[0], last - new[0], _numel(old))
                if low >= high:
                    continue
                piece = weight * local[low + old[0] - start : high + old[0] - start].double()
                at = slice(low + new[0] - first, high + new[0] - first)
                out[at] = out[at] + piece if adds else piece
        moved.append(out.to(buf.locals[0].dtype))
    return Buffer(buf.mesh_shape, placements, layout, buf.tree, tuple(moved))


def _weight(
    pairs: Sequence[tuple[Any, Any]], mesh_shape: tuple[int, ...], source: Coordinate, to: Coordinate
) -> float | None:
    """The factor with which what rank `source` holds enters the new value at rank `to`, or None if it does not."""
    weight = 1.0
    for (old, new), n, at_source, at_target in zip(pairs, mesh_shape, source, to, strict=True):
        if isinstance(new, Partial):
            if at_source != at_target:
                return None
            if isinstance(old, Shard) and new.reduce_op == "avg":
                weight *= n  # the average divides by n what only one rank contributes
            if isinstance(old, Replicate) and new.reduce_op == "sum" and at_target != 0:
                return None  # the first rank of the axis keeps the value, the others zeros
        elif isinstance(old, Partial):
            weight *= 1 / n if old.reduce_op == "avg" else 1
        elif isinstance(old, Replicate) and at_source != at_target:
            return None
    return weight


def _replicated(buf: Buffer) -> tuple[Replicate, ...]:
    return (Replicate(),) * len(buf.mesh_shape)


def allgather(buf: Buffer, dtype: torch.dtype | None = None) -> Buffer:
    """Every sharded axis becomes Replicate, in another dtype if one is given."""
    target = tuple(Replicate() if isinstance(p, Shard) else p for p in buf.placements)
    return redistribute(cast(buf, dtype) if dtype else buf, target)


def reduce_scatter(buf: Buffer, placements: tuple[Any, ...], dtype: torch.dtype | None = None) -> Buffer:
    """Partial axes become sharded."""
    return redistribute(cast(buf, dtype) if dtype else buf, placements)


def allreduce(buf: Buffer) -> Buffer:
    """Every partial axis becomes Replicate."""
    return redistribute(buf, tuple(Replicate() if isinstance(p, Partial) else p for p in buf.placements))


def view(buf: Buffer, placements: tuple[Any, ...]) -> Buffer:
    """Replicated axes become sharded."""
    return redistribute(buf, placements)


# --- reductions over content: the result is the same on every rank ----------------------------------------


def content(buf: Buffer) -> list[torch.Tensor]:
    """The full tensors of a replicated or sharded buffer."""
    whole = redistribute(buf, _replicated(buf)).locals[0]
    spans = zip(spans_of_tensors(buf.layout), buf.layout.tensor_shapes, strict=True)
    return [whole[start:stop].reshape(shape) for (start, stop), shape in spans]


def norms(buf: Buffer) -> Any:
    """The tree of 2-norms."""
    return _fill(buf.tree, [tensor.double().square().sum().sqrt().float() for tensor in content(buf)])


def global_norm(*bufs: Buffer) -> torch.Tensor:
    """The 2-norm of everything."""
    return sum(tensor.double().square().sum() for buf in bufs for tensor in content(buf)).sqrt().float()


def vdot(a: Buffer, b: Buffer) -> torch.Tensor:
    """The inner product."""
    pairs = zip(content(a), content(b), strict=True)
    return sum((x.double() * y.double()).sum() for x, y in pairs).float()


def all_finite(*bufs: Buffer) -> torch.Tensor:
    """Whether everything is finite, contributions of partial buffers included."""
    locals_ = [local for buf in bufs for local in buf.locals]
    return torch.tensor(all(math.isfinite(x) for local in locals_ for x in local.tolist()))


def psum(values: Sequence[torch.Tensor], mesh_shape: tuple[int, ...], axes: Sequence[int]) -> list[torch.Tensor]:
    """For each rank the sum over those that differ from it on `axes` alone."""
    ranks = coordinates(mesh_shape)
    sums = []
    for me in ranks:
        along = [all(a == b or axis in axes for axis, (a, b) in enumerate(zip(me, c, strict=True))) for c in ranks]
        total = sum(value.double() for value, here in zip(values, along, strict=True) if here)
        sums.append(total.to(values[0].dtype))
    return sums


def pmean(values: Sequence[torch.Tensor], mesh_shape: tuple[int, ...], axes: Sequence[int]) -> list[torch.Tensor]:
    """`psum` divided by the ranks summed over."""
    n = math.prod(mesh_shape[axis] for axis in axes)
    totals = psum([value.double() for value in values], mesh_shape, axes)
    return [(total / n).to(values[0].dtype) for total in totals]


# --- differentiation --------------------------------------------------------------------------------------


def value_and_grad(
    loss: Callable[..., torch.Tensor], buf: Buffer, batches: Sequence[Any], reduction: str
) -> tuple[list[torch.Tensor], Buffer]:
    """Each rank's own loss of the full tensors and its batch, and the gradients in the dual placements.

    A replicated buffer keeps each rank's own gradient (they are partial); anything else gets the sum over ranks.
    """
    dtype = buf.locals[0].dtype
    losses, gradients = [], []
    for batch in batches:
        leaves = [tensor.double().requires_grad_() for tensor in content(buf)]
        value = loss(_fill(buf.tree, leaves), batch.double())
        grads = torch.autograd.grad(value, leaves, allow_unused=True)
        grads = [torch.zeros_like(x) if grad is None else grad for grad, x in zip(grads, leaves, strict=True)]
        scale = 1 / len(batches) if reduction == "mean" else 1
        gradients.append(_fill(buf.tree, [scale * grad for grad in grads]))
        losses.append(value.detach().to(dtype))
    contributions = shard(gradients, buf.mesh_shape, (Partial("sum"),) * len(buf.mesh_shape), buf.layout)
    dual = tuple(p if isinstance(p, Shard) else Partial("sum") for p in buf.placements)
    return losses, cast(redistribute(contributions, dual), dtype)


# --- trees and spans --------------------------------------------------------------------------------------


def _numbered(tree: Any) -> Any:
    count = itertools.count()
    return pytree.tree_map(lambda leaf: None if leaf is None else next(count), tree)


def _fill(tree: Any, leaves: Sequence[Any]) -> Any:
    return pytree.tree_map(lambda index: None if index is None else leaves[index], tree)


def _tensors_in(local: torch.Tensor, buf: Buffer, held: Span) -> list[torch.Tensor]:
    """Rows of a sharded buffer, counted over `row_dims` leading dimensions; whole tensors of any other."""
    stacked = isinstance(buf.placements[-1], RowAtomic | BlockAtomic)
    tensors = []
    for whole, shape in zip(spans_of_tensors(buf.layout), buf.layout.tensor_shapes, strict=True):
        low, high = _overlap(whole, held)
        row = shape[1:]
        for _ in range(buf.layout.row_dims - 1 if stacked else 0):
            row = row[1:] if len(row) > 1 else row
        if low == high:
            tensors.append(local.new_zeros(0, *row))
        else:
            tensors.append(local[low:high].reshape((-1, *row) if shape else ()))
    return tensors


def _overlap(tensor: Span, held: Span) -> Span:
    """Start and stop, in the local tensor, of what it holds of a tensor."""
    low, high = max(tensor[0], held[0]), min(tensor[1], held[1])
    return (low - held[0], high - held[0]) if low < high else (0, 0)


def _numel(span: Span) -> int:
    return span[1] - span[0]
