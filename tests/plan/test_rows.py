"""`plan_row_atomic` against recorded answers, a slow oracle, and its laws on random shapes."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dbuf.errors import DbufError, LayoutError
from dbuf.layout import GlobalLayout
from dbuf.placement import BlockAtomic, RowAtomic, ShardLayout
from dbuf.plan import plan_row_atomic

CASES = json.loads((Path(__file__).parents[1] / "cases" / "layouts.json").read_text())
MODELS = json.loads((Path(__file__).parents[1] / "cases" / "models.json").read_text())
Shapes = list[tuple[int, ...]]


@st.composite
def groups(draw: st.DrawFn, block_size: int = 1) -> Shapes:
    """Shapes of 0 to 3 dims whose rows are whole blocks; empties, scalars and the empty group included."""
    rows = st.integers(0, 8).map(lambda n: n * block_size)
    shape = st.tuples(rows, st.lists(st.integers(0, 6), max_size=2)).map(lambda s: (s[0], *s[1]))
    return draw(st.lists(shape | st.just(()) if block_size == 1 else shape, max_size=12))


@st.composite
def problems(draw: st.DrawFn) -> tuple[Shapes, int, int]:
    block_size = draw(st.sampled_from([1, 1, 2, 3]))
    return draw(groups(block_size)), draw(st.integers(1, 9)), block_size


# --- the slow oracle ------------------------------------------------------------------------------


def slow_padded(shapes: Shapes, dp_size: int, block_size: int) -> tuple[list[int], int]:
    """The gap-filling rule as it reads: lists, scans, one tensor at a time."""
    numels = [math.prod(shape) for shape in shapes]
    units = [block_size * math.prod(shape[1:]) for shape in shapes]
    chunk = math.lcm(*(u for u, n in zip(units, numels, strict=True) if n))
    todo = [t for t, n in enumerate(numels) if n >= chunk]
    offsets, gaps, end = [0] * len(shapes), [], 0
    while todo:
        first = todo.pop(0)
        offsets[first], end = end, end + numels[first]
        boundary = math.ceil(end / chunk) * chunk
        if end == boundary:
            continue
        gap = [end, boundary]
        end = boundary
        for partner in todo:
            if 0 < numels[partner] % chunk <= gap[1] - gap[0]:
                todo.remove(partner)
                offsets[partner] = gap[1] = boundary - numels[partner] % chunk
                end = offsets[partner] + numels[partner]
                break
        gaps.append(gap)
    for t in sorted((t for t, n in enumerate(numels) if 0 < n < chunk), key=lambda t: (-numels[t], t)):
        for gap in [*gaps, None]:
            if gap is None:
                offsets[t] = math.ceil(end / units[t]) * units[t]
                end = offsets[t] + numels[t]
            elif math.ceil(gap[0] / units[t]) * units[t] + numels[t] <= gap[1]:
                offsets[t] = math.ceil(gap[0] / units[t]) * units[t]
                gap[0] = offsets[t] + numels[t]
                break
    return offsets, math.ceil(end / (chunk * dp_size)) * chunk * dp_size


def slow_unpadded(shapes: Shapes, dp_size: int, block_size: int) -> tuple[list[int], list[int]]:
    """Every legal boundary, and for every cut the nearest of them, the lower one on a tie."""
    offsets, legal, end = [], {0}, 0
    for shape in shapes:
        offsets.append(end)
        if math.prod(shape):
            legal.update(range(end, end + math.prod(shape) + 1, block_size * math.prod(shape[1:])))
        end += math.prod(shape)
    cuts = [min(legal, key=lambda b: (abs(b * dp_size - k * end), b)) for k in range(dp_size)]
    return offsets, cuts


# --- recorded answers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "case"), [(kind, case) for kind in ("padded", "unpadded") for case in CASES[kind]], ids=str
)
def test_recorded_layouts(kind: str, case: dict[str, Any]) -> None:
    layout = plan_row_atomic(
        case["shapes"], case["dp_size"], block_size=case["block_size"], shard_layout=ShardLayout(kind)
    )
    assert list(layout.tensor_to_offset) == case["offsets"]
    assert layout.size == case["size"]
    assert list(layout.rank_to_offset) == case["rank_to_offset"]
    assert layout.align == 1
    assert layout.validate().admits(BlockAtomic(case["block_size"]))


# --- laws -----------------------------------------------------------------------------------------


@given(problems())
@example(([(2, 6), (4, 4), (4, 4), (1, 2), (1, 6)], 5, 1))
@settings(max_examples=200, deadline=None)
def test_law_padded_equals_the_slow_oracle(problem: tuple[Shapes, int, int]) -> None:
    shapes, dp_size, block_size = problem
    layout = plan_row_atomic(shapes, dp_size, block_size=block_size)
    assert (list(layout.tensor_to_offset), layout.size) == slow_padded(shapes, dp_size, block_size)


@given(problems())
@settings(max_examples=200, deadline=None)
def test_law_unpadded_equals_the_slow_oracle(problem: tuple[Shapes, int, int]) -> None:
    shapes, dp_size, block_size = problem
    layout = plan_row_atomic(shapes, dp_size, block_size=block_size, shard_layout=ShardLayout.UNPADDED)
    offsets, cuts = slow_unpadded(shapes, dp_size, block_size)
    assert (list(layout.tensor_to_offset), list(layout.rank_to_offset)) == (offsets, cuts)
    assert layout.size == sum(math.prod(shape) for shape in shapes)


@given(problems(), st.sampled_from(ShardLayout), st.integers(1, 8))
@settings(max_examples=150, deadline=None)
def test_law_segments_tile_tensors_do_not_overlap_and_every_cut_is_legal(
    problem: tuple[Shapes, int, int], shard_layout: ShardLayout, align: int
) -> None:
    shapes, dp_size, block_size = problem
    layout = plan_row_atomic(shapes, dp_size, block_size=block_size, shard_layout=shard_layout, align=align)
    layout.validate()  # refuses overlaps, tensors outside of the buffer, and cuts out of order
    assert layout.dp_size == dp_size
    assert layout.tensor_shapes == tuple(shapes)
    assert layout.admits(BlockAtomic(block_size))
    assert layout.admits(RowAtomic())
    assert layout.is_even or shard_layout is ShardLayout.UNPADDED
    pieces = [piece for k in range(dp_size) for piece in layout.pieces(*layout.segment(k))]
    for tensor, numel in enumerate(layout.tensor_numels):
        assert sum(piece[2] for piece in pieces if piece[0] == tensor) == numel


@given(problems(), st.integers(1, 24))
@settings(max_examples=100, deadline=None)
def test_law_align_rounds_equal_segments_and_leaves_offsets(problem: tuple[Shapes, int, int], align: int) -> None:
    shapes, dp_size, block_size = problem
    plain = plan_row_atomic(shapes, dp_size, block_size=block_size)
    aligned = plan_row_atomic(shapes, dp_size, block_size=block_size, align=align)
    units = (block_size * math.prod(shape[1:]) for shape in shapes if math.prod(shape))
    step = math.lcm(align, *units)
    assert aligned.tensor_to_offset == plain.tensor_to_offset
    assert aligned.segment(0)[1] % step == 0
    assert plain.size <= aligned.size < plain.size + step * dp_size
    uneven = {
        n: plan_row_atomic(shapes, dp_size, block_size=block_size, shard_layout=ShardLayout.UNPADDED, align=n)
        for n in (1, align)
    }
    assert uneven[1].rank_to_offset == uneven[align].rank_to_offset
    assert uneven[align].align == aligned.align == align


@given(problems())
@settings(max_examples=50, deadline=None)
def test_law_offsets_do_not_depend_on_the_number_of_segments(problem: tuple[Shapes, int, int]) -> None:
    """What is left is `size` and the cuts, so that any rank plans the same from shapes alone."""
    shapes, dp_size, block_size = problem
    for shard_layout in ShardLayout:
        one, many = (plan_row_atomic(shapes, n, block_size=block_size, shard_layout=shard_layout) for n in (1, dp_size))
        assert one.tensor_to_offset == many.tensor_to_offset
        assert many == plan_row_atomic(shapes, dp_size, block_size=block_size, shard_layout=shard_layout)


# --- edges ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard_layout", ShardLayout)
def test_the_empty_group(shard_layout: ShardLayout) -> None:
    assert plan_row_atomic([], 3, shard_layout=shard_layout) == GlobalLayout((), (), 0, (0, 0, 0))


def test_scalars_are_one_row_of_one_element() -> None:
    assert plan_row_atomic([(), (2, 3), ()], 2) == GlobalLayout(((), (2, 3), ()), (6, 0, 7), 12, (0, 6))
    assert plan_row_atomic([(), ()], 3, shard_layout=ShardLayout.UNPADDED).rank_to_offset == (0, 1, 1)


def test_tensors_without_elements_occupy_nothing_and_have_no_say_in_the_chunk() -> None:
    shapes = [(0, 5), (2, 3), (3, 0), (4,)]
    assert plan_row_atomic(shapes, 2).tensor_to_offset == (0, 0, 0, 6)
    assert plan_row_atomic(shapes, 2).size == 12
    unpadded = plan_row_atomic(shapes, 2, shard_layout=ShardLayout.UNPADDED)
    assert (unpadded.tensor_to_offset, unpadded.size) == ((0, 0, 6, 6), 10)
    assert plan_row_atomic([(0, 5), (3, 0)], 2) == GlobalLayout(((0, 5), (3, 0)), (0, 0), 0, (0, 0))


def test_more_segments_than_rows() -> None:
    layout = plan_row_atomic([(2, 4)], 8)
    assert (layout.size, layout.rank_to_offset) == (32, (0, 4, 8, 12, 16, 20, 24, 28))
    assert layout.pieces(*layout.segment(7)) == ()


def test_a_tie_goes_to_the_lower_boundary_in_exact_integers() -> None:
    big = 2**60 + 2  # two rows that floats cannot halve without rounding
    layout = plan_row_atomic([(2, big)], 4, shard_layout=ShardLayout.UNPADDED)
    assert layout.rank_to_offset == (0, 0, big, big)
    skewed = plan_row_atomic([(1, big), (1,)], 2, shard_layout=ShardLayout.UNPADDED)
    assert skewed.rank_to_offset == (0, big)  # (big + 1) / 2 lies half an element above big / 2


# --- growth ---------------------------------------------------------------------------------------


def count_lines(call: Callable[[], object]) -> int:
    """Count the lines of Python that `call` executes: a clock that no other process disturbs."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


GROWTH: dict[str, Callable[[int], Shapes]] = {
    "gaps that no later regular fits": lambda n: [(1, 8)] + [(13,)] * n,
    "one partner, at the far end": lambda n: [(1, 8)] + [(13,)] * n + [(9,)] * n,
    "fragments that fill gaps": lambda n: [(1, 16)] + [(17,)] * n + [(1, 4)] * n + [(3,)] * n,
    "gaps large enough but misaligned": lambda n: [(1, 8)] + [(13,), (9,)] * n + [(1, 2)] * n,
    "all fragments, three row sizes": lambda n: [(1, 6), (1, 10), (1, 15)] * n,
}


@pytest.mark.parametrize("shard_layout", ShardLayout)
@pytest.mark.parametrize("kind", GROWTH)
def test_planning_is_near_linear_in_tensors(kind: str, shard_layout: ShardLayout) -> None:
    """Eight times the tensors: 8 times the steps if linear, 64 times if some scan is quadratic."""
    small, large = (
        count_lines(lambda n=n: plan_row_atomic(GROWTH[kind](n), 4, shard_layout=shard_layout)) for n in (100, 800)
    )
    assert large < 8 * 2 * small


@pytest.mark.parametrize("shard_layout", ShardLayout)
def test_planning_does_not_multiply_tensors_by_ranks(shard_layout: ShardLayout) -> None:
    shapes: Shapes = [(13,), (9,), (2, 4), (1, 2)] * 50
    few, many = (count_lines(lambda n=n: plan_row_atomic(shapes, n, shard_layout=shard_layout)) for n in (1, 1025))
    assert many - few < 16 * 1024


@pytest.mark.parametrize("shard_layout", ShardLayout)
def test_twenty_thousand_tensors_on_sixteen_thousand_ranks(shard_layout: ShardLayout) -> None:
    shapes = [(k % 61 + 1, (1, 2, 3, 4, 6, 8, 12)[k % 7]) for k in range(20_000)]
    layout = plan_row_atomic(shapes, 16_384, shard_layout=shard_layout)
    assert layout.validate().admits(RowAtomic())
    at = (15, 1023)
    start, numel = layout.local_range((RowAtomic(), RowAtomic()), (16, 1024), at)
    assert (start, start + numel) == (layout.rank_to_offset[1023 * 16 + 15], layout.size)


@pytest.mark.parametrize("name", MODELS)
def test_real_models_plan_for_many_ranks(name: str) -> None:
    for unit in MODELS[name]["units"]:
        shapes = [tuple(shape) for _, shape in unit["tensors"]]
        for shard_layout in ShardLayout:
            layout = plan_row_atomic(shapes, 512, shard_layout=shard_layout, align=8).validate()
            assert layout.admits(RowAtomic())
            assert layout.size >= sum(map(math.prod, shapes))


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (lambda: plan_row_atomic([(2,)], 0), ["dp_size is not a positive int", "dp_size=0 (int)"]),
        (lambda: plan_row_atomic([(2,)], True), ["dp_size is not a positive int", "dp_size=True (bool)"]),
        (lambda: plan_row_atomic([(2,)], 1, block_size=0), ["block_size is not a positive int"]),
        (lambda: plan_row_atomic([(2,)], 1, align=-4), ["align is not a positive int", "align=-4"]),
        (lambda: plan_row_atomic([(2,), (3, -1)], 1), ["tensor 1 has a bad shape", "(3, -1)"]),
        (lambda: plan_row_atomic([(True,)], 1), ["tensor 0 has a bad shape", "(True,)"]),
        (
            lambda: plan_row_atomic([(4, 2), (6, 2), (), (8,)], 2, block_size=4),
            [
                "rows of 2 of 4 tensors",
                "tensor 1 of shape (6, 2)\n        tensor 2 of shape ()",
                "block_size=1",
            ],
        ),
        (
            lambda: plan_row_atomic([(6, 2)], 2, block_size=4),
            ["does not divide the rows of 1 of 1 tensors", "a multiple of 4", "try:  block_size=2"],
        ),
    ],
)
def test_refusals(call: Callable[[], GlobalLayout], parts: list[str]) -> None:
    with pytest.raises(LayoutError, match=r"^plan_row_atomic: ") as caught:
        call()
    for part in parts:
        assert part in str(caught.value)


def test_an_unknown_shard_layout_is_refused() -> None:
    with pytest.raises(DbufError, match="ShardLayout: no such layout"):
        plan_row_atomic([(2,)], 1, shard_layout="evenly")  # type: ignore[arg-type]
