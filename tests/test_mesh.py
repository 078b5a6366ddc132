"""`dbuf.mesh`: worlds of one, shapes that do not fit, groups of several axes, and names that outlive their groups."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import dbuf
from dbuf import PlacementError, Replicate, RowAtomic
from dbuf import mesh as meshes
from dbuf.testing import run

ROOT = Path(__file__).resolve().parents[1]

ALONE = """
import os, torch, dbuf
assert "RANK" not in os.environ
mesh = dbuf.init_mesh()
assert (tuple(mesh.shape), mesh.mesh_dim_names) == ((1,), ("dp",))
buf = dbuf.shard({"w": torch.arange(6.0).view(3, 2)}, mesh, dbuf.RowAtomic())
assert torch.equal(dbuf.unpack(dbuf.allgather(buf))["w"], torch.arange(6.0).view(3, 2))
two = dbuf.init_mesh(("outer", "inner"))
both = dbuf.shard([torch.ones(3)], two, (dbuf.RowAtomic(), dbuf.RowAtomic()))
moved = dbuf.redistribute(both, (dbuf.RowAtomic(),) * 2, layout=dbuf.plan_row_atomic([(3,)], 1, align=4))
assert moved.local.tolist() == [1, 1, 1, 0]
assert dbuf.global_norm(both) ** 2 == 3 and dbuf.pmean(torch.tensor(2.0), two) == 2
dbuf.check({"a": buf, "b": both})
"""


def test_alone_in_a_plain_process() -> None:
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, env=env, timeout=120)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def shapes_that_fit() -> Any:
    return [
        tuple(dbuf.init_mesh(names, shape).shape)
        for names, shape in [
            (("dp",), None),
            ("dp", None),
            (("a", "b"), None),
            (("a", "b"), (-1, 2)),
            (("a", "b"), (2, -1)),
            (("a", "b"), [1, 4]),
            (("a", "b", "c"), (2, 1, -1)),
        ]
    ]


def test_the_first_axis_takes_all_by_default_and_one_entry_may_be_minus_one() -> None:
    expected = [(4,), (4,), (4, 1), (2, 2), (2, 2), (1, 4), (2, 1, 2)]
    assert run(shapes_that_fit, world_size=4) == [expected] * 4


def shapes_that_do_not_fit() -> list[str]:
    messages = []
    for names, shape in [
        (("a", "b"), (2, 2)),
        (("a", "b"), (-1, -1)),
        (("a",), (1, 3)),
        (("a", "b"), (-1, 2)),
        (("a",), (0,)),
        (("a", "b"), (-3, -1)),
        ((), None),
    ]:
        with pytest.raises(PlacementError) as caught:
            dbuf.init_mesh(names, shape)
        messages.append(str(caught.value))
    return messages


def test_shapes_that_do_not_cover_the_processes_are_refused_before_any_group_is_made() -> None:
    for messages in run(shapes_that_do_not_fit, world_size=3):
        for message in messages:
            assert message.startswith("dbuf.init_mesh: the mesh does not cover the processes.")
            assert "3 processes" in message and "try:  dbuf.init_mesh(" in message


def bad_meshes() -> tuple[str, str, str, str]:
    unnamed = init_device_mesh("cpu", (2,))
    with pytest.raises(PlacementError) as no_names:
        meshes.prepare(unnamed)
    mesh = dbuf.init_mesh(("dp",))
    with pytest.raises(PlacementError) as no_axis:
        dbuf.psum(torch.ones(()), mesh, "tp")
    with pytest.raises(PlacementError) as no_index:
        dbuf.pmean(torch.ones(()), mesh, (0, 3))
    elsewhere = "only rank 1 is left out"
    one = DeviceMesh("cpu", [0], mesh_dim_names=("dp",))
    if dist.get_rank() == 1:
        with pytest.raises(PlacementError) as outside:
            dbuf.shard([torch.ones(2)], one, RowAtomic())
        elsewhere = str(outside.value)
    return str(no_names.value), str(no_axis.value), str(no_index.value), elsewhere


def test_meshes_without_names_axes_or_this_rank_are_refused() -> None:
    results = run(bad_meshes, world_size=2)
    for no_names, no_axis, no_index, _ in results:
        assert "no axis names" in no_names and "mesh_dim_names" in no_names
        assert "no such mesh axis" in no_axis and "'tp'" in no_axis and "('dp',)" in no_axis
        assert "[3]" in no_index
    assert "not part of the buffer's mesh" in results[1][3] and "rank 1" in results[1][3]


def groups() -> Any:
    mesh = dbuf.init_mesh(("a", "b", "c"), (2, 1, 2))
    me = torch.tensor([dist.get_rank()])
    out = []
    for name in (meshes.suffix_group(mesh, 3), meshes.suffix_group(mesh, 2), meshes.axis_group(mesh, 0)):
        group = next(
            g for g in [mesh.get_group("a_b_c"), mesh.get_group("b_c"), mesh.get_group("a")] if g.group_name == name
        )
        everyone = [torch.empty_like(me) for _ in range(group.size())]
        dist.all_gather(everyone, me, group=group)
        out.append([int(x) for x in everyone])
    return (
        out,
        meshes.gather_objects(dist.get_rank(), mesh),
        [meshes.same_everywhere(text, mesh) for text in ("", "a" * 100, f"{dist.get_rank() == 2}")],
        meshes.sum_over(mesh, (1,)),
        len(meshes.sum_over(mesh, (0, 1, 2))),
    )


def test_groups_over_several_axes_are_in_row_major_order() -> None:
    whole = [0, 1, 2, 3]
    for rank, (lists, gathered, same, over_b, steps) in enumerate(run(groups, world_size=4)):
        pair, column = whole[rank // 2 * 2 :][:2], [rank % 2, rank % 2 + 2]
        assert lists == [whole, pair, column] and gathered == whole and same == [True, True, False]
        assert over_b == () and steps == 4, "an axis of size 1 communicates nothing"


def gather_on(order: tuple[tuple[int, int], ...]) -> Any:
    """Make the meshes in this order and gather on the last."""
    for shape in order:
        mesh = dbuf.init_mesh(("outer", "inner"), shape)
    buf = dbuf.shard([torch.arange(8.0)], mesh, (RowAtomic(), RowAtomic()))
    return dbuf.allgather(buf).local.tolist()


def test_a_mesh_of_a_new_world_does_not_use_the_groups_of_the_old_one() -> None:
    """Routes were cached with group names in them. An equal mesh of a later world has others."""
    everything = [float(v) for v in range(8)]
    assert run(gather_on, ((2, 2),), world_size=4) == [everything] * 4
    assert run(dist.get_world_size, world_size=3) == [3] * 3  # another world between
    assert run(gather_on, ((1, 4), (4, 1), (2, 2)), world_size=4) == [everything] * 4


def test_psum_and_pmean_over_named_axes() -> None:
    def sums() -> Any:
        mesh = dbuf.init_mesh(("outer", "inner"), (2, 2))
        x = torch.full((2, 2), float(dist.get_rank()))
        leaf = torch.tensor(1.0, requires_grad=True)
        (grad,) = torch.autograd.grad(dbuf.psum(leaf * (dist.get_rank() + 1), mesh, "outer"), leaf)
        return [
            dbuf.psum(x, mesh)[1, 1].item(),
            dbuf.psum(x, mesh, "outer")[0, 0].item(),
            dbuf.psum(x, mesh, ("inner",))[0, 0].item(),
            dbuf.pmean(x, mesh, (0, 1))[0, 0].item(),
            dbuf.pmean(x, mesh, 1)[0, 0].item(),
            grad.item(),
        ]

    assert run(sums, world_size=4) == [
        [6, 2, 1, 1.5, 0.5, 2],
        [6, 4, 1, 1.5, 0.5, 4],
        [6, 2, 5, 1.5, 2.5, 6],
        [6, 4, 5, 1.5, 2.5, 8],
    ]


def test_replicas_share_one_range() -> None:
    def ranges() -> Any:
        mesh = dbuf.init_mesh(("outer", "inner"), (2, 2))
        return dbuf.shard([torch.ones(4)], mesh, (Replicate(), RowAtomic())).spec.local_range

    assert run(ranges, world_size=4) == [(0, 2), (2, 2)] * 2
