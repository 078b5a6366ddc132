"""Placements are inert values, and tuples of them follow the suffix rule."""

import copy
import itertools
import pickle
from collections.abc import Callable

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from dbuf.errors import PlacementError
from dbuf.placement import (
    BlockAtomic,
    Placement,
    RowAtomic,
    ShardLayout,
    TensorAtomic,
    changed_mesh_axis,
    describe,
    dual,
    dual_placements,
    is_sharded,
    normalize,
    num_sharded,
    shard_placement,
)

R, P, S = Replicate(), Partial("sum"), RowAtomic()
MAKERS: list[Callable[[], Placement]] = [
    RowAtomic,
    TensorAtomic,
    lambda: BlockAtomic(2),
    lambda: BlockAtomic(3),
    Replicate,
    lambda: Partial("sum"),
    lambda: Partial("avg"),
]
SHARDS = [make() for make in MAKERS[:4]]


def test_equality_is_by_type_and_fields() -> None:
    for (i, a), (j, b) in itertools.product(enumerate(MAKERS), repeat=2):
        assert (a() == b()) is (i == j)
        assert (a() != b()) is (i != j)
    assert len({make() for make in MAKERS * 2}) == len(MAKERS)


@pytest.mark.parametrize("shard", SHARDS, ids=repr)
def test_no_flat_shard_equals_torch_shard(shard: Placement) -> None:
    """torch's `Shard.__eq__` looks at `dim` alone, and would call a naive subclass equal to `Shard(0)`."""
    assert isinstance(shard, Shard)
    assert shard.dim == 0
    assert not shard == Shard(0)
    assert not Shard(0) == shard
    assert shard != Shard(0)
    assert Shard(0) != shard
    assert hash(shard) != hash(Shard(0))


@pytest.mark.parametrize("placement", [make() for make in MAKERS], ids=describe)
def test_describe_can_be_pasted_back(placement: Placement) -> None:
    assert eval(describe(placement)) == placement
    assert eval(describe((R, placement))) == (R, placement)
    assert eval(describe((placement,))) == (placement,)


@pytest.mark.parametrize("shard", SHARDS, ids=repr)
def test_shards_survive_repr_copy_and_pickle(shard: Placement) -> None:
    for again in (
        eval(repr(shard)),
        copy.copy(shard),
        copy.deepcopy(shard),
        pickle.loads(pickle.dumps(shard)),
    ):
        assert again == shard
        assert type(again) is type(shard)
        assert hash(again) == hash(shard)
    text, names = shard.__fx_repr__()
    assert eval(text, dict(names)) == shard


@pytest.mark.parametrize("shard", SHARDS, ids=repr)
def test_shards_are_immutable(shard: Placement) -> None:
    for name in ("dim", "block_size", "anything"):
        with pytest.raises(AttributeError, match="immutable"):
            setattr(shard, name, 1)
    with pytest.raises(AttributeError, match="immutable"):
        del shard.block_size


@pytest.mark.parametrize("size", [True, False, 0, -2, 1.0, "2", None])
def test_block_size_is_a_positive_int(size: int) -> None:
    with pytest.raises(PlacementError, match="BlockAtomic: block_size is not a positive int"):
        BlockAtomic(size)


def test_shard_layout_by_value() -> None:
    assert ShardLayout("padded") is ShardLayout.PADDED
    assert ShardLayout("unpadded") == "unpadded"
    assert eval(repr(ShardLayout.PADDED)) is ShardLayout.PADDED
    with pytest.raises(PlacementError, match="ShardLayout: no such layout") as caught:
        ShardLayout("even")
    assert "got:  'even'" in str(caught.value)


def test_what_is_sharded() -> None:
    assert [is_sharded(make()) for make in MAKERS] == [True] * 4 + [False] * 3
    assert (num_sharded((R, S, S)), num_sharded((R, P))) == (2, 0)
    assert shard_placement((R, BlockAtomic(4))) == BlockAtomic(4)
    assert shard_placement((R, P)) is None
    assert shard_placement(()) is None


def test_normalize_accepts() -> None:
    assert normalize(S, 1, "f") == (S,)
    assert normalize((S,), 1, "f") == (S,)
    assert normalize([P, S], 2, "f") == (P, S)
    assert normalize((R, Partial("avg"), S), 3, "f") == (R, Partial("avg"), S)
    assert normalize((), 0, "f") == ()


@pytest.mark.parametrize(
    ("placements", "ndim", "parts"),
    [
        (S, 2, ["one placement for a mesh of 2 axes", "got:  RowAtomic()", "(Replicate(), RowAtomic())"]),
        ((R, S), 1, ["2 placements for a mesh of 1 axis", "a tuple of 1", "try:  (RowAtomic(),)"]),
        ((), 1, ["0 placements", "got:  ()"]),
        ((S, R), 2, ["lies outside of an unsharded one", "a suffix", "(Replicate(), RowAtomic())"]),
        ((S, P, S), 3, ["not one range", "(Partial('sum'), RowAtomic(), RowAtomic())"]),
        ((S, BlockAtomic(2)), 2, ["different placements", "try:  (BlockAtomic(2), BlockAtomic(2))"]),
        ((S, TensorAtomic()), 2, ["different placements", "(RowAtomic(), TensorAtomic())"]),
        (Shard(0), 1, ["torch's Shard", "RowAtomic(), BlockAtomic(block_size) or TensorAtomic()"]),
        ((R, Shard(1)), 2, ["axis 1 has torch's Shard", "try:  RowAtomic()"]),
        (
            Partial("max"),
            1,
            ["the reduction 'max'", "got:  Partial('max')", 'Partial("sum") or Partial("avg")'],
        ),
        ((R, "shard"), 2, ["axis 1 has no placement", "got:  'shard' (str)", "TensorAtomic()"]),
        (None, 1, ["got:  None (NoneType)"]),
        (RowAtomic, 1, ["has a class", "try:  RowAtomic(...), an instance"]),
    ],
)
def test_normalize_refuses(placements: tuple[Placement, ...], ndim: int, parts: list[str]) -> None:
    with pytest.raises(PlacementError) as caught:
        normalize(placements, ndim, "dbuf.shard: params['w']")
    message = str(caught.value)
    assert message.startswith("dbuf.shard: params['w']: ")
    assert [line[:8] for line in message.splitlines()[1:]] == ["  got:  ", "  need: ", "  try:  "]
    for part in parts:
        assert part in message


def test_changed_mesh_axis() -> None:
    assert changed_mesh_axis((R, S), (R, S)) is None
    assert changed_mesh_axis((R, S), (P, S)) == 0
    assert changed_mesh_axis((P, S, S), (P, S, R)) == 2
    assert changed_mesh_axis((BlockAtomic(2),), (BlockAtomic(4),)) == 0


def test_changed_mesh_axis_refuses_two_changes() -> None:
    with pytest.raises(PlacementError, match="differ on 2 mesh axes") as caught:
        changed_mesh_axis((P, S), (R, R))
    assert "(Partial('sum'), RowAtomic())\n        (Replicate(), Replicate())" in str(caught.value)
    assert "different on axes [0, 1]" in str(caught.value)
    assert "go to (Partial('sum'), Replicate()) first" in str(caught.value)


def test_changed_mesh_axis_refuses_different_lengths() -> None:
    with pytest.raises(PlacementError, match="meshes of different sizes"):
        changed_mesh_axis((R, S), (R,))


def test_dual_of_each_kind() -> None:
    for shard in SHARDS:
        assert dual(shard) == shard
    assert dual(R) == Partial("sum")
    assert dual(Partial("sum")) == R
    assert dual(Partial("avg")) == R
    assert dual_placements((R, P, S)) == (P, R, S)


def test_dual_is_an_involution_without_avg() -> None:
    for placement in (*SHARDS, R, P):
        assert dual(dual(placement)) == placement


def test_placements_trace_into_one_graph() -> None:
    def step(x: torch.Tensor, placements: tuple[Placement, ...]) -> torch.Tensor:
        if placements == (R, BlockAtomic(2)) and changed_mesh_axis(placements, (R, R)) == 1:
            return x + num_sharded(placements) + BlockAtomic(5).block_size
        return x

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    assert compiled(torch.zeros(2), (Replicate(), BlockAtomic(2))).tolist() == [6.0, 6.0]
    assert compiled(torch.zeros(2), (Replicate(), S)).tolist() == [0.0, 0.0]
