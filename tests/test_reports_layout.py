"""Reports of layouts: numbers by hand, and laws against a slow count on layouts of every planner."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dbuf
from dbuf import GlobalLayout, ShardLayout, plan_compact, plan_row_atomic, plan_tensor_atomic
from dbuf.errors import LayoutError
from dbuf.reports import report, report_segment

BY_HAND = GlobalLayout(((4, 4), (3,), (0, 5), ()), (8, 24, 0, 28), 40, (0, 16, 32)).validate()


def test_numbers_by_hand() -> None:
    """| . 8 | 8 of tensor 0 || 8 of tensor 0 | tensor 1 | . | scalar . || . 8 |."""
    found = report(BY_HAND, itemsize=2)
    assert found.as_dict() == {
        "segments": 3, "tensors": 4, "content": 20, "size": 40, "longest": 16, "shortest": 8, "empty": 1, "cut": 1,
        "largest_gap": 11, "alignment": 4, "itemsize": 2, "padding": 20, "overhead": 1.0, "imbalance": 1.2,
        "excess": 1.4, "nbytes": 32,
    }  # fmt: skip
    assert [report_segment(BY_HAND, k).content for k in range(3)] == [8, 12, 0]
    assert report_segment(BY_HAND, 1).pieces == ((0, 8, 8, 0), (1, 0, 3, 8), (3, 0, 1, 12))
    assert "100.000% padding" in str(found) and "1 empty" in str(found)


def test_of_a_buffer_its_dtype_counts() -> None:
    buf = dbuf.shard({"w": torch.ones(3, 2, dtype=torch.float64)}, dbuf.init_mesh(), dbuf.Replicate())
    assert dbuf.report(buf).nbytes == 48 and dbuf.report(buf, itemsize=2).nbytes == 12


@pytest.mark.parametrize("shapes", [[], [(0, 3)], [()]])
@pytest.mark.parametrize("n", [1, 3])
def test_nothing_and_next_to_nothing(shapes: list[tuple[int, ...]], n: int) -> None:
    for kind in ShardLayout:
        found = report(plan_row_atomic(shapes, n, shard_layout=kind))
        content = sum(map(math.prod, shapes))
        assert (found.content, found.empty) == (content, n - content)
        assert found.overhead == (found.size - content) / (content or 1)


def test_what_is_no_layout_is_refused() -> None:
    plan = plan_compact([(4, 4)], 2)
    with pytest.raises(LayoutError, match=r"(?s)CompactPlan.*dbuf.report\(plan.layout\)"):
        report(plan)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="there is no segment 2"):
        report_segment(plan.layout, 2)


SHAPES = st.lists(st.lists(st.integers(0, 12), max_size=3).map(tuple), max_size=8)


@given(SHAPES, st.integers(1, 9), st.data())
def test_it_counts_what_a_slow_count_counts(shapes: list[tuple[int, ...]], n: int, data: st.DataObject) -> None:
    owners = [data.draw(st.integers(0, n - 1)) for _ in shapes]
    for layout in (
        plan_row_atomic(shapes, n),
        plan_row_atomic(shapes, n, shard_layout=ShardLayout.UNPADDED, row_dims=2),
        plan_compact(shapes, n).layout,
        plan_tensor_atomic(shapes, n, tensor_owners=owners),
    ):
        holder = [-1] * layout.size
        for tensor, (offset, numel) in enumerate(zip(layout.tensor_to_offset, layout.tensor_numels, strict=True)):
            holder[offset : offset + numel] = [tensor] * numel
        spans = [layout.segment(k) for k in range(n)]
        parts = [holder[start : start + numel] for start, numel in spans]
        runs = "".join("." if tensor < 0 else "x" for tensor in holder).split("x")
        marks = [layout.tensor_to_offset[t] for t, numel in enumerate(layout.tensor_numels) if numel]
        divisor = math.gcd(0, *marks, *layout.rank_to_offset)
        found = report(layout)
        assert found.content == sum(tensor >= 0 for tensor in holder)
        assert (found.longest, found.shortest) == (max(map(len, parts)), min(map(len, parts)))
        assert found.empty == sum(all(tensor < 0 for tensor in part) for part in parts)
        assert found.cut == sum(sum(t in part for part in parts) > 1 for t in range(len(shapes)))
        assert found.largest_gap == max(map(len, runs))
        assert found.alignment == divisor & -divisor
        assert [report_segment(layout, k).content for k in range(n)] == [sum(t >= 0 for t in part) for part in parts]


def test_a_hundred_thousand_tensors_on_sixteen_thousand_ranks() -> None:
    shapes = [(i % 97 + 1, 64) for i in range(100_000)]
    layout = plan_row_atomic(shapes, 16_384, shard_layout=ShardLayout.UNPADDED)
    found = report(layout)
    assert found.overhead == 0 and found.empty == 0 and found.alignment == 64
    assert found.longest <= found.content / 16_384 + 64
    assert sum(report_segment(layout, k).content for k in range(0, 16_384, 1024)) > 0
