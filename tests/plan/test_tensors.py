"""`plan_tensor_atomic` against recorded answers and its laws on random shapes."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbuf.errors import LayoutError
from dbuf.layout import GlobalLayout
from dbuf.placement import BlockAtomic, RowAtomic, ShardLayout, TensorAtomic
from dbuf.plan import plan_tensor_atomic

CASES = json.loads((Path(__file__).parents[1] / "cases" / "layouts.json").read_text())["tensor_atomic"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_recorded_layouts(case: dict[str, Any]) -> None:
    layout = plan_tensor_atomic(case["shapes"], case["dp_size"], tensor_owners=case["owners"])
    assert list(layout.tensor_to_offset) == case["offsets"]
    assert layout.size == case["size"]
    assert list(layout.rank_to_offset) == case["rank_to_offset"]
    assert layout.validate().admits(TensorAtomic())


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], int, list[int]]:
    shapes = draw(st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), max_size=10))
    dp_size = draw(st.integers(1, 6))
    owner = st.integers(0, dp_size - 1)
    return shapes, dp_size, draw(st.lists(owner, min_size=len(shapes), max_size=len(shapes)))


@given(problems(), st.sampled_from(ShardLayout), st.integers(1, 8))
@settings(max_examples=150, deadline=None)
def test_law_each_segment_is_its_owners_tensors_in_order_without_gaps(
    problem: tuple[list[tuple[int, ...]], int, list[int]], shard_layout: ShardLayout, align: int
) -> None:
    shapes, dp_size, owners = problem
    layout = plan_tensor_atomic(
        shapes, dp_size, tensor_owners=owners, shard_layout=shard_layout, align=align
    ).validate()
    for placement in (TensorAtomic(), RowAtomic(), BlockAtomic(5)):
        assert layout.admits(placement)
    for k in range(dp_size):
        expected, end = [], 0
        for tensor, (shape, owner) in enumerate(zip(shapes, owners, strict=True)):
            if owner == k and math.prod(shape):
                expected.append((tensor, 0, math.prod(shape), end))
                end += math.prod(shape)
        start, numel = layout.segment(k)
        assert layout.pieces(start, numel) == tuple(expected)
        assert numel == end or shard_layout is ShardLayout.PADDED


@given(problems(), st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_law_padded_segments_are_the_longest_rounded_up(
    problem: tuple[list[tuple[int, ...]], int, list[int]], align: int
) -> None:
    shapes, dp_size, owners = problem
    padded = plan_tensor_atomic(shapes, dp_size, tensor_owners=owners, shard_layout=ShardLayout.PADDED, align=align)
    plain = plan_tensor_atomic(shapes, dp_size, tensor_owners=owners, align=align)
    longest = max(plain.segment(k)[1] for k in range(dp_size))
    assert padded.is_even
    assert padded.segment(0)[1] == math.ceil(longest / align) * align
    assert padded.align == plain.align == align


def test_padded_offsets_as_numbers() -> None:
    layout = plan_tensor_atomic(
        [(7, 3), (2, 5), (7,)], 3, tensor_owners=[1, 1, 0], shard_layout=ShardLayout.PADDED, align=4
    )
    assert layout == GlobalLayout(((7, 3), (2, 5), (7,)), (32, 53, 0), 96, (0, 32, 64), 4)


def test_empty_tensors_and_scalars() -> None:
    layout = plan_tensor_atomic([(), (0, 3), (4,), ()], 2, tensor_owners=[1, 0, 0, 1])
    assert layout == GlobalLayout(((), (0, 3), (4,), ()), (4, 0, 0, 5), 6, (0, 4))


def test_twenty_thousand_tensors_on_sixteen_thousand_owners() -> None:
    owners = [k * 7 % 16_384 for k in range(20_000)]
    layout = plan_tensor_atomic([(k % 5, 3) for k in range(20_000)], 16_384, tensor_owners=owners)
    assert layout.validate().admits(TensorAtomic())


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (lambda: plan_tensor_atomic([(2,)], 0, tensor_owners=[0]), ["dp_size is not a positive int"]),
        (
            lambda: plan_tensor_atomic([(2,)], 1, tensor_owners=[0], align=True),
            ["align is not a positive int"],
        ),
        (lambda: plan_tensor_atomic([(-2,)], 1, tensor_owners=[0]), ["tensor 0 has a bad shape"]),
        (
            lambda: plan_tensor_atomic([(2,), (3,)], 2, tensor_owners=[0]),
            ["owners and shapes do not pair up", "1 owners for 2 tensors", "one owner a tensor"],
        ),
        (
            lambda: plan_tensor_atomic([(2,)] * 4, 2, tensor_owners=[0, 2, -1, True]),
            [
                "3 of 4 owners are not segments",
                "tensor 1: owner 2\n        tensor 2: owner -1\n        tensor 3: owner True",
                "ints from 0 to 1",
            ],
        ),
    ],
)
def test_refusals(call: Callable[[], GlobalLayout], parts: list[str]) -> None:
    with pytest.raises(LayoutError, match=r"^plan_tensor_atomic: ") as caught:
        call()
    for part in parts:
        assert part in str(caught.value)
