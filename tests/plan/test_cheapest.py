"""`plan_layout` chooses by cost; and the bounds of what each way of cutting can cost, as laws."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dbuf
from dbuf.errors import LayoutError
from dbuf.layout import GlobalLayout
from dbuf.placement import BlockAtomic, RowAtomic, ShardLayout, TensorAtomic
from dbuf.plan import CostModel, plan_compact, plan_layout, plan_row_atomic
from plan.test_compact import Shapes, shapes_of

GROUPS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=10)


def longest(layout: GlobalLayout) -> int:
    return max(b - a for a, b in pairwise((*layout.rank_to_offset, layout.size)))


# --- bounds -----------------------------------------------------------------------------------------------


@given(GROUPS, st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_law_padding_is_at_most_a_common_multiple_a_segment_and_the_gaps(shapes: Shapes, dp_size: int) -> None:
    """Gaps are at most one a tensor, each shorter than the common multiple."""
    layout = plan_row_atomic(shapes, dp_size)
    multiple = math.lcm(*(columns for _, columns in shapes))
    content = sum(layout.tensor_numels)
    ends = sorted((o, o + n) for o, n in zip(layout.tensor_to_offset, layout.tensor_numels, strict=True))
    gaps = ends[0][0] + sum(b[0] - a[1] for a, b in pairwise(ends))
    assert gaps < multiple * len(shapes)
    assert layout.size - content <= dp_size * multiple + gaps


@given(GROUPS, st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_law_no_uneven_segment_is_longer_than_an_even_share_and_the_largest_atom(shapes: Shapes, dp_size: int) -> None:
    layout = plan_row_atomic(shapes, dp_size, shard_layout=ShardLayout.UNPADDED)
    assert longest(layout) <= layout.size / dp_size + max(columns for _, columns in shapes)


def test_deepseek_v3_dense_block_at_256_ranks() -> None:
    shapes = shapes_of("deepseek-v3", "dense_block")
    padded = plan_row_atomic(shapes, 256)
    uneven = plan_row_atomic(shapes, 256, shard_layout=ShardLayout.UNPADDED)
    assert padded.size / uneven.size - 1 == pytest.approx(0.359, abs=5e-4)
    assert longest(uneven) / (uneven.size / 256) < 1.01


# --- the choice -------------------------------------------------------------------------------------------


@given(GROUPS, st.integers(1, 9), st.sampled_from([1, 4]))
@settings(max_examples=60, deadline=None)
def test_law_the_best_costs_least_and_each_option_is_its_planners(shapes: Shapes, dp_size: int, align: int) -> None:
    choice = plan_layout(shapes, dp_size, align=align)
    assert choice.best.cost == min(option.cost for option in choice.options)
    padded, compact, unpadded, owned = choice.options
    assert [option.name for option in choice.options] == ["padded", "compact", "unpadded", "tensor_atomic"]
    assert padded.layout == plan_row_atomic(shapes, dp_size, align=align)
    assert compact.layout == plan_compact(shapes, dp_size, align=align).layout == choice.compact.layout
    assert unpadded.layout == plan_row_atomic(shapes, dp_size, align=align, shard_layout=ShardLayout.UNPADDED)
    assert owned.layout.admits(TensorAtomic()) and owned.placement == TensorAtomic()
    assert padded.copy_out_nbytes == compact.copy_out_nbytes == 0
    assert compact.cost <= padded.cost
    for option in choice.options:
        assert option.layout.admits(option.placement)
        assert option.max_segment == longest(option.layout)
        assert option.overhead >= -1e-9
        assert option.resident_nbytes == 16 * option.max_segment
        wire = option.max_segment if option.layout.is_even else -(-option.max_segment // align) * align
        assert option.wire_nbytes == (dp_size - 1) * 2 * wire


def test_the_weights_decide() -> None:
    """A dense block of DeepSeek-V3 on 256 ranks: a third of padding, or a copy of everything after each gather."""
    shapes = shapes_of("deepseek-v3", "dense_block")

    def best(**weights: Any) -> str:
        return plan_layout(shapes, 256, cost=CostModel(**weights)).best.name

    assert best() == "unpadded"
    assert best(copy_out=1.0) == "padded"  # the first of equals: no equal segments are shorter
    assert best(resident=0.0, wire=0.0, copy_out=1.0) == "padded"
    assert plan_layout(shapes_of("gpt-oss-120b", "block"), 256, row_dims=2).best.name == "compact"
    assert plan_layout([(4, 4), (2, 8)], 2, block_size=2).best.name == "padded"


def test_owners_win_where_blocks_are_large() -> None:
    """Two matrices of one block each and no copy to pay for: whole tensors are equal segments."""
    choice = plan_layout([(4, 7), (4, 7)], 2, block_size=4)
    owned = choice.options[3]
    assert owned.layout.is_even and owned.cost == choice.best.cost


def test_trees_of_shapes_and_of_tensors_give_one_plan() -> None:
    shapes = [(5, 6), (7, 4), (), (3, 6)]
    tensors = [torch.empty(shape, device="meta") for shape in shapes]
    plans = [
        plan_layout(tree, 2)
        for tree in (
            shapes,
            [list(shape) or () for shape in shapes],
            {"a": shapes[0], "b": (shapes[1], [shapes[2], None]), "c": torch.Size(shapes[3])},
            {"a": tensors[0], "b": (tensors[1], [tensors[2], None]), "c": tensors[3]},
        )
    ]
    assert len({plan.layout for plan in plans}) == 1
    assert plans[0].layout.tensor_shapes == tuple(shapes)
    assert plan_layout([], 2).layout.size == plan_layout({}, 2).layout.size == 0
    assert plan_layout((3, 4), 2).layout.tensor_shapes == ((3, 4),)


def test_blocks_and_row_dims_reach_the_planners() -> None:
    choice = plan_layout([(3, 8, 5), (4, 6)], 2, block_size=4, row_dims=2)
    assert choice.options[0].placement == BlockAtomic(4) and plan_layout([(3, 8)], 2).placement == RowAtomic()
    assert [option.layout.row_dims for option in choice.options] == [2, 2, 2, 1]


def test_a_plan_in_place_of_its_layout_is_refused() -> None:
    tensors, mesh = {"w": torch.ones(5, 6)}, dbuf.init_mesh()
    for plan in (plan_compact([(5, 6)], 1), plan_layout(tensors, 1)):
        with pytest.raises(LayoutError, match=rf"dbuf.shard: .*\n.*{type(plan).__name__}[\s\S]*layout=plan.layout"):
            dbuf.shard(tensors, mesh, RowAtomic(), layout=plan)
        assert dbuf.shard(tensors, mesh, RowAtomic(), layout=plan.layout).layout == plan.layout


def test_the_report_marks_the_best_and_lines_up() -> None:
    choice = plan_layout(shapes_of("deepseek-v3", "dense_block"), 256)
    head, *lines, certificate = str(choice).splitlines()
    assert [line[0] for line in lines] == [" ", " ", "*", " "]
    assert len({len(line) for line in lines}) == 1 and len(head) == len(lines[0])
    assert "35.86%" in lines[0] and "0.64%" in lines[2] and certificate.startswith("  compact: 256 segments of")


@pytest.mark.parametrize(
    ("tree", "options", "parts"),
    [
        ({"w": (2,)}, {"dp_size": 0}, ["dp_size is not a positive int"]),
        ({"w": "wide"}, {"dp_size": 1}, ["not every leaf has a shape", "['w']: str"]),
        ({"w": (2, -1)}, {"dp_size": 1}, ["bad shape", "(2, -1)"]),
        (
            {"a": (8, 2), "b": [(6, 2)]},
            {"dp_size": 1, "block_size": 4},
            ["tensor ['b'][0] of shape (6, 2)", "shape[0]"],
        ),
        ({"w": (8, 6, 2)}, {"dp_size": 1, "block_size": 4, "row_dims": 2}, ["tensor ['w'] of shape", "shape[1]"]),
        ([(8, 2), (6, 2)], {"dp_size": 1, "block_size": 4}, ["tensor [1] of shape (6, 2)"]),
    ],
)
def test_refusals(tree: Any, options: dict[str, int], parts: list[str]) -> None:
    with pytest.raises(LayoutError, match=r"^plan_layout: ") as caught:
        plan_layout(tree, options.pop("dp_size"), **options)
    for part in parts:
        assert part in str(caught.value)
