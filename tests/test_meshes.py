"""Who holds what on meshes of one, two and three axes: offsets and contents as numbers, never by round trip.

The innermost sharded axis is the most significant digit of the segment index: on (outer M, inner N) both sharded,
`segment = inner * M + outer`; on (2, 2, 2), `(a, b, c) -> 4c + 2b + a`. A round trip cannot tell this from its reverse.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import dbuf
from dbuf import LayoutError, Partial, Replicate, RowAtomic, ShardLayout, TensorAtomic
from dbuf import mesh as meshes
from dbuf.testing import run

R, S = Replicate(), RowAtomic()
NAMES = ("a", "b", "c")


def local_on_each_rank(mesh_shape: tuple[int, ...], rows: int, placements: Any, dp_size: int | None) -> Any:
    mesh = dbuf.init_mesh(NAMES[: len(mesh_shape)], mesh_shape)
    buf = dbuf.shard({"w": torch.arange(float(rows))}, mesh, placements, dp_size=dp_size)
    assert tuple(mesh.get_coordinate()) == list(itertools.product(*map(range, mesh_shape)))[dist.get_rank()]
    return buf.spec.local_range[0], buf.local.tolist()


def starts(mesh_shape: tuple[int, ...], rows: int, placements: Any, dp_size: int | None = None) -> list[int]:
    """The first element of every rank, in row-major order; contents checked to be what follows it."""
    out = []
    for start, local in run(
        local_on_each_rank, mesh_shape, rows, placements, dp_size, world_size=math.prod(mesh_shape)
    ):
        assert local == [float(v) for v in range(start, start + len(local))]
        out.append(int(start))
        size = len(local)
    assert all(a % size == 0 for a in out)
    return out


@pytest.mark.parametrize(
    ("mesh_shape", "placements", "expected"),
    [
        ((4,), (S,), [0, 2, 4, 6]),
        ((4,), (R,), [0, 0, 0, 0]),
        ((2, 2), (S, S), [0, 4, 2, 6]),
        ((2, 2), (R, S), [0, 4, 0, 4]),
        ((2, 2), (R, R), [0, 0, 0, 0]),
        ((1, 4), (S, S), [0, 2, 4, 6]),
        ((4, 1), (S, S), [0, 2, 4, 6]),
        ((4, 1), (R, S), [0, 0, 0, 0]),
        ((1, 2), (S, S), [0, 4]),
        ((2, 1), (S, S), [0, 4]),
        ((1, 2), (R, S), [0, 4]),
        ((2, 1), (R, S), [0, 0]),
        ((3,), (S,), [0, 3, 6]),
        ((2, 2, 1), (S, S, S), [0, 4, 2, 6]),
        ((2, 2, 1), (R, S, S), [0, 4, 0, 4]),
        ((1, 2, 2), (S, S, S), [0, 4, 2, 6]),
        ((1, 2, 2), (R, R, S), [0, 4, 0, 4]),
        ((2, 1, 2), (S, S, S), [0, 4, 2, 6]),
        ((2, 1, 2), (R, S, S), [0, 4, 0, 4]),
    ],
    ids=str,
)
def test_start_of_every_rank(mesh_shape: tuple[int, ...], placements: Any, expected: list[int]) -> None:
    assert starts(mesh_shape, 9 if mesh_shape == (3,) else 8, placements) == expected


def test_offsets_on_two_by_two_by_two() -> None:
    """Eight ranks as integers: (a, b, c) holds segment 4c + 2b + a, and fewer sharded axes hold runs of segments."""
    layout = dbuf.plan_row_atomic([(16,)], 8)
    order = list(itertools.product((0, 1), repeat=3))
    get = {
        p: [layout.local_range(p, (2, 2, 2), c) for c in order] for p in [(S, S, S), (R, S, S), (R, R, S), (R, R, R)]
    }
    assert get[S, S, S] == [(0, 2), (8, 2), (4, 2), (12, 2), (2, 2), (10, 2), (6, 2), (14, 2)]
    assert get[R, S, S] == [(0, 4), (8, 4), (4, 4), (12, 4)] * 2
    assert get[R, R, S] == [(0, 8), (8, 8)] * 4
    assert get[R, R, R] == [(0, 16)] * 8


def test_offsets_on_two_by_three_with_uneven_segments() -> None:
    """`segment = inner * M + outer` on (2, 3): the six segments of 7 rows, by hand."""
    layout = dbuf.plan_row_atomic([(7, 10)], 6, shard_layout=ShardLayout.UNPADDED)
    assert layout.rank_to_offset == (0, 10, 20, 30, 50, 60)  # the tie at 3.5 rows goes down
    ranges = [layout.local_range((S, S), (2, 3), c) for c in itertools.product(range(2), range(3))]
    assert ranges == [(0, 10), (20, 10), (50, 10), (10, 10), (30, 20), (60, 10)]
    ranges = [layout.local_range((R, S), (2, 3), c) for c in itertools.product(range(2), range(3))]
    assert ranges == [(0, 20), (20, 30), (50, 20)] * 2


# --- what moves where -------------------------------------------------------------------------------------


def gather_one_axis_at_a_time() -> Any:
    mesh = dbuf.init_mesh(("outer", "inner"), (2, 2))
    buf = dbuf.shard({"w": torch.arange(8.0)}, mesh, (S, S))
    half = dbuf.allgather(buf, (R, S))
    steps = buf.spec.route(buf.spec.with_placements((R, R), "test"), "allgather", "test")
    groups = [step[-1] for step in steps if step[0] == "all_gather"]
    assert groups == [meshes.axis_group(mesh, 0), meshes.axis_group(mesh, 1)], "not outer first"
    return buf.local.tolist(), half.local.tolist(), dbuf.allgather(half).local.tolist()


def test_gathers_go_outer_first_and_every_stage_is_a_contiguous_superset() -> None:
    everything = [float(v) for v in range(8)]
    assert run(gather_one_axis_at_a_time, world_size=4) == [
        ([0, 1], [0, 1, 2, 3], everything),
        ([4, 5], [4, 5, 6, 7], everything),
        ([2, 3], [0, 1, 2, 3], everything),
        ([6, 7], [4, 5, 6, 7], everything),
    ]


def scatter_on_two_axes() -> Any:
    mesh = dbuf.init_mesh(("outer", "inner"), (2, 2))
    mine = dbuf.shard({"w": torch.arange(8.0) + 100 * 10 ** dist.get_rank()}, mesh, (Partial("sum"), Partial("sum")))
    return dbuf.reduce_scatter(mine, (S, S)).local.tolist()


def test_reduce_scatter_lands_where_shard_would() -> None:
    assert run(scatter_on_two_axes, world_size=4) == [
        [111100.0 + 4 * v for v in pair] for pair in [(0, 1), (4, 5), (2, 3), (6, 7)]
    ]


def move_to_owners() -> Any:
    mesh = dbuf.init_mesh(("outer", "inner"), (2, 2))
    tensors = [torch.arange(4.0), 10 + torch.arange(4.0)]
    buf = dbuf.shard(tensors, mesh, (S, S), dp_size=4)
    layout = dbuf.plan_tensor_atomic([(4,), (4,)], 4, tensor_owners=[1, 2])
    return dbuf.redistribute(buf, (TensorAtomic(),) * 2, layout=layout).local.tolist()


def test_owner_is_a_segment_and_the_mesh_says_which_rank_that_is() -> None:
    """Segment 1 is (outer 1, inner 0), rank 2; segment 2 is (outer 0, inner 1), rank 1."""
    assert run(move_to_owners, world_size=4) == [[], [10, 11, 12, 13], [0, 1, 2, 3], []]


# --- fewer segments than ranks ----------------------------------------------------------------------------


def hsdp() -> Any:
    mesh = dbuf.init_mesh(("replica", "shard"), (2, 2))
    tensors = {"w": torch.arange(5.0)}
    narrow = dbuf.shard(tensors, mesh, (R, S), dp_size=2)
    wide = dbuf.shard(tensors, mesh, (R, S))
    messages = []
    for fn in (
        lambda: dbuf.shard(tensors, mesh, (S, S), dp_size=2),
        lambda: dbuf.view(narrow, (S, S)),
        lambda: dbuf.redistribute(narrow, (S, S)),
    ):
        with pytest.raises(LayoutError) as caught:
            fn()
        messages.append(str(caught.value))
    finer = dbuf.redistribute(narrow, (S, S), layout=dbuf.plan_row_atomic([(5,)], 4))
    return (
        (narrow.layout.size, narrow.local.tolist()),
        (wide.layout.size, wide.local.tolist()),
        messages,
        finer.local.tolist(),
    )


def test_a_group_planned_for_the_inner_axis_pays_padding_for_it_alone() -> None:
    results = run(hsdp, world_size=4)
    assert [narrow for narrow, *_ in results] == [(6, [0, 1, 2]), (6, [3, 4, 0])] * 2
    assert [wide for _, wide, *_ in results] == [(8, [0, 1, 2, 3]), (8, [4, 0, 0, 0])] * 2
    assert [finer for *_, finer in results] == [[0, 1], [4, 0], [2, 3], [0, 0]]


def test_sharding_finer_than_planned_is_refused_and_says_what_to_do() -> None:
    for _, _, messages, _ in run(hsdp, world_size=4):
        for message in messages:
            assert "cannot shard 4 ways a layout that was planned for 2" in message
            assert "dp_size=4" in message


# --- meshes from elsewhere --------------------------------------------------------------------------------


def torch_mesh() -> Any:
    mesh = meshes.prepare(init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner")))
    meshes.prepare(mesh)  # a second time does nothing
    uneven = dbuf.plan_row_atomic([(7,)], 4, shard_layout=ShardLayout.UNPADDED)
    buf = dbuf.shard([torch.arange(7.0)], mesh, (S, S))
    moved = dbuf.redistribute(buf, (S, S), layout=uneven)
    inner = dbuf.shard([torch.arange(4.0) + 10 * dist.get_rank()], mesh["inner"], S)
    whole = dbuf.allgather(inner)
    total = dbuf.psum(torch.tensor(float(dist.get_rank())), mesh["inner"])
    dbuf.check({"both": buf, "inner": moved})
    return moved.local.tolist(), inner.local.tolist(), whole.local.tolist(), total.item()


def test_a_device_mesh_made_by_torch_and_its_sub_meshes() -> None:
    assert run(torch_mesh, world_size=4) == [
        ([0, 1], [0, 1], [0, 1, 12, 13], 1.0),
        ([3, 4], [12, 13], [0, 1, 12, 13], 1.0),
        ([2], [20, 21], [20, 21, 32, 33], 5.0),
        ([5, 6], [32, 33], [20, 21, 32, 33], 5.0),
    ]


def sub_mesh_of_two_axes() -> Any:
    mesh = dbuf.init_mesh(("a", "b", "c"), (1, 2, 2))["b", "c"]
    buf = dbuf.shard([torch.arange(8.0)], mesh, (S, S))
    moved = dbuf.redistribute(buf, (S, S), layout=dbuf.plan_row_atomic([(8,)], 4, align=4))
    return moved.local.tolist()


def test_a_sub_mesh_of_two_axes_changes_layouts_over_both() -> None:
    assert run(sub_mesh_of_two_axes, world_size=4) == [[0, 1, 2, 3], [0] * 4, [4, 5, 6, 7], [0] * 4]
