"""A layout as characters: a line a segment, a letter a tensor; and what pictures of layouts share."""

from __future__ import annotations

import heapq
import string
from collections.abc import Sequence

from dbuf.errors import LayoutError, explain, require_positive
from dbuf.layout import GlobalLayout

__all__ = ["choose_largest", "choose_rows", "draw", "name_tensors", "segment_runs"]

_WHERE = "dbuf.reports.draw"
_LETTERS = string.ascii_letters
_OTHER, _PADDING, _BLANK = "#", ".", " "


def draw(layout: GlobalLayout, names: Sequence[str] = (), *, width: int = 72, rows: int = 64) -> str:
    """Draw a layout for a terminal: a line a segment, a letter a tensor, and what the letters stand for.

    All lines are scaled to the longest segment, an element a character at most; a character shows what holds most of
    its elements. `.` is padding, and a shorter segment ends in blanks. Of more than 52 tensors the largest get a letter
    and the others `#`.

    Args:
        layout: What to draw.
        names: What to call the tensors; by default `0`, `1`, ...
        width: Characters of a segment's line.
        rows: Segments to draw: of more, the first half of `rows` and the last.

    Returns:
        The lines, without a trailing newline.

    Raises:
        LayoutError: There is not one name a tensor, `width` has no room for a segment, or `rows` is not positive.

    Example:
        >>> import dbuf
        >>> print(draw(dbuf.plan_row_atomic([(5, 4), (2, 6), (3,)], 2), ["w", "v", "b"]))
        rank 0 |aaaaaaaaaaaaaaaaaaaaccc.|
        rank 1 |bbbbbbbbbbbb............|
        <BLANKLINE>
        a  w (5, 4)
        b  v (2, 6)
        c  b (3,)
        .  padding (13 of 48 elements)
    """
    named = name_tensors(layout, names, _WHERE)
    shown, hidden, shown_last = choose_rows(layout, rows, _WHERE)
    letters = dict(zip(choose_largest(layout, len(_LETTERS)), _LETTERS, strict=False))
    longest = max(layout.segment(k)[1] for k in range(layout.dp_size))
    digits = len(str(layout.dp_size - 1))
    columns = min(longest, _columns(width, len("rank ||") + 1 + digits))
    bars = {k: _bar(layout, k, longest, columns, letters) for k in (*shown, *shown_last)}
    lines = [f"rank {k:>{digits}} |{bar}|" for k, bar in bars.items()]
    if hidden:
        lines.insert(len(shown), f"... {hidden:,} more ...")
    held = {tensor for k in bars for tensor, _, _ in segment_runs(layout, k)}
    seen = set().union(*bars.values())
    return "\n".join([*lines, "", *_legend(layout, named, letters, held, seen)])


def name_tensors(layout: GlobalLayout, names: Sequence[str], where: str) -> tuple[str, ...]:
    """Return `names`, or the tensors' numbers where there are none.

    Args:
        layout: Whose tensors.
        names: One a tensor, or none at all.
        where: The function that was called, for the message.

    Raises:
        LayoutError: There are names, but not one a tensor.

    Example:
        >>> name_tensors(GlobalLayout(((4,), (2,)), (0, 4), 6, (0,)), (), "draw")
        ('0', '1')
    """
    count = len(layout.tensor_shapes)
    if names and len(names) != count:
        raise LayoutError(
            explain(
                where,
                "there is not one name a tensor.",
                got=f"{len(names)} names",
                need=f"{count} names, or none",
                fix="names=() calls the tensors by their numbers",
            )
        )
    return tuple(names) or tuple(map(str, range(count)))


def choose_rows(layout: GlobalLayout, rows: int, where: str) -> tuple[range, int, range]:
    """Choose the segments to draw: the first ones, how many to leave out, the last ones.

    Args:
        layout: Whose segments.
        rows: How many there is room for.
        where: The function that was called, for the message.

    Raises:
        LayoutError: `rows` is not a positive int.

    Example:
        >>> choose_rows(GlobalLayout((), (), 0, (0,) * 9), 5, "draw")
        (range(0, 3), 4, range(7, 9))
    """
    require_positive(rows, "rows", where, LayoutError)
    count = layout.dp_size
    if count <= rows:
        return range(count), 0, range(0)
    return range(rows - rows // 2), count - rows, range(count - rows // 2, count)


def choose_largest(layout: GlobalLayout, count: int) -> list[int]:
    """Choose the `count` largest tensors, in tree order; the earlier of equals.

    Example:
        >>> choose_largest(GlobalLayout(((1,), (3,), (2,)), (0, 1, 4), 6, (0,)), 2)
        [1, 2]
    """
    numels = layout.tensor_numels
    return sorted(heapq.nsmallest(count, range(len(numels)), key=lambda tensor: (-numels[tensor], tensor)))


def segment_runs(layout: GlobalLayout, k: int) -> list[tuple[int | None, int, int]]:
    """Tile segment `k`: `(tensor, start, stop)` counted from the segment's start, the tensor None for padding.

    Raises:
        LayoutError: There is no such segment.

    Example:
        >>> segment_runs(GlobalLayout(((4,), (2,)), (0, 5), 8, (0, 3)), 1)
        [(0, 0, 1), (None, 1, 2), (1, 2, 4), (None, 4, 5)]
    """
    start, numel = layout.segment(k)
    runs: list[tuple[int | None, int, int]] = []
    end = 0
    for tensor, _, length, begin in layout.pieces(start, numel):
        if end < begin:
            runs.append((None, end, begin))
        end = begin + length
        runs.append((tensor, begin, end))
    if end < numel:
        runs.append((None, end, numel))
    return runs


def _columns(width: int, taken: int) -> int:
    """Characters that are left for a segment."""
    if require_positive(width, "width", _WHERE, LayoutError) <= taken:
        raise LayoutError(
            explain(
                _WHERE,
                "a line has no room for a segment.",
                got=f"width={width}",
                need=f"more than the {taken} characters around a segment",
                fix="width=72",
            )
        )
    return width - taken


def _bar(layout: GlobalLayout, k: int, longest: int, columns: int, letters: dict[int, str]) -> str:
    """One segment: in each column what holds most of it, the earlier of equals."""
    if not columns:
        return ""
    most = [(0, _BLANK)] * columns
    runs = [
        (_PADDING if tensor is None else letters.get(tensor, _OTHER), begin, end)
        for tensor, begin, end in segment_runs(layout, k)
    ]
    for letter, begin, end in [*runs, (_BLANK, layout.segment(k)[1], longest)]:
        low, high = begin * columns, end * columns  # in parts of an element, of which a column has `longest`
        for column in range(low // longest, -(-high // longest)):
            held = min(high, (column + 1) * longest) - max(low, column * longest)
            if held > most[column][0]:
                most[column] = (held, letter)
    return "".join(letter for _, letter in most)


def _legend(
    layout: GlobalLayout, named: tuple[str, ...], letters: dict[int, str], held: set[int | None], seen: set[str]
) -> list[str]:
    """What the letters stand for, and why one of them may be `held` by a segment and yet not `seen`."""
    lines = []
    for tensor, letter in letters.items():
        note = ""
        if not layout.tensor_numels[tensor]:
            note = " (no elements)"
        elif letter not in seen:
            note = " (too small to see)" if tensor in held else " (in none of the ranks shown)"
        lines.append(f"{letter}  {named[tensor]} {layout.tensor_shapes[tensor]}{note}")
    if len(named) > len(letters):
        lines.append(f"{_OTHER}  and {len(named) - len(letters):,} more")
    padding = layout.size - sum(layout.tensor_numels)
    return [*lines, f"{_PADDING}  padding ({padding:,} of {layout.size:,} elements)"]
