"""What a layout costs, in numbers."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from itertools import accumulate, pairwise
from typing import Any, NoReturn

from dbuf.buffer import DBuffer
from dbuf.errors import LayoutError, explain
from dbuf.layout import GlobalLayout, Piece

__all__ = ["LayoutReport", "SegmentReport", "report", "report_segment"]


@dataclasses.dataclass(frozen=True)
class LayoutReport:
    """A layout in numbers: elements, but for what is named bytes.

    Attributes:
        segments: Number of segments.
        tensors: Number of tensors.
        content: Elements of all tensors.
        size: Elements of the whole buffer.
        longest: Elements of the longest segment.
        shortest: Elements of the shortest one.
        empty: Segments that hold no element of a tensor.
        cut: Tensors that lie in more than one segment.
        largest_gap: Elements of the longest run of padding.
        alignment: The largest power of two that divides the offset of each tensor that has elements, and each cut:
            times `itemsize`, what vector loads and collectives can rely on. 0 where all of these are 0.
        itemsize: Bytes of an element.
    """

    segments: int
    tensors: int
    content: int
    size: int
    longest: int
    shortest: int
    empty: int
    cut: int
    largest_gap: int
    alignment: int
    itemsize: int

    @property
    def padding(self) -> int:
        """Elements that belong to no tensor."""
        return self.size - self.content

    @property
    def overhead(self) -> float:
        """Padding by content: 0.01 is 1 %."""
        return self.padding / self.content if self.content else 0.0

    @property
    def imbalance(self) -> float:
        """The longest segment by the mean one: 1.0 where all are equal."""
        return self.longest * self.segments / self.size if self.size else 1.0

    @property
    def excess(self) -> float:
        """What the fullest rank holds by an even share of the content, less 1: padding and imbalance together."""
        return self.longest * self.segments / self.content - 1 if self.content else 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of the longest segment."""
        return self.longest * self.itemsize

    def as_dict(self) -> dict[str, Any]:
        """All numbers, the derived ones too, for JSON."""
        derived = ("padding", "overhead", "imbalance", "excess", "nbytes")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in derived}

    def __str__(self) -> str:
        rows = (
            f"tensors      {self.tensors:,} of {self.content:,} elements, {self.cut:,} of them cut",
            f"buffer       {self.size:,} elements, {self.overhead:.3%} padding (longest gap {self.largest_gap:,})",
            f"segments     {self.segments:,}, the longest {self.longest:,} ({self.nbytes:,} bytes), "
            f"max / mean {self.imbalance:.4f}, {self.empty:,} empty",
            f"alignment    {self.alignment:,} elements",
        )
        return "\n".join(rows)


@dataclasses.dataclass(frozen=True)
class SegmentReport:
    """One segment in elements.

    Attributes:
        start: Where it starts in the buffer.
        numel: Its length.
        pieces: The parts of tensors in it; see `GlobalLayout.pieces`.
    """

    start: int
    numel: int
    pieces: tuple[Piece, ...]

    @property
    def content(self) -> int:
        """Elements of tensors in it."""
        return sum(piece[2] for piece in self.pieces)

    @property
    def padding(self) -> int:
        """Elements in it that belong to no tensor."""
        return self.numel - self.content


def report(layout: GlobalLayout | DBuffer, *, itemsize: int | None = None) -> LayoutReport:
    """Say what a layout costs: padding, balance, empty ranks, bytes.

    Args:
        layout: A layout, or a buffer with one.
        itemsize: Bytes of an element; by default a buffer's, and 1 for a layout.

    Returns:
        The numbers; printed, a few lines. Takes one pass over tensors and segments.

    Raises:
        LayoutError: Something else than a layout or a buffer came.

    Example:
        >>> import dbuf
        >>> found = report(dbuf.plan_row_atomic([(5, 4), (2, 6), (3,)], 2), itemsize=4)
        >>> found.content, found.size, found.nbytes, f"{found.overhead:.1%}"
        (35, 48, 96, '37.1%')
    """
    if isinstance(layout, DBuffer):
        return report(layout.layout, itemsize=itemsize or layout.dtype.itemsize)
    if not isinstance(layout, GlobalLayout):
        _refuse(layout)
    lengths = [stop - start for start, stop in pairwise((*layout.rank_to_offset, layout.size))]
    held = sorted((layout.tensor_to_offset[t], numel) for t, numel in enumerate(layout.tensor_numels) if numel)
    starts, ends = [start for start, _ in held], [start + numel for start, numel in held]
    gaps = [after - end for end, after in zip([0, *ends], [*starts, layout.size], strict=True)]
    before = [0, *accumulate(numel for _, numel in held)]

    def content_before(offset: int) -> int:
        """Elements of tensors before an offset."""
        index = bisect_right(starts, offset) - 1
        return before[index] + min(offset, ends[index]) - starts[index] if index >= 0 else 0

    upto = [content_before(cut) for cut in (*layout.rank_to_offset, layout.size)]
    marks = 0
    for offset in (*starts, *layout.rank_to_offset):
        marks |= offset
    return LayoutReport(
        segments=layout.dp_size,
        tensors=len(layout.tensor_shapes),
        content=before[-1],
        size=layout.size,
        longest=max(lengths),
        shortest=min(lengths),
        empty=sum(low == high for low, high in pairwise(upto)),
        cut=_count_cut(starts, ends, layout.rank_to_offset),
        largest_gap=max(gaps),
        alignment=marks & -marks,
        itemsize=itemsize or 1,
    )


def report_segment(layout: GlobalLayout, k: int) -> SegmentReport:
    """What lies in segment `k`; of a layout of any size, at the cost of what lies there.

    Raises:
        LayoutError: There is no such segment.

    Example:
        >>> import dbuf
        >>> found = report_segment(dbuf.plan_row_atomic([(5, 4), (2, 6), (3,)], 2), 1)
        >>> found.start, found.content, found.padding
        (24, 12, 12)
    """
    start, numel = layout.segment(k)
    return SegmentReport(start, numel, layout.pieces(start, numel))


def _count_cut(starts: list[int], ends: list[int], cuts: tuple[int, ...]) -> int:
    """Tensors with a cut strictly inside of them."""
    return sum(bisect_right(cuts, start) < bisect_left(cuts, end) for start, end in zip(starts, ends, strict=True))


def _refuse(layout: object) -> NoReturn:
    raise LayoutError(
        explain(
            "dbuf.report",
            "a report is of a layout.",
            got=type(layout).__name__,
            need="a GlobalLayout, or a DBuffer",
            fix="dbuf.report(plan.layout)" if hasattr(layout, "layout") else "dbuf.report(buf)",
        )
    )
