"""Where the scale of each quantisation block lies: with the rank that holds the block."""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate

from dbuf.layout import GlobalLayout, num_row_dims

__all__ = ["scale_layout"]


def scale_layout(layout: GlobalLayout, block: int) -> GlobalLayout:
    """A layout with one number for each block of each row, cut between ranks where `layout` is.

    Args:
        layout: Of tensors whose rows no cut splits.
        block: Elements of a block.

    Returns:
        A layout of tensors `(rows, blocks in a row)`, a scalar being one row, in the order of `layout`, without gaps.

    Example:
        >>> scale_layout(GlobalLayout(((4, 6),), (0,), 24, (0, 12)), 4)
        GlobalLayout(tensor_shapes=((4, 2),), tensor_to_offset=(0,), size=8, rank_to_offset=(0, 4), align=1)
    """
    shapes = tuple(
        (math.prod(shape[: num_row_dims(shape, layout.row_dims)]), -(-layout.row_size(t) // block))
        for t, shape in enumerate(layout.tensor_shapes)
    )
    held = sorted((t for t, n in enumerate(layout.tensor_numels) if n), key=layout.tensor_to_offset.__getitem__)
    starts = [layout.tensor_to_offset[t] for t in held]
    before = [0, *accumulate(math.prod(shapes[t]) for t in held)]
    offsets = dict(zip(held, before, strict=False))

    def scales_before(cut: int) -> int:
        i = bisect_right(starts, cut)
        if i == 0:
            return 0
        tensor = held[i - 1]
        rows = min((cut - starts[i - 1]) // layout.row_size(tensor), shapes[tensor][0])
        return before[i - 1] + rows * shapes[tensor][1]

    return GlobalLayout(
        tensor_shapes=shapes,
        tensor_to_offset=tuple(offsets.get(t, 0) for t in range(len(shapes))),
        size=before[-1],
        rank_to_offset=tuple(map(scales_before, layout.rank_to_offset)),
    )
