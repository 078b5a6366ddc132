"""`plan_compact` against brute force, its laws on random groups, and real models."""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbuf.errors import LayoutError
from dbuf.layout import GlobalLayout
from dbuf.placement import BlockAtomic, RowAtomic
from dbuf.plan import CompactPlan, plan_compact, plan_row_atomic
from dbuf.plan.packing import ORDERS, pack
from plan.test_rows import count_lines

MODELS = json.loads((Path(__file__).parents[1] / "cases" / "models.json").read_text())
Shapes = list[tuple[int, ...]]


def shapes_of(model: str, unit: str) -> Shapes:
    tensors = next(u["tensors"] for u in MODELS[model]["units"] if u["name"] == unit)
    return [tuple(shape) for _, shape in tensors]


def experts_as_matrices(shapes: Shapes) -> Shapes:
    return [s for shape in shapes for s in ([shape[1:]] * shape[0] if len(shape) == 3 else [shape])]


def check(plan: CompactPlan, block_size: int = 1, align: int = 1) -> None:
    """What every plan holds, PADDED's included."""
    layout = plan.layout.validate()
    assert layout.is_even and layout.admits(BlockAtomic(block_size)) and layout.admits(RowAtomic())
    assert max(plan.even, plan.least) <= plan.segment <= plan.padded
    assert plan.segment % align == 0
    assert plan.is_padded == (plan.segment == plan.padded)
    assert layout.dp_size * plan.even >= plan.content == sum(layout.tensor_numels)


# --- laws -------------------------------------------------------------------------------------------------


def random_group(seed: int) -> tuple[Shapes, int, dict[str, int]]:
    """Few or many tensors of few or many row sizes, of one to three dimensions, empty ones and scalars included."""
    r = random.Random(seed)
    block_size = r.choice([1, 1, 2, 4])
    rows = [r.randint(1, 40) for _ in range(r.randint(1, 4))]

    def shape() -> tuple[int, ...]:
        leading = block_size * r.randint(0 if r.random() < 0.1 else 1, r.choice([3, 30]))
        if r.random() < 0.2:
            return (leading,) if block_size > 1 or r.random() < 0.8 else ()
        return (r.randint(1, 5), leading, r.choice(rows)) if r.random() < 0.2 else (leading, r.choice(rows))

    options = {"block_size": block_size, "align": r.choice([1, 1, 4, 6]), "row_dims": 2}
    return [shape() for _ in range(r.choice([1, 3, 8, 30]))], r.choice([1, 2, 3, 4, 7, 16, 64]), options


@pytest.mark.parametrize("part", range(4))
def test_law_never_longer_than_padded_on_2000_random_groups(part: int) -> None:
    shorter = Counter[str]()
    for seed in range(500 * part, 500 * (part + 1)):
        shapes, dp_size, options = random_group(seed)
        plan = plan_compact(shapes, dp_size, **options)
        check(plan, options["block_size"], options["align"])
        assert plan.layout.row_dims == 2 and plan.padded * dp_size == plan_row_atomic(shapes, dp_size, **options).size
        shorter["shorter"] += not plan.is_padded
        shorter["proved"] += plan.is_least
    assert shorter["shorter"] > 150 and shorter["proved"] > 250  # of 500


def shortest(shapes: Shapes, dp_size: int) -> int:
    """The shortest equal segments that any order of the tensors and any gaps between them allow: brute force."""
    tensors = [(math.prod(shape), math.prod(shape[1:])) for shape in shapes]
    for segment in itertools.count(-(-sum(numel for numel, _ in tensors) // dp_size)):
        if any(fits(order, segment, dp_size) for order in set(itertools.permutations(tensors))):
            return segment
    raise AssertionError


def fits(order: tuple[tuple[int, int], ...], segment: int, dp_size: int) -> bool:
    """Each tensor at the first place that is legal. Of its places the first leaves most room to those after it."""
    end = 0
    for numel, unit in order:
        while any((cut - end) % unit for cut in range((end // segment + 1) * segment, end + numel, segment)):
            end += 1
            if end > segment * dp_size:
                return False
        end += numel
    return end <= segment * dp_size


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=4), st.sampled_from([1, 2, 3, 4]))
@settings(max_examples=60, deadline=None)
def test_law_least_is_a_bound_that_brute_force_respects(shapes: Shapes, dp_size: int) -> None:
    plan, best = plan_compact(shapes, dp_size), shortest(shapes, dp_size)
    assert plan.least <= best <= plan.segment
    assert not plan.is_least or best == plan.segment


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=8), st.integers(2, 5))
@settings(max_examples=60, deadline=None)
def test_law_every_order_packs_without_overlap(tensors: Shapes, dp_size: int) -> None:
    kinds = Counter((unit, unit * count) for count, unit in tensors)
    segment = math.lcm(*(unit for unit, _ in kinds)) * (1 + sum(n * c for (_, n), c in kinds.items()) // dp_size)
    for order in ORDERS:
        runs, steps = pack(kinds, dp_size, segment, order)
        assert runs is not None and steps
        spans = sorted((start + i * numel, numel, unit) for unit, numel, start, count in runs for i in range(count))
        assert Counter((unit, numel) for _, numel, unit in spans) == kinds
        assert all(a[0] + a[1] <= b[0] for a, b in itertools.pairwise(spans))
        for start, numel, unit in spans:
            assert all(
                (cut - start) % unit == 0 for cut in range(0, dp_size * segment, segment) if 0 < cut - start < numel
            )


def test_law_equal_tensors_keep_their_order_and_the_plan_is_a_function_of_shapes() -> None:
    shapes = [(4, 6), (3, 5), (4, 6), (7,), (3, 5), (4, 6)]
    layout = plan_compact(shapes, 3).layout
    assert layout == plan_compact([list(shape) for shape in shapes], 3).layout
    for shape in set(shapes):
        offsets = [layout.tensor_to_offset[t] for t, s in enumerate(shapes) if s == shape]
        assert offsets == sorted(offsets)


@given(
    st.lists(st.tuples(st.integers(1, 6), st.sampled_from([8, 16, 24, 40])), min_size=1, max_size=8), st.integers(1, 6)
)
@settings(max_examples=60, deadline=None)
def test_law_with_align_tensors_start_at_multiples_of_it(matrices: Shapes, dp_size: int) -> None:
    """Where all sizes are multiples of it, and rows divide it or are divided by it: vectors of 8 k, too."""
    layout = plan_compact([*matrices, (16,), (40,)], dp_size, align=8).layout
    assert all(offset % 8 == 0 for offset in (*layout.tensor_to_offset, *layout.rank_to_offset))


# --- real models ------------------------------------------------------------------------------------------


@functools.cache
def plans(model: str, dp_size: int) -> list[tuple[int, CompactPlan]]:
    """Every unit, with rows and blocks of dim 0 and of two dimensions, and with experts as matrices."""
    found = []
    for unit in MODELS[model]["units"]:
        shapes = shapes_of(model, unit["name"])
        fused = any(len(shape) == 3 for shape in shapes)
        groups = [(1, shapes), *([(2, shapes), (1, experts_as_matrices(shapes))] if fused else [])]
        for block_size, (row_dims, group) in itertools.product((1, 32, 128), groups):
            try:
                found.append((block_size, plan_compact(group, dp_size, block_size=block_size, row_dims=row_dims)))
            except LayoutError as error:
                assert f"block_size={block_size} does not divide" in str(error) and " of shape (" in str(error)
    return found


@pytest.mark.parametrize("model", MODELS)
def test_every_unit_of_every_model_is_never_longer_than_padded(model: str) -> None:
    for dp_size in (8, 256, 1024):
        for block_size, plan in plans(model, dp_size):
            check(plan, block_size)
            assert plan.is_least or plan.overhead < 0.01


def test_a_whole_model_on_sixteen_thousand_ranks() -> None:
    for unit in MODELS["deepseek-v3"]["units"]:
        plan = plan_compact(shapes_of("deepseek-v3", unit["name"]), 16_384, row_dims=2)
        check(plan)
        assert plan.is_least and plan.layout.segment(16_383) == (16_383 * plan.segment, plan.segment)


def overhead(shapes: Shapes, dp_size: int, **options: int) -> tuple[float, float]:
    plan = plan_compact(shapes, dp_size, **options)
    check(plan, options.get("block_size", 1))
    return plan.overhead, plan.padded * dp_size / plan.content - 1


def test_deepseek_v3_experts_as_matrices_block_32_at_256_ranks() -> None:
    compact, padded = overhead(experts_as_matrices(shapes_of("deepseek-v3", "moe_block")), 256, block_size=32)
    assert compact <= 0.005 and padded == pytest.approx(0.2247, abs=1e-4)


def test_gpt_oss_120b_inner_rows_at_256_ranks() -> None:
    compact, padded = overhead(shapes_of("gpt-oss-120b", "block"), 256, row_dims=2)
    assert compact <= 0.001 and padded == pytest.approx(0.0133, abs=1e-4)


def test_gpt_oss_120b_fused_experts_by_dim_0_and_the_least_common_multiple() -> None:
    """A row of a fused weight is a matrix of 5760 x 2880 or 2880 x 2880: padding is a third of the content."""
    for ranks in (64, 128, 256):
        padded = plan_row_atomic(shapes_of("gpt-oss-120b", "block"), ranks)
        assert padded.size / sum(padded.tensor_numels) - 1 == pytest.approx(0.32, abs=0.01)


def test_gpt_oss_120b_padded_a_parameter_at_a_time_by_dim_0() -> None:
    """As per-parameter sharding pads, dim 0 to a multiple of the ranks: 128 experts take the room of 256."""
    shapes = shapes_of("gpt-oss-120b", "block")
    held = sum(-(-shape[0] // 256) * 256 * math.prod(shape[1:]) for shape in shapes)
    assert held / sum(map(math.prod, shapes)) - 1 == pytest.approx(0.99, abs=0.01)


def test_deepseek_v3_dense_block_at_256_ranks_has_no_shorter_equal_segments() -> None:
    plan = plan_compact(shapes_of("deepseek-v3", "dense_block"), 256)
    assert plan.overhead == pytest.approx(0.359, abs=5e-4)
    assert plan.is_padded and plan.is_least and len(plan.forcing) == 7
    text = str(plan)
    assert "no equal segments are shorter; this is PADDED's plan; an even share is 2279232" in text
    assert "tensor 0 of shape (1536, 7168), 2 of shape (24576, 1536)" in text and text.endswith("and 3 more")


# --- growth -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [ORDERS[0], ORDERS[-1]])
def test_packing_is_near_linear_in_tensors_and_does_not_multiply_them_by_segments(order: Any) -> None:
    def kinds(count: int) -> Counter[tuple[int, int]]:
        return Counter((unit, unit * (k % 97 + 1)) for k in range(count) for unit in [(1, 4, 6, 64, 96)[k % 5]])

    def lines(tensors: int, segments: int) -> int:
        group = kinds(tensors)
        segment = _round_up(sum(numel * n for (_, numel), n in group.items()) // segments + 1, 192)
        return count_lines(lambda: pack(group, segments, segment, order))

    assert lines(3200, 16) < 2 * 8 * lines(400, 16)
    assert lines(3200, 4096) - lines(3200, 16) < 200 * 4096


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


# --- edges and refusals -----------------------------------------------------------------------------------


def test_groups_without_elements() -> None:
    for shapes in ([], [(0, 5), (3, 0)]):
        plan = plan_compact(shapes, 3, align=4)
        assert plan.layout == plan_row_atomic(shapes, 3, align=4) and plan.is_padded and plan.is_least
        assert str(plan) == "3 segments of 0: 0.000% padding"


def test_a_tensor_without_elements_lies_at_the_start() -> None:
    plan = plan_compact([(5, 6), (0, 9), (7, 4), (3, 6)], 2)
    assert plan.layout == GlobalLayout(((5, 6), (0, 9), (7, 4), (3, 6)), (0, 0, 30, 58), 76, (0, 38))


def test_an_atom_is_never_cut_so_no_segment_is_shorter() -> None:
    plan = plan_compact([(1, 100), (1, 100), (3, 2)], 4)
    assert (plan.even, plan.least, plan.segment, plan.is_padded) == (52, 100, 100, True)


def test_a_common_multiple_too_large_for_a_float_is_printed_as_infinite() -> None:
    primes = [p for p in range(1000, 9000) if all(p % q for q in range(2, 95))]
    plan = plan_compact([(3, p) for p in primes], 8)
    assert "(inf% as PADDED)" in str(plan) and plan.overhead < 1e-3


def test_what_is_not_proved_says_how_far_it_is() -> None:
    plan = plan_compact(experts_as_matrices(shapes_of("gpt-oss-120b", "block")), 256)
    assert not plan.is_least and not plan.is_padded
    assert f"none can be shorter than {plan.least}, 0.023% less" in str(plan)


@pytest.mark.parametrize(
    ("arguments", "options", "part"),
    [
        (([(2,)], 0), {}, "dp_size is not a positive int"),
        (([(2,)], 1), {"align": 0}, "align is not a positive int"),
        (([(2,)], 1), {"block_size": True}, "block_size is not a positive int"),
        (([(2,)], 1), {"row_dims": 0}, "row_dims is not a positive int"),
        (([(2, -1)], 1), {}, "tensor 0 has a bad shape"),
        (([(4, 3), (6, 3)], 1), {"block_size": 4}, "tensor 1 of shape (6, 3)"),
    ],
)
def test_refusals(arguments: Any, options: Any, part: str) -> None:
    with pytest.raises(LayoutError, match=r"^plan_compact: ") as caught:
        plan_compact(*arguments, **options)
    assert part in str(caught.value)
