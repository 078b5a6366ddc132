"""A layout as a picture: a row a segment, a bar a tensor, hatched grey where there is padding."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from dbuf.errors import DbufError, explain
from dbuf.layout import GlobalLayout
from dbuf.reports.layout import report
from dbuf.reports.text import choose_largest, choose_rows, name_tensors, segment_runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend

__all__ = ["plot"]

_WHERE = "dbuf.reports.plot"
# Okabe and Ito, "Color Universal Design" (2008), without black; then darker, then lighter.
_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")
_SHADES = (0.0, -0.35, 0.5)
_IN_LEGEND = 20
_LONGEST_NAME = 40
_PADDING: Mapping[str, Any] = {"facecolor": "0.93", "edgecolor": "0.6", "hatch": "////", "linewidth": 0.0}

# Inches; heights of the axes are data coordinates too, so that a row's text can be fitted to it.
_DPI = 150
_BARS_WIDTH = 9.0
_HEIGHT_OF_ALL_ROWS = 9.0
_ROW_HEIGHTS = (0.05, 0.5)
_GAP_HEIGHT = 0.22
_TOP, _BOTTOM, _BESIDE = 0.45, 0.8, 0.15
_POINTS = 72
_SMALLEST_FONT, _LARGEST_FONT = 4.5, 9.0
_LEAST_WIDTH = 4 / _DPI


@dataclass(frozen=True)
class _Rows:
    """Which segments are drawn, and where.

    Attributes:
        tops: Segment -> the inches from the top of the axes to its row.
        hidden: Segments that are left out.
        gap: Inches from the top to the line that says so.
        height: Inches of a row.
        total: Inches of the axes.
        longest: Elements of the longest segment, at least 1.
    """

    tops: dict[int, float]
    hidden: int
    gap: float
    height: float
    total: float
    longest: int

    @property
    def font(self) -> float:
        """Points of a label in a row."""
        return min(_LARGEST_FONT, 0.6 * self.height * _POINTS)

    def inches(self, numel: float) -> float:
        """Width of a number of elements."""
        return numel * _BARS_WIDTH / self.longest


def plot(
    layout: GlobalLayout,
    names: Sequence[str] = (),
    *,
    title: str = "",
    path: str | os.PathLike[str] | None = None,
    rows: int = 64,
) -> Figure:
    """Draw a layout: a row a segment, a coloured bar a tensor, hatched grey for padding.

    A tensor has the same colour in every row and every picture of the same tensors. What is too thin to be seen is
    drawn a little wider. Needs matplotlib, and leaves the state of `pyplot` alone.

    Args:
        layout: What to draw.
        names: What to call the tensors; by default `0`, `1`, ...
        title: A line above the rows.
        path: Where to save the picture: PNG, unless its ending says otherwise. By default it is not saved.
        rows: Segments to draw: of more, the first half of `rows` and the last.

    Returns:
        The figure.

    Raises:
        LayoutError: There is not one name a tensor, or `rows` is not positive.
        DbufError: matplotlib is not installed.

    Example:
        >>> import dbuf
        >>> figure = plot(dbuf.plan_row_atomic([(5, 4), (2, 6), (3,)], 2), ["w", "v", "b"], title="two ranks")
        >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
        ['rank 0', 'rank 1']
    """
    named = tuple(map(_shorten, name_tensors(layout, names, _WHERE)))
    placed = _place(layout, rows)
    figure, axes = _make_axes(placed)
    _draw_bars(axes, layout, placed)
    if placed.font >= _SMALLEST_FONT:
        _draw_labels(axes, layout, named, placed)
    _draw_frame(axes, layout, placed, title)
    _fit(figure, axes, _draw_legend(axes, layout, named), placed)
    if path is not None:
        figure.savefig(path)
    return figure


def _place(layout: GlobalLayout, rows: int) -> _Rows:
    first, hidden, last = choose_rows(layout, rows, _WHERE)
    low, high = _ROW_HEIGHTS
    height = min(high, max(low, _HEIGHT_OF_ALL_ROWS / (len(first) + len(last))))
    gap = len(first) * height
    below = gap + (_GAP_HEIGHT if hidden else 0)
    tops = {k: at * height for at, k in enumerate(first)}
    tops |= {k: below + at * height for at, k in enumerate(last)}
    longest = max(layout.segment(k)[1] for k in range(layout.dp_size))
    return _Rows(tops, hidden, gap, height, below + len(last) * height, max(longest, 1))


def _make_axes(placed: _Rows) -> tuple[Figure, Axes]:
    """Axes with one data unit an inch downwards; `_fit` gives the figure its size."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        _refuse_without_matplotlib(error)
    figure = Figure(dpi=_DPI)
    FigureCanvasAgg(figure)  # which the figure keeps
    axes = figure.add_axes((0.1, 0.1, 0.8, 0.8))
    axes.set_xlim(0, placed.longest)
    axes.set_ylim(placed.total, 0)
    return figure, axes


def _draw_bars(axes: Axes, layout: GlobalLayout, placed: _Rows) -> None:
    """Tensors and padding of each segment, and marks where it starts and ends."""
    from matplotlib.collections import LineCollection

    thickness = 0.82 * placed.height
    marks = []
    for k, top in placed.tops.items():
        low = top + (placed.height - thickness) / 2
        padding = [(start, stop - start) for t, start, stop in segment_runs(layout, k) if t is None]
        axes.broken_barh(padding, (low, thickness), gid=f"padding {k}", **_PADDING)
        bars = _widen(layout, k, placed)
        spans, colors = [(left, right - left) for _, left, right in bars], [_color(tensor) for tensor, _, _ in bars]
        axes.broken_barh(
            spans, (low, thickness), facecolors=colors, edgecolor="white", linewidth=0.3, gid=f"rank {k}", zorder=2
        )
        marks += [[(x, top), (x, top + placed.height)] for x in (0, layout.segment(k)[1])]
    axes.add_collection(LineCollection(marks, colors="black", linewidths=0.7, zorder=3, clip_on=False))


def _widen(layout: GlobalLayout, k: int, placed: _Rows) -> list[tuple[int, float, float]]:
    """`(tensor, left, right)` in elements, none too thin to be seen and none over another.

    A thin one pushes what follows to the right; what leaves the segment so is pushed back.
    """
    found = [(t, start, stop) for t, start, stop in segment_runs(layout, k) if t is not None]
    least = min(_LEAST_WIDTH / placed.inches(1), placed.longest / (4 * len(found) or 1))
    lefts, rights, end = [], [], 0.0
    for _, start, stop in found:
        lefts.append(max(start, end))
        end = max(stop, lefts[-1] + least)
        rights.append(end)
    limit = max(float(layout.segment(k)[1]), least * len(found))
    for at in reversed(range(len(found))):
        rights[at] = min(rights[at], limit)
        limit = lefts[at] = min(lefts[at], rights[at] - least)
    return [(tensor, left, right) for (tensor, _, _), left, right in zip(found, lefts, rights, strict=True)]


def _draw_labels(axes: Axes, layout: GlobalLayout, named: tuple[str, ...], placed: _Rows) -> None:
    """Names of tensors inside of the bars that are wide enough."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=placed.font)
    widths = [text_to_path.get_text_width_height_descent(name, font, False)[0] / _POINTS for name in named]
    margin = placed.font / _POINTS  # an em
    for k, top in placed.tops.items():
        for tensor, left, right in _widen(layout, k, placed):
            if widths[tensor] + margin <= placed.inches(right - left):
                axes.text(
                    (left + right) / 2,
                    top + placed.height / 2,
                    named[tensor],
                    fontproperties=font,
                    color=_ink(tensor),
                    ha="center",
                    va="center_baseline",
                    parse_math=False,
                    gid="label",
                )


def _draw_frame(axes: Axes, layout: GlobalLayout, placed: _Rows, title: str) -> None:
    """All around the bars: ticks, title, axis label, footer."""
    from matplotlib.ticker import MaxNLocator

    ranks = _ticks(placed)
    axes.set_yticks([placed.tops[k] + placed.height / 2 for k in ranks], [f"rank {k}" for k in ranks])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes.xaxis.set_major_formatter(lambda numel, _: _with_unit(numel))
    axes.tick_params(labelsize=_LARGEST_FONT)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("elements from the segment's start", fontsize=_LARGEST_FONT)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", parse_math=False)
    found = report(layout)
    footer = (
        f"padding {found.overhead:.3%} of the tensors' elements   |   "
        f"longest segment {_with_unit(found.longest)}, {found.imbalance:.3f} x the mean   |   "
        f"{found.empty:,} of {found.segments:,} ranks empty"
    )
    below = axes.annotate(footer, (0, 0), (0, -40), xycoords="axes fraction", textcoords="offset points", va="top")
    below.set(fontsize=_LARGEST_FONT, color="0.3")
    if placed.hidden:
        middle = placed.longest / 2, placed.gap + _GAP_HEIGHT / 2
        axes.text(*middle, f"... {placed.hidden:,} more ...", ha="center", va="center", fontsize=_LARGEST_FONT)


def _draw_legend(axes: Axes, layout: GlobalLayout, named: tuple[str, ...]) -> Legend:
    """Colours of the largest tensors, to the right of the bars."""
    from matplotlib.patches import Patch

    listed = choose_largest(layout, _IN_LEGEND)
    entries = [(Patch(facecolor=_color(t)), f"{named[t]}  {layout.tensor_shapes[t]}") for t in listed]
    if len(named) > len(listed):
        entries.append((Patch(facecolor="none"), f"and {len(named) - len(listed):,} more"))
    entries.append((Patch(**_PADDING), "padding"))
    legend = axes.legend(
        [patch for patch, _ in entries],
        [" "] * len(entries),
        loc="upper left",
        bbox_to_anchor=(1, 1),
        borderaxespad=1.0,
        frameon=False,
        fontsize=_LARGEST_FONT,
    )
    # Later, because matplotlib leaves out what starts with an underscore, and typesets what is between dollar signs.
    for text, (_, label) in zip(legend.get_texts(), entries, strict=True):
        text.set_parse_math(False)
        text.set_text(label)
    return legend


def _fit(figure: Figure, axes: Axes, legend: Legend, placed: _Rows) -> None:
    """Give the bars their size in inches, and the figure what the texts around them need."""
    left = max(label.get_window_extent().width for label in axes.get_yticklabels()) / _DPI + 2 * _BESIDE
    side = legend.get_window_extent()
    width = left + _BARS_WIDTH + side.width / _DPI + 2 * _BESIDE
    height = _TOP + max(placed.total + _BOTTOM, side.height / _DPI + _BESIDE)
    figure.set_size_inches(width, height)
    bottom = height - _TOP - placed.total
    axes.set_position((left / width, bottom / height, _BARS_WIDTH / width, placed.total / height))


def _ticks(placed: _Rows) -> list[int]:
    """Segments whose rows are labelled: all, or each second, fourth ... where rows are thin, and the last."""
    step = 1
    while step * placed.height < 0.35:
        step *= 2
    last = max(placed.tops)
    return [k for k in placed.tops if k == last or (k % step == 0 and k + step / 2 < last)]


def _color(tensor: int) -> tuple[float, float, float]:
    """The colour of a tensor, as red, green and blue up to 1: by its index, so that neighbours differ."""
    base = _COLORS[tensor % len(_COLORS)]
    shade = _SHADES[tensor // len(_COLORS) % len(_SHADES)]
    red, green, blue = (int(base[at : at + 2], 16) / 255 for at in (1, 3, 5))
    toward, amount = float(shade > 0), abs(shade)
    return tuple(part + (toward - part) * amount for part in (red, green, blue))  # type: ignore[return-value]


def _ink(tensor: int) -> str:
    """Black on light colours, white on dark ones."""
    red, green, blue = _color(tensor)
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def _with_unit(numel: float) -> str:
    """A number of elements in few characters: 1.5M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if numel >= size:
            return f"{numel / size:.4g}{unit}"
    return f"{numel:.4g}"


def _shorten(name: str) -> str:
    """The start and the end of a long name."""
    half = _LONGEST_NAME // 2
    return name if len(name) <= _LONGEST_NAME else f"{name[: half - 3]}...{name[-half:]}"


def _refuse_without_matplotlib(error: ImportError) -> NoReturn:
    raise DbufError(
        explain(
            _WHERE,
            "matplotlib is not installed.",
            got=str(error),
            need="matplotlib 3.8 or later",
            fix='pip install "dbuf[examples]"',
        )
    ) from error
