"""Pictures of layouts: text to the character, figures by their patches and by what their texts cover."""

from __future__ import annotations

import random
import sys
from itertools import combinations, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import dbuf
from dbuf import GlobalLayout, ShardLayout, plan_row_atomic
from dbuf.errors import DbufError, LayoutError
from dbuf.reports.picture import plot
from dbuf.reports.text import choose_rows, draw, segment_runs

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.text import Text

BY_HAND = GlobalLayout(((4, 4), (3,), (0, 5), ()), (8, 24, 0, 28), 40, (0, 16, 32)).validate()
BLOCK = {
    "q": (256, 256), "k": (64, 256), "v": (64, 256), "o": (256, 256), "gate": (896, 256), "up": (896, 256),
    "down": (256, 896), "norm1": (256,), "norm2": (256,),
}  # fmt: skip
UNPADDED = ShardLayout.UNPADDED


def boxes(figure: Figure) -> dict[str, Any]:
    """What each text covers, and the legend: name -> bounding box in pixels."""
    figure.canvas.draw()
    axes = figure.axes[0]
    ticks = [*axes.get_xticklabels(), *axes.get_yticklabels()]
    low, high = axes.get_xlim()
    shown = [t for t in ticks if t in axes.get_yticklabels() or low <= t.get_position()[0] <= high]
    texts = [*axes.texts, axes.xaxis.label, axes.title, axes._left_title, *shown]
    named = {f"{at}: {t.get_text()}": t.get_window_extent() for at, t in enumerate(texts) if t.get_text()}
    return named | {"legend": axes.get_legend().get_window_extent()}


def bars(figure: Figure, kind: str) -> dict[int, list[tuple[float, float]]]:
    """Row -> left and right end of each bar of a kind, `rank` or `padding`."""
    found = {}
    for drawn in figure.axes[0].collections:
        name, _, k = (drawn.get_gid() or "").partition(" ")
        if name == kind:
            found[int(k)] = [(path.vertices[:, 0].min(), path.vertices[:, 0].max()) for path in drawn.get_paths()]
    return found


def labels(figure: Figure) -> list[Text]:
    """The names inside of bars."""
    return [text for text in figure.axes[0].texts if text.get_gid() == "label"]


def test_text_by_hand() -> None:
    """| . 8 | 8 of w || 8 of w | b | . | s . || . 8 |: an element a character."""
    assert draw(BY_HAND, ["w", "b", "none", "s"]) == "\n".join([
        "rank 0 |........aaaaaaaa|",
        "rank 1 |aaaaaaaabbb.d...|",
        "rank 2 |........        |",
        "",
        "a  w (4, 4)",
        "b  b (3,)",
        "c  none (0, 5) (no elements)",
        "d  s ()",
        ".  padding (20 of 40 elements)",
    ])  # fmt: skip


def test_text_scaled_down_shows_what_holds_most_of_a_character() -> None:
    assert draw(BY_HAND, width=13).splitlines() == [
        "rank 0 |..aa|",
        "rank 1 |aab.|",
        "rank 2 |..  |",
        "",
        "a  0 (4, 4)",
        "b  1 (3,)",
        "c  2 (0, 5) (no elements)",
        "d  3 () (too small to see)",
        ".  padding (20 of 40 elements)",
    ]


def test_text_shows_the_earlier_of_equals() -> None:
    layout = plan_row_atomic([(2,), (2,)], 1, shard_layout=UNPADDED)
    assert draw(layout, width=10).splitlines()[0] == "rank 0 |a|"


def test_text_leaves_out_the_middle() -> None:
    layout = plan_row_atomic([(3000,), (5,)], 1005, shard_layout=UNPADDED)
    lines = draw(layout, rows=3).splitlines()
    assert lines[:4] == ["rank    0 |aaa|", "rank    1 |aaa|", "... 1,002 more ...", "rank 1004 |bbb|"]
    one = draw(layout, rows=1).splitlines()
    assert one[:2] == ["rank    0 |aaa|", "... 1,004 more ..."] and "b  1 (5,) (in none of the ranks shown)" in one
    assert "more" not in draw(layout, rows=1005)


def test_text_of_more_tensors_than_letters() -> None:
    """The 52 largest have letters; of the 60, the first 8 are the smallest."""
    layout = plan_row_atomic([(1 + (i >= 8),) for i in range(60)], 1, shard_layout=UNPADDED)
    lines = draw(layout, width=200).splitlines()
    assert lines[0].count("#") == 8 and "aabbcc" in lines[0] and "YYZZ" in lines[0]
    assert lines[2] == "a  8 (2,)" and lines[-3:-1] == ["Z  59 (2,)", "#  and 8 more"]


@pytest.mark.parametrize("n", [1, 2])
def test_text_of_an_empty_group(n: int) -> None:
    bare = [*(f"rank {k} ||" for k in range(n)), ""]
    assert draw(plan_row_atomic([], n)).splitlines() == [*bare, ".  padding (0 of 0 elements)"]
    assert draw(plan_row_atomic([(0, 3)], n)).splitlines()[n + 1] == "a  0 (0, 3) (no elements)"


def test_runs_tile_segments() -> None:
    rng = random.Random(0)
    for _ in range(50):
        shapes = [tuple(rng.randint(0, 9) for _ in range(rng.randint(0, 2))) for _ in range(rng.randint(0, 9))]
        layout = plan_row_atomic(shapes, rng.randint(1, 7), shard_layout=rng.choice(list(ShardLayout)))
        held = dict.fromkeys((None, *range(len(shapes))), 0)
        for k in range(layout.dp_size):
            end = 0
            for tensor, start, stop in segment_runs(layout, k):
                assert start == end < stop
                held[tensor] += stop - start
                end = stop
            assert end == layout.segment(k)[1]
        padding = held.pop(None)
        assert tuple(held.values()) == layout.tensor_numels and padding == layout.size - sum(layout.tensor_numels)


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"(?s)dbuf.reports.draw: there is not one name a tensor.*2 names.*4 names"):
        draw(BY_HAND, ["w", "b"])
    with pytest.raises(LayoutError, match=r"(?s)no room for a segment.*more than the 9 characters"):
        draw(BY_HAND, width=9)
    for function in (draw, plot):
        with pytest.raises(LayoutError, match="rows is not a positive int"):
            function(BY_HAND, rows=0)
    with pytest.raises(LayoutError, match=r"dbuf.reports.plot: there is not one name a tensor"):
        plot(BY_HAND, ["w"])


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(DbufError, match=r'(?s)matplotlib is not installed.*try:  pip install "dbuf\[examples\]"'):
        plot(BY_HAND)


def test_the_picture_is_saved_and_pyplot_left_alone(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    file = tmp_path / "layout.png"
    figure = plot(BY_HAND, title="by hand", path=file)
    height, width, _ = image.imread(file).shape
    assert (width, height) == pytest.approx(figure.get_size_inches() * figure.dpi, abs=1)
    if "matplotlib.pyplot" in sys.modules:
        assert not sys.modules["matplotlib.pyplot"].get_fignums()


@pytest.mark.parametrize("n", [4, 64])
@pytest.mark.parametrize("kind", list(ShardLayout))
def test_a_row_a_rank_and_hatched_padding(n: int, kind: ShardLayout) -> None:
    pytest.importorskip("matplotlib")
    layout = plan_row_atomic([*BLOCK.values()], n, shard_layout=kind)
    figure = plot(layout, [*BLOCK])
    tensors, padding = bars(figure, "rank"), bars(figure, "padding")
    assert sorted(tensors) == sorted(padding) == list(range(n))
    for k in range(n):
        runs = segment_runs(layout, k)
        assert padding[k] == [(start, stop) for tensor, start, stop in runs if tensor is None]
        spans = tensors[k]
        assert len(spans) == sum(tensor is not None for tensor, _, _ in runs)
        assert all(before <= after + 1e-6 for (_, before), (after, _) in pairwise(spans))
        assert not spans or (spans[0][0] >= 0 and spans[-1][1] <= layout.segment(k)[1] + 1e-6)
    hatches = {c.get_gid().split()[0]: c.get_hatch() for c in figure.axes[0].collections if c.get_gid()}
    assert hatches == {"rank": None, "padding": "////"}


@pytest.mark.parametrize("numels", [(2**30, 1, 1), (1, 1, 2**30), (2**29, 1, 2**29)])
def test_tiny_tensors_are_wide_enough_to_be_seen(numels: tuple[int, ...]) -> None:
    pytest.importorskip("matplotlib")
    offsets = tuple(sum(numels[:at]) for at in range(3))
    layout = GlobalLayout(tuple((numel,) for numel in numels), offsets, sum(numels), (0,)).validate()
    (spans,) = bars(plot(layout), "rank").values()
    pixels = [(right - left) / layout.size * 9 * 150 for left, right in spans]
    assert [width for width, numel in zip(pixels, numels, strict=True) if numel == 1] == pytest.approx(
        [4] * numels.count(1), abs=0.01
    )
    assert sum(pixels) == pytest.approx(9 * 150, abs=0.01)


CASES = {
    "4": (4, BLOCK, {}),
    "64": (64, BLOCK, {}),
    "64 and hundreds": (64, {f"_layers.{i}.a_long_${i % 7}$_name": (40 + i, 8 * (1 + i % 9)) for i in range(300)}, {}),
    "98": (98, BLOCK, {"rows": 98}),  # 97, the last, is labelled, and 96 would be
    "left out": (1000, BLOCK, {"rows": 9}),
}


@pytest.mark.parametrize("case", CASES)
def test_nothing_overlaps_and_all_is_within_the_figure(case: str) -> None:
    pytest.importorskip("matplotlib")
    n, shapes, options = CASES[case]
    figure = plot(plan_row_atomic([*shapes.values()], n), [*shapes], title="A title", **options)
    found = boxes(figure)
    assert len(found) > min(n, 9) + 5 and len(figure.axes[0].get_yticklabels()) <= 25
    for (a, one), (b, other) in combinations(found.items(), 2):
        assert not one.overlaps(other), f"{a!r} lies over {b!r}"
    assert [name for name, box in found.items() if not figure.bbox.containsx(box.x1)] == []
    assert all(box.x0 >= 0 and box.y0 >= 0 and box.y1 <= figure.bbox.y1 for box in found.values())
    assert found["legend"].x0 >= figure.axes[0].bbox.x1


@pytest.mark.parametrize("n", [4, 64])
def test_labels_lie_inside_of_their_bars(n: int) -> None:
    pytest.importorskip("matplotlib")
    layout = plan_row_atomic([*BLOCK.values()], n)
    figure = plot(layout, [*BLOCK])
    figure.canvas.draw()
    axes = figure.axes[0]
    inside = labels(figure)
    assert {text.get_text() for text in inside} >= {"q", "o", "gate", "up", "down"} and len(inside) >= n
    rows = [c for c in axes.collections if (c.get_gid() or "").startswith("rank")]
    rectangles = [path.get_extents(axes.transData) for row in rows for path in row.get_paths()]
    for text in inside:
        box = text.get_window_extent()
        assert any(r.x0 <= box.x0 and box.x1 <= r.x1 and r.y0 <= box.y0 and box.y1 <= r.y1 for r in rectangles)


def test_legend_and_footer() -> None:
    pytest.importorskip("matplotlib")
    many = plot(plan_row_atomic([(i + 1, 2) for i in range(30)], 2), [f"_w{i}" for i in range(30)])
    entries = [text.get_text() for text in many.axes[0].get_legend().get_texts()]
    assert not any(text.get_parse_math() for text in (*many.axes[0].get_legend().get_texts(), *labels(many)))
    assert len(entries) == 22 and entries[0] == "_w10  (11, 2)" and entries[-2:] == ["and 10 more", "padding"]
    footer = next(text.get_text() for text in plot(BY_HAND).axes[0].texts if text.get_gid() != "label")
    assert footer.split("   |   ") == [
        "padding 100.000% of the tensors' elements", "longest segment 16, 1.200 x the mean", "1 of 3 ranks empty",
    ]  # fmt: skip


def test_a_tensor_has_one_colour_at_any_number_of_ranks() -> None:
    pytest.importorskip("matplotlib")
    colors = []
    for n in (4, 64):
        legend = plot(plan_row_atomic([*BLOCK.values()], n), [*BLOCK]).axes[0].get_legend()
        colors.append([patch.get_facecolor() for patch in legend.get_patches()])
    assert colors[0] == colors[1] and len(set(colors[0])) == len(BLOCK) + 1


@pytest.mark.parametrize("shapes", [[], [(0, 3)], [()]])
def test_pictures_of_nothing_and_next_to_nothing(shapes: list[tuple[int, ...]]) -> None:
    pytest.importorskip("matplotlib")
    for kind in ShardLayout:
        layout = plan_row_atomic(shapes, 3, shard_layout=kind)
        figure = plot(layout)
        figure.canvas.draw()
        assert sum(map(len, bars(figure, "rank").values())) == sum(layout.tensor_numels)
        assert choose_rows(layout, 64, "here")[0] == range(3) and dbuf.report(layout).segments == 3
