"""Rows of text under each other."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["align", "bytes_as_text"]


def align(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as what is in them; the first to the left, the others to the right.

    Example:
        >>> print(align([("unit", "size"), ("embed", "12")]))
        unit   size
        embed    12
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(rest, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def bytes_as_text(nbytes: float) -> str:
    """Bytes in the largest unit of which there is at least one.

    Example:
        >>> bytes_as_text(1536), bytes_as_text(7)
        ('1.50 KiB', '7 B')
    """
    size, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.2f} {units[0]}"
