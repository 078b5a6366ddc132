"""From (source, target) to a chain of table rows with exact splits: pure integers, one rank at a time.

This file owns the transition table. A route is a tuple of *hops*, one a table row taken on one mesh axis; a hop holds
*steps*, plain tuples that `dbuf.collectives` executes and that compiled graphs can carry as constants:

    ("rearrange", numel_in, ((start, numel), ...))   copy runs of the input, in order; start -1 stands for zeros
    ("scale", factor)                                multiply by a constant
    ("all_gather", n, axis)                          concatenate over the n ranks of a mesh axis
    ("reduce_scatter", n, axis)                      sum over the axis, keep this rank's n-th
    ("all_reduce", n, axis)                          sum over the axis
    ("all_to_all", out_splits, in_splits, count)     exchange over the flattened group of the last `count` axes
    ("wait",)                                        follows each collective, which only starts the transfer

Every step is linear, and `transpose` turns steps into the steps of the exact transpose. What goes on the wire is
decided from global metadata alone, so every rank plans the same collectives with the same sizes.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from dbuf.layout import GlobalLayout
from dbuf.placement import Partial, Placement, Placements, is_sharded, num_sharded, shard_placement

__all__ = [
    "TRANSITIONS",
    "WAIT",
    "Hop",
    "Row",
    "Steps",
    "coalesce",
    "plan_route",
    "rearrange",
    "split",
    "transpose",
]

Steps: TypeAlias = tuple[tuple[Any, ...], ...]
Pieces: TypeAlias = tuple[tuple[int, int], ...]
ZEROS = -1
WAIT: tuple[str] = ("wait",)


class Row(NamedTuple):
    """One row of the transition table: what a change on one mesh axis is called and what it sends."""

    function: str
    collective: str | None


TRANSITIONS: dict[tuple[str, str], Row] = {
    ("shard", "replicate"): Row("allgather", "all_gather"),
    ("partial", "shard"): Row("reduce_scatter", "reduce_scatter"),
    ("partial", "replicate"): Row("allreduce", "all_reduce"),
    ("replicate", "shard"): Row("view", None),
    ("replicate", "partial"): Row("redistribute", None),
    ("shard", "partial"): Row("redistribute", None),  # zeros around the shard: the transpose of view
}
RELAYOUT = Row("redistribute", "all_to_all")


class Hop(NamedTuple):
    """One row taken on one axis (on the last axes together, for a move between layouts)."""

    row: Row
    axis: int
    steps: Steps


class _Stage(NamedTuple):
    """Where a buffer stands between two hops, and who asks."""

    placements: Placements
    layout: GlobalLayout
    mesh_shape: tuple[int, ...]
    coordinate: tuple[int, ...]

    def range_at(self, coordinate: tuple[int, ...]) -> tuple[int, int]:
        return self.layout.local_range(self.placements, self.mesh_shape, coordinate)

    def on_axis(self, axis: int) -> list[tuple[int, int]]:
        """The local range of every rank along `axis`, the other coordinates being this rank's."""
        c = self.coordinate
        return [self.range_at((*c[:axis], i, *c[axis + 1 :])) for i in range(self.mesh_shape[axis])]

    def wire_numel(self) -> int:
        """Elements a rank puts on the wire: the largest segment of any rank, rounded up if segments are uneven."""
        return _wire_numel(self.layout, self.placements, self.mesh_shape)

    def with_axis(self, axis: int, placement: Placement) -> _Stage:
        placements = (*self.placements[:axis], placement, *self.placements[axis + 1 :])
        return self._replace(placements=placements)


@lru_cache(maxsize=4096)
def _wire_numel(layout: GlobalLayout, placements: Placements, mesh_shape: tuple[int, ...]) -> int:
    count = math.prod(mesh_shape[len(mesh_shape) - num_sharded(placements) :])
    bounds = (*layout.rank_to_offset[:: layout.dp_size // count], layout.size)
    numels = [end - start for start, end in itertools.pairwise(bounds)]
    if len(set(numels)) == 1:
        return numels[0]
    return -(-max(numels) // layout.align) * layout.align


@lru_cache(maxsize=4096)
def plan_route(
    source: Placements,
    source_layout: GlobalLayout,
    target: Placements,
    target_layout: GlobalLayout,
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
) -> tuple[Hop, ...]:
    """Plan how one rank takes part in a change of placements, of layout, or of both.

    Within a layout: reductions and views inner to outer, then gathers outer to inner. To another layout: one
    exchange over the axes that are sharded in the source, then what is left within the target's layout. When the
    target's layout cannot be cut that finely, the gathers come first.

    Args:
        source: Placements now.
        source_layout: Layout now.
        target: Placements wanted.
        target_layout: Layout wanted; equal to `source_layout` for a change of placements alone.
        mesh_shape: Ranks along each axis.
        coordinate: This rank's place in the mesh.

    Returns:
        The hops, in order. Axes of size 1 cost no step, but their hop is listed.
    """
    stage = _Stage(source, source_layout, mesh_shape, coordinate)
    hops: list[Hop] = []
    if source_layout != target_layout:
        stage = _gather_what_cannot_move(stage, target, target_layout, hops)
        stage = _exchange(stage, target, target_layout, hops)
    for axis, placement in _order(stage.placements, target):
        hops.append(_change(stage, axis, placement))
        stage = stage.with_axis(axis, placement)
    return tuple(hops)


def _kind(placement: Placement) -> str:
    if is_sharded(placement):
        return "shard"
    return "partial" if isinstance(placement, Partial) else "replicate"


def _order(source: Placements, target: Placements) -> Iterator[tuple[int, Placement]]:
    """The axes to change, in an order that keeps the sharded axes a suffix throughout."""
    kinds = [(_kind(a), _kind(b)) for a, b in zip(source, target, strict=True)]
    axes = range(len(kinds))
    for axis in reversed(axes):
        if kinds[axis] in (("partial", "shard"), ("partial", "replicate"), ("replicate", "shard")):
            yield axis, target[axis]
    for axis in axes:
        if kinds[axis] in (("shard", "replicate"), ("shard", "partial")):
            yield axis, target[axis]
    for axis in axes:
        if kinds[axis] == ("replicate", "partial"):
            yield axis, target[axis]


def _change(stage: _Stage, axis: int, placement: Placement) -> Hop:
    row = TRANSITIONS[_kind(stage.placements[axis]), _kind(placement)]
    if stage.mesh_shape[axis] == 1:
        return Hop(row, axis, ())
    after = stage.with_axis(axis, placement)
    if row.function == "allgather":
        steps = _gather_steps(stage, axis)
    elif row.function == "reduce_scatter":
        steps = _mean_steps(stage, axis) + _scatter_steps(stage, after, axis)
    elif row.function == "allreduce":
        steps = (*_mean_steps(stage, axis), ("all_reduce", stage.mesh_shape[axis], axis), WAIT)
    elif row.function == "view":
        steps = _slice_steps(stage, after)
    elif _kind(placement) == "partial" and is_sharded(stage.placements[axis]):
        steps = _embed_steps(stage, after, placement, axis)
    else:
        steps = _keep_on_one_steps(stage, placement, axis)
    return Hop(row, axis, steps)


def _mean_steps(stage: _Stage, axis: int) -> Steps:
    """`Partial("avg")` is scaled before the sum: an averaging collective has no gradient of its own."""
    placement = stage.placements[axis]
    if isinstance(placement, Partial) and placement.reduce_op == "avg":
        return (("scale", 1.0 / stage.mesh_shape[axis]),)
    return ()


def _gather_steps(stage: _Stage, axis: int) -> Steps:
    n, wire = stage.mesh_shape[axis], stage.wire_numel()
    mine = stage.range_at(stage.coordinate)[1]
    numels = [numel for _, numel in stage.on_axis(axis)]
    pad = rearrange(mine, [(0, mine), (ZEROS, wire - mine)])
    compact = rearrange(n * wire, [(i * wire, numel) for i, numel in enumerate(numels)])
    return (*pad, ("all_gather", n, axis), WAIT, *compact) if wire else ()


def _scatter_steps(stage: _Stage, after: _Stage, axis: int) -> Steps:
    n, wire = stage.mesh_shape[axis], after.wire_numel()
    start, numel = stage.range_at(stage.coordinate)
    mine = after.range_at(stage.coordinate)[1]
    spread: list[tuple[int, int]] = []
    for piece_start, piece_numel in after.on_axis(axis):
        spread += [(piece_start - start, piece_numel), (ZEROS, wire - piece_numel)]
    cut = rearrange(wire, [(0, mine)])
    return (*rearrange(numel, spread), ("reduce_scatter", n, axis), WAIT, *cut) if wire else ()


def _slice_steps(stage: _Stage, after: _Stage) -> Steps:
    start, numel = stage.range_at(stage.coordinate)
    new_start, new_numel = after.range_at(stage.coordinate)
    return rearrange(numel, [(new_start - start, new_numel)])


def _embed_steps(stage: _Stage, after: _Stage, placement: Placement, axis: int) -> Steps:
    start, numel = stage.range_at(stage.coordinate)
    new_start, new_numel = after.range_at(stage.coordinate)
    before = start - new_start
    steps = rearrange(numel, [(ZEROS, before), (0, numel), (ZEROS, new_numel - before - numel)])
    return (*steps, ("scale", float(stage.mesh_shape[axis]))) if _is_avg(placement) else steps


def _keep_on_one_steps(stage: _Stage, placement: Placement, axis: int) -> Steps:
    """`Replicate -> Partial`: the sum keeps the value on the axis's first rank; the average only relabels."""
    if _is_avg(placement) or stage.coordinate[axis] == 0:
        return ()
    numel = stage.range_at(stage.coordinate)[1]
    return rearrange(numel, [(ZEROS, numel)])


def _is_avg(placement: Placement) -> bool:
    return isinstance(placement, Partial) and placement.reduce_op == "avg"


def _gather_what_cannot_move(stage: _Stage, target: Placements, target_layout: GlobalLayout, hops: list[Hop]) -> _Stage:
    """Gather axes that the target's layout cannot be cut over, so that the exchange finds equal sharding."""
    have, want = num_sharded(stage.placements), num_sharded(target)
    ranks = math.prod(stage.mesh_shape[len(stage.mesh_shape) - have :])
    if have <= want or target_layout.dp_size % ranks == 0:
        return stage
    for axis in range(len(target) - have, len(target) - want):
        hops.append(_change(stage, axis, target[axis]))
        stage = stage.with_axis(axis, target[axis])
    return stage


def _exchange(stage: _Stage, target: Placements, target_layout: GlobalLayout, hops: list[Hop]) -> _Stage:
    """Move to the target's layout: an all-to-all among the ranks that hold one copy between them."""
    count = num_sharded(stage.placements)
    after = stage._replace(placements=_exchange_target(stage.placements, target), layout=target_layout)
    first = len(stage.mesh_shape) - count
    fixed = stage.coordinate[:first]
    members = [(*fixed, *rest) for rest in itertools.product(*map(range, stage.mesh_shape[first:]))]
    held = [stage.range_at(member) for member in members]
    wanted = [after.range_at(member) for member in members]
    me = members.index(stage.coordinate)
    sends = _overlaps(stage.layout, held[me], target_layout, wanted)
    receives = _overlaps(target_layout, wanted[me], stage.layout, held)

    # Both sides order what passes between two ranks by its place at the receiver.
    outgoing = [[(s, n) for _, n, s in sorted((at, n, s) for s, n, at in message)] for message in sends]
    pack = rearrange(held[me][1], list(itertools.chain.from_iterable(outgoing)))
    arrived: list[tuple[int, int, int]] = []
    cursor = 0
    for message in receives:
        for place, numel, _ in sorted(message):
            arrived.append((place, numel, cursor))
            cursor += numel
    place_steps = rearrange(cursor, _fill_gaps(sorted(arrived), wanted[me][1]))
    splits = tuple(_total(message) for message in receives), tuple(_total(message) for message in sends)
    swap = (("all_to_all", *splits, count), WAIT) if len(members) > 1 else ()
    hops.append(Hop(RELAYOUT, first, (*pack, *swap, *place_steps)))
    return after


def _exchange_target(source: Placements, target: Placements) -> Placements:
    """The source's placements with the target's kind of shard, and replicated axes cut on the way where they can."""
    kind = shard_placement(target)
    out = [kind if is_sharded(p) and kind is not None else p for p in source]
    for axis in reversed(range(len(source) - num_sharded(source))):
        if _kind(source[axis]) != "replicate" or not is_sharded(target[axis]):
            break
        out[axis] = target[axis]
    return tuple(out)


def _total(message: list[tuple[int, int, int]]) -> int:
    return sum(numel for _, numel, _ in message)


def _overlaps(
    a: GlobalLayout, a_range: tuple[int, int], b: GlobalLayout, b_ranges: Sequence[tuple[int, int]]
) -> list[list[tuple[int, int, int]]]:
    """For each range of `b`: the `(place in a_range, numel, place in that range)` of what it shares with `a_range`."""
    out: list[list[tuple[int, int, int]]] = [[] for _ in b_ranges]
    order = sorted((start, start + numel, j) for j, (start, numel) in enumerate(b_ranges) if numel)
    ends = [end for _, end, _ in order]
    for tensor, start_in_tensor, numel, place in a.pieces(*a_range):
        begin = b.tensor_to_offset[tensor] + start_in_tensor
        for position in range(bisect_left(ends, begin + 1), len(order)):
            start, end, j = order[position]
            low, high = max(start, begin), min(end, begin + numel)
            if low >= high:
                break
            out[j].append((place + low - begin, high - low, low - start))
    return out


def _fill_gaps(arrived: list[tuple[int, int, int]], size: int) -> list[tuple[int, int]]:
    """Pieces that put `(place, numel, source)` where they belong, with zeros between."""
    pieces: list[tuple[int, int]] = []
    cursor = 0
    for place, numel, start in arrived:
        pieces += [(ZEROS, place - cursor), (start, numel)]
        cursor = place + numel
    return [*pieces, (ZEROS, size - cursor)]


def coalesce(pieces: Sequence[tuple[int, int]]) -> Pieces:
    """Drop empty pieces and join runs that follow one another in the source.

    Example:
        >>> coalesce([(0, 2), (2, 3), (-1, 0), (-1, 4), (-1, 1)])
        ((0, 5), (-1, 5))
    """
    out: list[tuple[int, int]] = []
    for start, numel in pieces:
        if not numel:
            continue
        if out and (start == ZEROS == out[-1][0] or (start >= 0 and out[-1][0] >= 0 and sum(out[-1]) == start)):
            out[-1] = (out[-1][0], out[-1][1] + numel)
        else:
            out.append((start, numel))
    return tuple(out)


def rearrange(numel_in: int, pieces: Sequence[tuple[int, int]]) -> Steps:
    """The step that copies these pieces of `numel_in` elements, or none if that changes nothing."""
    joined = coalesce(pieces)
    if joined == ((0, numel_in),) or (not joined and not numel_in):
        return ()
    return (("rearrange", numel_in, joined),)


def transpose(steps: Steps) -> Steps:
    """The steps of the exact transpose: reversed, each turned round.

    Example:
        >>> transpose((("rearrange", 5, ((1, 3),)), ("all_gather", 2, 0), ("wait",)))
        (('reduce_scatter', 2, 0), ('wait',), ('rearrange', 3, ((-1, 1), (0, 3), (-1, 1))))
    """
    return tuple(itertools.chain.from_iterable(_transpose_step(step) for step in reversed(steps)))


def _transpose_step(step: tuple[Any, ...]) -> Steps:
    kind = step[0]
    if kind == "wait":
        return ()
    if kind == "rearrange":
        return _invert(step[1], step[2])
    if kind == "all_gather":
        return (("reduce_scatter", *step[1:]), WAIT)
    if kind == "reduce_scatter":
        return (("all_gather", *step[1:]), WAIT)
    if kind == "all_reduce":
        return (step, WAIT)
    if kind == "all_to_all":
        return (("all_to_all", step[2], step[1], step[3]), WAIT)
    return (step,)  # a scale is its own transpose


def split(steps: Steps) -> tuple[Steps, Steps]:
    """Cut steps where the last collective has started and is not waited for: several moves then overlap.

    Only copies follow the last wait, so nothing is summed in the second half or in its transpose.
    """
    waits = [i for i, step in enumerate(steps) if step == WAIT]
    at = waits[-1] if waits else len(steps)
    return steps[:at], steps[at:]


def _invert(numel_in: int, pieces: Pieces) -> Steps:
    """Swap the roles of source and place. Every source element is used at most once, so nothing is summed."""
    placed: list[tuple[int, int, int]] = []
    cursor = 0
    for start, numel in pieces:
        if start != ZEROS:
            placed.append((start, numel, cursor))
        cursor += numel
    return rearrange(cursor, _fill_gaps(sorted(placed), numel_in))
