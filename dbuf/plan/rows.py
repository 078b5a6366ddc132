"""Plan a layout whose cuts fall between rows, or between blocks of rows.

PADDED makes all segments equal. `chunk` is the least common multiple of every tensor's block of rows, so
that a multiple of `chunk` is a legal cut wherever it falls, as long as each tensor starts at a multiple of
its own block or ends at a chunk boundary. Regular tensors (at least a chunk) leave gaps up to the next
boundary, which the odd end of another regular and then fragments (less than a chunk) fill:

    boundary      |          |          |          |          |          |     chunk = 12
    regulars      [    12   ][     16      ]...[      16     ]                 the last ends on a boundary
    fragments                               [2]                [  6 ]          6 fits in no gap: to the tail

UNPADDED packs in tensor order with no gap and moves each even cut to the nearest legal boundary.

Source: the layout rules of Megatron-FSDP's flat buffers (NVIDIA/Megatron-LM), whose offsets PADDED
reproduces.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NoReturn

from dbuf.errors import LayoutError, explain, require_positive
from dbuf.layout import GlobalLayout, Shape, check_shapes, num_row_dims
from dbuf.placement import ShardLayout
from dbuf.plan.first import FirstAtLeast

__all__ = ["plan_row_atomic", "row_units"]

_WHERE = "plan_row_atomic"


def plan_row_atomic(
    shapes: Sequence[Sequence[int]],
    dp_size: int,
    *,
    block_size: int = 1,
    shard_layout: ShardLayout = ShardLayout.PADDED,
    align: int = 1,
    row_dims: int = 1,
) -> GlobalLayout:
    """Lay tensors out so that no cut splits a run of `block_size` rows.

    Takes `O((tensors + segments) * log(tensors))` steps. Only PADDED groups in which fragments of many
    different row sizes meet gaps that are large enough but misaligned take more, by at most the number of
    row sizes.

    Args:
        shapes: Global shape of each tensor. A scalar is one row of one element. A tensor with a zero
            dimension occupies nothing; PADDED puts it at offset 0, UNPADDED where the next tensor starts.
        dp_size: Number of segments: the product of the mesh axes that any stage of the group's life shards.
        block_size: Rows in a block; 1 for `RowAtomic`.
        shard_layout: PADDED for equal segments with padding, UNPADDED for no padding and uneven segments.
        align: Elements; equal segments are rounded up to a common multiple of `chunk` and `align`, offsets
            stay. Uneven segments are rounded only on the wire.
        row_dims: How many leading dimensions number the rows, so that cuts may fall between them. A row is
            `shape[row_dims:]`, or the last dimension if there are not so many. With 2, a fused weight
            `(experts, out, in)` may be cut inside an expert, and a rank's part of it is shown as `(rows, in)`; a block
            of rows never reaches from one expert into the next.

    Returns:
        A layout that admits `RowAtomic()` if `block_size` is 1, and `BlockAtomic(block_size)`.

    Raises:
        LayoutError: A shape or number is malformed, or `block_size` does not divide a tensor's rows.

    Example:
        >>> layout = plan_row_atomic([(5, 4), (2, 6), (3,)], 2)
        >>> layout.tensor_to_offset, layout.size, layout.rank_to_offset
        ((0, 24, 20), 48, (0, 24))
        >>> [plan_row_atomic([(3, 10, 4)], 2, row_dims=n).size for n in (1, 2)]
        [160, 120]
    """
    require_positive(dp_size, "dp_size", _WHERE, LayoutError)
    require_positive(align, "align", _WHERE, LayoutError)
    checked = check_shapes(shapes, _WHERE)
    numels, units = list(map(math.prod, checked)), row_units(checked, block_size, row_dims, _WHERE)
    if ShardLayout(shard_layout) is ShardLayout.PADDED:
        offsets, size, cuts = _plan_padded(numels, units, dp_size, align)
    else:
        offsets, size, cuts = _plan_unpadded(numels, units, dp_size)
    return GlobalLayout(checked, tuple(offsets), size, tuple(cuts), align, row_dims)


def row_units(
    shapes: tuple[Shape, ...], block_size: int, row_dims: int, where: str, names: Sequence[str] = ()
) -> list[int]:
    """For each tensor how many elements stay together: `block_size` rows of `shape[row_dims:]`.

    Args:
        shapes: Global shape of each tensor.
        block_size: Rows in a block.
        row_dims: See `plan_row_atomic`.
        where: The function that was called, for messages.
        names: What to call the tensors in messages; by default their numbers.

    Raises:
        LayoutError: A number is not positive, or a block would reach over the end of a tensor or of a matrix in it.

    Example:
        >>> row_units(((3, 10, 4), (6, 5), (8,)), 2, 2, "plan_row_atomic")
        [8, 10, 2]
    """
    require_positive(block_size, "block_size", where, LayoutError)
    require_positive(row_dims, "row_dims", where, LayoutError)
    dims = [num_row_dims(shape, row_dims) for shape in shapes]
    pairs = list(zip(shapes, dims, strict=True))
    bad = [tensor for tensor, (shape, n) in enumerate(pairs) if (shape[n - 1] if shape else 1) % block_size]
    if bad:
        _refuse_blocks(shapes, dims, bad, block_size, where, names or range(len(shapes)))
    return [block_size * math.prod(shape[n:]) for shape, n in pairs]


def _plan_padded(numels: list[int], units: list[int], dp_size: int, align: int) -> tuple[list[int], int, list[int]]:
    """Offsets, size and equal cuts. `units[t]` is the number of elements that stay together in tensor `t`."""
    # Tensors without elements have no say: a unit of 0 would make the least common multiple 0.
    chunk = math.lcm(*(unit for numel, unit in zip(numels, units, strict=True) if numel))
    regulars = [tensor for tensor, numel in enumerate(numels) if numel >= chunk]
    fragments = [tensor for tensor, numel in enumerate(numels) if 0 < numel < chunk]
    fragments.sort(key=lambda tensor: -numels[tensor])  # stable: equal ones keep tensor order
    offsets = [0] * len(numels)
    gaps = _place_regulars(regulars, numels, chunk, offsets)
    end = _place_fragments(fragments, numels, units, gaps, offsets)
    step = math.lcm(chunk, align)
    segment = _round_up(end, step * dp_size) // dp_size
    return offsets, segment * dp_size, [segment * k for k in range(dp_size)]


def _place_regulars(regulars: list[int], numels: list[int], chunk: int, offsets: list[int]) -> list[tuple[int, int]]:
    """Fill in the offsets of the regular tensors; return the gaps, and last the tail, as (start, stop).

    A tensor that ends `gap` elements before a boundary is followed by the first later one whose own
    remainder is not 0 and at most `gap`, placed so that it ends on a boundary too. The tail is endless: its
    stop is -1.
    """
    # Keyed by chunk - remainder, so that "remainder at most gap" reads "key at least chunk - gap", and 0 is
    # "none".
    partners = FirstAtLeast([-numels[tensor] % chunk for tensor in regulars])
    gaps, end = [], 0
    placed = [False] * len(regulars)
    for position, tensor in enumerate(regulars):
        if placed[position]:
            continue
        offsets[tensor] = end
        start = end + numels[tensor]
        stop = end = _round_up(start, chunk)
        if start == stop:
            continue
        partner = partners.find(position + 1, chunk - (stop - start))
        if partner is not None:
            placed[partner] = True
            partners.set(partner, 0)
            remainder = numels[regulars[partner]] % chunk
            stop = offsets[regulars[partner]] = end - remainder
            end = stop + numels[regulars[partner]]
        if start < stop:
            gaps.append((start, stop))
    return [*gaps, (end, -1)]


def _place_fragments(
    fragments: list[int], numels: list[int], units: list[int], gaps: list[tuple[int, int]], offsets: list[int]
) -> int:
    """Fill in the offsets of the fragments, each in the first gap with room; return the content's end."""
    *inner, (tail, _) = gaps
    starts = [start for start, _ in inner]
    room = FirstAtLeast([stop - start for start, stop in inner])
    # A gap can be large enough and yet have no aligned place. It then has none for any later fragment of
    # the same size and unit, so each such pair goes on from where the one before it ended.
    resume: dict[tuple[int, int], int] = {}
    for tensor in fragments:
        numel, unit = numels[tensor], units[tensor]
        gap = room.find(resume.get((numel, unit), 0), numel)
        while gap is not None and _round_up(starts[gap], unit) + numel > inner[gap][1]:
            gap = room.find(gap + 1, numel)
        resume[numel, unit] = len(inner) if gap is None else gap
        if gap is None:
            offsets[tensor] = _round_up(tail, unit)
            tail = offsets[tensor] + numel
        else:
            offsets[tensor] = _round_up(starts[gap], unit)
            starts[gap] = offsets[tensor] + numel
            room.set(gap, inner[gap][1] - starts[gap])
    return tail


def _plan_unpadded(numels: list[int], units: list[int], dp_size: int) -> tuple[list[int], int, list[int]]:
    """Offsets, size and cuts with no gaps; cut `k` is the legal one nearest to `k * size / dp_size`."""
    *offsets, size = accumulate(numels, initial=0)
    held = [tensor for tensor, numel in enumerate(numels) if numel]
    starts = [offsets[tensor] for tensor in held]
    cuts = [0] * dp_size
    for k in range(1, dp_size if held else 1):
        target = k * size  # in units of 1 / dp_size, so that everything stays an integer
        tensor = held[bisect_right(starts, target // dp_size) - 1]
        start, unit = offsets[tensor], units[tensor]
        low = start + (target // dp_size - start) // unit * unit
        nearer_above = target - low * dp_size > (low + unit) * dp_size - target
        cuts[k] = low + unit if nearer_above else low
    return offsets, size, cuts


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _refuse_blocks(
    shapes: tuple[Shape, ...], dims: list[int], bad: list[int], block_size: int, where: str, names: Sequence[object]
) -> NoReturn:
    counts = [shapes[t][dims[t] - 1] if shapes[t] else 1 for t in bad]
    found = sorted({dims[t] - 1 for t in bad})
    raise LayoutError(
        explain(
            where,
            f"block_size={block_size} does not divide the rows of {len(bad)} of {len(shapes)} tensors.",
            got="\n".join(f"tensor {names[t]} of shape {shapes[t]}" for t in bad),
            need=f"{' and '.join(f'shape[{dim}]' for dim in found)} a multiple of {block_size} (a scalar is one row)",
            fix=f"block_size={math.gcd(block_size, *counts)}, or another group for these tensors",
        )
    )
