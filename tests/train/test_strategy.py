"""Strategies as values: the six named ones, the segments they need, and what is no strategy."""

from __future__ import annotations

import pytest

import dbuf
import dbuf.testing
from dbuf import BlockAtomic, Partial, PlacementError, Replicate, RowAtomic, TensorAtomic
from dbuf.train import Strategy

R, P, S = Replicate(), Partial("sum"), RowAtomic()


def test_the_named_strategies_are_the_rows_of_the_table() -> None:
    assert Strategy.ddp() == Strategy((R,), (P,), (R,))
    assert Strategy.zero1() == Strategy((R,), (P,), (S,))
    assert Strategy.zero2() == Strategy((R,), (S,), (S,))
    assert Strategy.zero3() == Strategy.fsdp() == Strategy((S,), (S,), (S,))
    assert Strategy.hsdp() == Strategy((R, S), (P, S), (R, S))
    assert Strategy.hfsdp() == Strategy((R, S), (P, S), (S, S))
    assert Strategy.zero2(TensorAtomic(), axes=2) == Strategy((R, R), (TensorAtomic(),) * 2, (TensorAtomic(),) * 2)
    assert Strategy(R, P, S) == Strategy.zero1()  # one placement stands for a tuple of one


def _dp_sizes() -> dict[str, int]:
    mesh = dbuf.init_mesh(("outer", "inner"), (2, 2))
    named = {"ddp": Strategy.ddp(axes=2), "zero3": Strategy.zero3(axes=2)}
    named |= {"hsdp": Strategy.hsdp(), "hfsdp": Strategy.hfsdp()}
    return {name: strategy.dp_size(mesh) for name, strategy in named.items()}


def test_a_group_needs_a_segment_for_each_rank_of_the_axes_that_are_ever_sharded() -> None:
    """HSDP on (2, 2) pays padding for 2 segments, not 4."""
    assert dbuf.testing.run(_dp_sizes, world_size=4) == [{"ddp": 1, "zero3": 4, "hsdp": 2, "hfsdp": 4}] * 4


@pytest.mark.parametrize(
    ("params", "grads", "optim", "message"),
    [
        ((S,), (P,), (S,), r"on axis 0 gradients would become contributions again.*RowAtomic\(\) as differentiation"),
        ((R,), (Partial("avg"),), (R,), r"on axis 0 gradients would become an average.*try:.*Partial\('sum'\)"),
        ((P,), (P,), (R,), "params are values, and contributions are none"),
        ((R,), (P,), (P,), "optim are values"),
        ((R, S), (P, S), (S,), "the three are for meshes of different sizes"),
        ((R,), (S,), (BlockAtomic(2),), "sharded in different ways"),
        ((S, R), (S, P), (S, R), "Strategy: params: a sharded axis lies outside of an unsharded one"),
        ((R,), (S,), ("shard",), "Strategy: optim"),
    ],
)
def test_what_is_no_strategy_is_refused_with_the_reason(
    params: object, grads: object, optim: object, message: str
) -> None:
    with pytest.raises(PlacementError, match=f"(?s){message}"):
        Strategy(params, grads, optim)  # type: ignore[arg-type]


def test_every_other_legal_triple_is_a_strategy() -> None:
    Strategy((S,), (R,), (R,))  # gathers gradients: wasteful, and right
    Strategy((S,), (S,), (R,))
    Strategy((R, R), (P, S), (S, S))


def test_a_mesh_with_other_axes_is_refused() -> None:
    with pytest.raises(PlacementError, match="a strategy for 2 mesh axes meets a mesh of 1"):
        Strategy.hsdp().dp_size(dbuf.init_mesh())
