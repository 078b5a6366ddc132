"""Some tensors of a layout as a layout of their own, and the copies between the two: pure integers."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

from dbuf.layout import GlobalLayout
from dbuf.plan.route import Steps, rearrange

__all__ = ["merge_steps", "select_layout", "selection_steps"]


def select_layout(layout: GlobalLayout, mask: tuple[bool, ...]) -> GlobalLayout:
    """Pack the tensors that `mask` keeps in buffer order, cut between segments where they were cut before.

    Every rank's share of the result is what it held of those tensors, so making one moves nothing.

    Example:
        >>> layout = GlobalLayout(((2, 2), (2,), (3, 2)), (0, 4, 6), 12, (0, 6))
        >>> select_layout(layout, (True, False, True)).rank_to_offset
        (0, 4)
    """
    kept = [t for t, keep in enumerate(mask) if keep]
    # No cut may be measured from a tensor without elements: its offset means nothing.
    held = sorted((t for t in kept if layout.tensor_numels[t]), key=layout.tensor_to_offset.__getitem__)
    starts = [layout.tensor_to_offset[t] for t in held]
    numels = [layout.tensor_numels[t] for t in held]
    before = [0, *accumulate(numels)]
    new_offset = dict(zip(held, before, strict=False))

    def content_before(cut: int) -> int:
        i = bisect_right(starts, cut)
        return before[i] if i == 0 else before[i - 1] + min(cut - starts[i - 1], numels[i - 1])

    return GlobalLayout(
        tensor_shapes=tuple(layout.tensor_shapes[t] for t in kept),
        tensor_to_offset=tuple(new_offset.get(t, 0) for t in kept),
        size=before[-1],
        rank_to_offset=tuple(content_before(cut) for cut in layout.rank_to_offset),
        align=layout.align,
        row_dims=layout.row_dims,
    )


def selection_steps(places: list[tuple[int, int]], numel: int) -> Steps:
    """Copy the `(start, numel)` runs of a local tensor, in order."""
    return rearrange(numel, places)


def merge_steps(places: list[tuple[int, int]], numel: int) -> Steps:
    """From a local tensor of `numel` elements followed by its selection to the tensor with the selection in place."""
    pieces: list[tuple[int, int]] = []
    cursor, taken = 0, numel
    for start, count in places:
        pieces += [(cursor, start - cursor), (taken, count)]
        cursor, taken = start + count, taken + count
    return rearrange(taken, [*pieces, (cursor, numel - cursor)])
