"""Ranks that disagree about a buffer: `check` and the first call of a step say where, on every rank, and none hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import cheap_kernels  # noqa: F401
import dbuf
from dbuf import BlockAtomic, Replicate, RowAtomic, ShardLayout, testing, tree
from dbuf import mesh as meshes
from dbuf.errors import TreeError

W, B = torch.ones(4, 2), torch.ones(3)
Make = Callable[[Any], Any]


def _shard(tensors: Any, mesh: Any, placement: Any = None, **options: Any) -> dbuf.DBuffer:
    return dbuf.shard(tensors, mesh, placement or RowAtomic(), **options)


# What rank 0 has, what the last rank has, and the two lines of the message that name the first difference.
CASES: dict[str, tuple[Make, Make, str, str]] = {
    "shape": (
        lambda m: _shard({"w": W, "b": B}, m),
        lambda m: _shard({"w": W, "b": torch.ones(5)}, m),
        "['b']: (3,)",
        "['b']: (5,)",
    ),
    "key order": (
        lambda m: {"p": _shard({"w": W, "b": B}, m)},
        lambda m: {"p": _shard({"b": B, "w": W}, m)},
        "['p']['w']: (4, 2)",
        "['p']['b']: (3,)",
    ),
    "one tensor more": (
        lambda m: [_shard({"w": W}, m)],
        lambda m: [_shard({"w": W, "extra": B}, m)],
        "[0]: placements",
        "[0]['extra']: (3,)",
    ),
    "one buffer less": (
        lambda m: [_shard({"w": W}, m), _shard({"w": W}, m)],
        lambda m: [_shard({"w": W}, m)],
        "[1]['w']: (4, 2)",
        "(nothing more)",
    ),
    "layout": (
        lambda m: _shard({"w": W, "b": B}, m),
        lambda m: _shard({"w": W, "b": B}, m, layout=ShardLayout.UNPADDED),
        ": layout offsets",
        ": layout offsets",
    ),
    "alignment": (lambda m: _shard({"w": W}, m), lambda m: _shard({"w": W}, m, align=8), "align 1", "align 8"),
    "dtype": (
        lambda m: _shard({"w": W}, m),
        lambda m: _shard({"w": W.bfloat16()}, m),
        "torch.float32",
        "torch.bfloat16",
    ),
    "placement": (
        lambda m: _shard({"w": W}, m),
        lambda m: _shard({"w": W}, m, Replicate()),
        "placements (RowAtomic(),)",
        "placements (Replicate(),)",
    ),
    "block size": (
        lambda m: _shard({"w": W}, m, BlockAtomic(2)),
        lambda m: _shard({"w": W}, m, BlockAtomic(4)),
        "BlockAtomic(2)",
        "BlockAtomic(4)",
    ),
}


def _disagree() -> dict[str, dict[str, str]]:
    mesh = dbuf.init_mesh(("dp",))
    last = dist.get_world_size() - 1
    out: dict[str, dict[str, str]] = {}
    for name, (first, other, _, _) in CASES.items():
        bufs = (other if dist.get_rank() == last else first)(mesh)

        def step(bufs: Any) -> Any:
            return tree.map(lambda x: x * 2, bufs)

        jitted = dbuf.jit(step)
        out[name] = {}
        for what, call in (("check", dbuf.check), ("jit", jitted), ("inspect", jitted.inspect)):
            with pytest.raises(TreeError) as error:
                call(bufs)
            out[name][what] = str(error.value)
        assert jitted.compiles == 0
    # The ranks are still in step, and buffers that agree pass.
    dbuf.check({"fine": [_shard({"w": W}, mesh)]})
    return out


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_first_difference_is_named_on_every_rank(ranks: int) -> None:
    results = testing.run(_disagree, world_size=ranks, timeout_s=60)
    testing.assert_same_on_all_ranks(results)
    for name, messages in results[0].items():
        first, other = CASES[name][2:]
        for what, where in (("check", "dbuf.check"), ("jit", "dbuf.jit(step)"), ("inspect", "dbuf.jit(step)")):
            lines = messages[what].splitlines()
            assert lines[0] == f"{where}: ranks disagree about the buffers.", name
            assert lines[1].startswith("  got:  rank 0: ") and first in lines[1], (name, lines)
            assert lines[2].startswith(f"        rank {ranks - 1}: ") and other in lines[2], (name, lines)
            assert lines[3].startswith("  need: ") and lines[4].startswith("  try:  ")


def _agree() -> bool:
    """Equal specs that are other objects, several meshes, trees without buffers, and a middle rank that is wrong."""
    mesh = dbuf.init_mesh(("outer", "inner"), (1, 3))
    inner = mesh["inner"]
    dbuf.check({"a": _shard({"w": W}, mesh, (Replicate(), RowAtomic())), "b": _shard({"w": W}, inner), "n": 3})
    dbuf.check({})
    wrong = dist.get_rank() == 1
    with pytest.raises(TreeError, match="rank 1: the buffer"):
        dbuf.check(_shard({"w": torch.ones(3 + wrong, 2)}, inner))
    return True


def test_buffers_that_agree_pass_and_any_rank_may_be_the_odd_one() -> None:
    assert testing.run(_agree, world_size=3, timeout_s=60) == [True] * 3


def test_alone_there_is_nothing_to_compare() -> None:
    dbuf.check(_shard({"w": W}, dbuf.init_mesh(("dp",))))


def _message(call: Callable[[], None]) -> str:
    try:
        call()
    except TreeError as error:
        return str(error)
    return ""


def _two_meshes(swapped: int | None) -> Any:
    mesh = dbuf.init_mesh(("outer", "inner"), (2, 2))
    wide = dbuf.shard({"w": torch.ones(4)}, mesh, (RowAtomic(), RowAtomic()))
    narrow = dbuf.shard({"w": torch.ones(4 + mesh.get_local_rank("outer"))}, mesh["inner"], RowAtomic())
    if swapped == dist.get_rank():
        return _message(lambda: dbuf.check({"narrow": narrow, "wide": wide}))
    return _message(lambda: dbuf.check({"wide": wide, "narrow": narrow}))


def test_buffers_of_two_meshes_in_another_order_are_no_hang() -> None:
    """Each slice of a mesh may have other shapes; the order is that of the whole mesh."""
    assert testing.run(_two_meshes, None, world_size=4) == [""] * 4
    for message in testing.run(_two_meshes, 1, world_size=4):
        assert "rank 0: buffer ['wide']: mesh ('outer', 'inner')" in message
        assert "rank 1: buffer ['narrow']: mesh ('inner',)" in message


def _two_axes(odd: int | None, axis: str) -> str:
    """Buffers on the two axes of a grid, and on no mesh that holds both."""
    mesh = dbuf.init_mesh(("outer", "inner"), (2, 2))
    sizes = {name: 4 + (name == axis and dist.get_rank() == odd) for name in ("outer", "inner")}
    return _message(lambda: dbuf.check({n: _shard({"w": torch.ones(s)}, mesh[n]) for n, s in sizes.items()}))


@pytest.mark.parametrize("axis", ["outer", "inner"])
def test_a_difference_on_one_axis_of_a_grid_is_told_to_all(axis: str) -> None:
    """Was a hang: the ranks that had seen a difference left, and the others waited for them on the other axis."""
    assert testing.run(_two_axes, None, axis, world_size=4) == [""] * 4
    for odd in range(4):
        first, *others = testing.run(_two_axes, odd, axis, world_size=4, timeout_s=60)
        assert f"rank {odd}: buffer ['{axis}']['w']: (5,)" in first
        assert others == [first] * 3


def _told() -> list[str]:
    """What `check` sends beyond digests, of buffers on a mesh and on its slices."""
    mesh, told = dbuf.init_mesh(("outer", "inner"), (2, 2)), list[str]()
    bufs = {"wide": _shard({"w": W}, mesh, (RowAtomic(), RowAtomic())), "narrow": _shard({"w": W}, mesh["inner"])}
    with mock.patch.object(meshes, "gather_objects", lambda value, _: told.append(str(value))):
        dbuf.check(bufs)
    return told


def test_ranks_that_agree_send_digests_alone() -> None:
    assert testing.run(_told, world_size=4) == [[]] * 4
