"""Schedules, masks, partition, clipping, and transformations from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import pytest
import torch
from torch._inductor.utils import run_and_get_code

import cheap_kernels  # noqa: F401
import dbuf
from dbuf import RowAtomic, optim, testing
from optim.optimizers import MATRICES, SHAPES, tensors, whole


def shard(groups: Any, **options: Any) -> Any:
    mesh = dbuf.init_mesh(("dp",))
    return {name: dbuf.shard(tree, mesh, RowAtomic(), **options) for name, tree in groups.items()}


@pytest.mark.parametrize(
    "schedule, expected",
    [
        (optim.constant(0.5), lambda n: 0.5),
        (optim.linear_warmup(2.0, 4), lambda n: min((n + 1) / 4, 1.0) * 2.0),
        (optim.linear_warmup(2.0, 0), lambda n: 2.0),
        (
            optim.warmup_cosine(1.0, 3, 10, end=0.1),
            lambda n: (n + 1) / 3 if n < 3 else 0.1 + 0.45 * (1 + math.cos(math.pi * min((n - 2) / 7, 1.0))),
        ),
        (
            optim.warmup_stable_decay(1.0, 2, 10, 4, end=0.2),
            lambda n: (n + 1) / 2 if n < 2 else 1.0 - 0.8 * min(max((n - 5) / 4, 0.0), 1.0),
        ),
    ],
)
def test_schedules_are_functions_of_a_step_tensor(schedule: optim.Schedule, expected: Callable[[int], float]) -> None:
    for n in range(13):
        rate = schedule(torch.tensor(n))
        assert rate.dtype == torch.float32 and rate.ndim == 0
        assert math.isclose(rate.item(), expected(n), rel_tol=1e-5, abs_tol=1e-6), n


@pytest.mark.parametrize(
    "make", [lambda: optim.warmup_cosine(1.0, 5, 4), lambda: optim.warmup_stable_decay(1.0, 3, 6, 4)]
)
def test_phases_that_do_not_fit_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(dbuf.DbufError, match="phases of the schedule do not fit"):
        make()


def test_clipping_is_torchs() -> None:
    given = tensors(SHAPES, 1)
    grads, params = shard(given), shard(tensors(SHAPES, 0))
    clip = optim.clip_by_global_norm(0.7)
    clipped, _ = clip.update(grads, clip.init(params), params)
    leaves = [torch.nn.Parameter(torch.zeros_like(x)) for x in dbuf.tree.leaves(given)]
    for leaf, grad in zip(leaves, dbuf.tree.leaves(given), strict=True):
        leaf.grad = grad.clone()
    torch.nn.utils.clip_grad_norm_(leaves, 0.7)
    testing.assert_close(dbuf.tree.leaves(whole(clipped)), [leaf.grad for leaf in leaves])


def test_a_mask_takes_a_byte_an_element_and_only_where_a_buffer_is_mixed() -> None:
    params = shard({"mixed": {"w": torch.ones(8, 4), "b": torch.ones(8)}, "all": {"w": torch.ones(4, 4)}})
    state = optim.add_decayed_weights(0.1, optim.is_matrix).init(params)
    assert state["all"] is None and state["mixed"].local.dtype == torch.bool
    assert state["mixed"].local.nbytes == params["mixed"].local.numel()
    assert optim.add_decayed_weights(0.1).init(params) == ()


def kernels_of(count: int) -> int:
    """Loops in the program of an AdamW step on one buffer of `count` tensors, half of which decay."""
    shapes = {f"t{i}": (32, 4) if i % 2 else (64,) for i in range(count)}
    params = shard({"all": {name: torch.ones(shape) for name, shape in shapes.items()}})
    optimizer = optim.adamw(0.1, weight_decay=0.1, mask=(lambda path, shape: len(shape) == 2) if count > 1 else None)

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    _, (code,) = run_and_get_code(dbuf.jit(step, donate_argnums=(0, 1)), params, optimizer.init(params), params)
    return code[code.index("def call(") :].count("cpp_fused")


def test_a_masked_adamw_step_has_as_many_kernels_for_one_tensor_as_for_a_hundred() -> None:
    assert kernels_of(1) == kernels_of(100) <= 3


def test_partition_gives_each_optimizer_its_tensors_alone() -> None:
    params = shard(SHAPES_AS_TENSORS)
    both = optim.partition(
        {"a": optim.sgd(0.1), "b": optim.adamw(0.1)}, lambda path, shape: "a" if "['first']" in path else "b"
    )
    state = both.init(params)
    assert state["b"][0].mu["first"] is None and state["b"][0].mu["last"].spec == params["last"].spec
    updates, _ = both.update(params, state, params)
    alone, _ = optim.sgd(0.1).update(params, optim.sgd(0.1).init(params), params)
    testing.assert_bitwise(updates["first"], alone["first"])


def test_partition_refuses_a_name_that_it_does_not_have() -> None:
    both = optim.partition({"a": optim.sgd(0.1)}, lambda path, shape: "a" if len(shape) == 2 else "c")
    with pytest.raises(dbuf.DbufError, match=r"(?s)names an optimizer that there is not.*got:  'c'"):
        both.init(shard(SHAPES_AS_TENSORS))


class RMSState(NamedTuple):
    square: Any


def rmsprop(rate: float) -> Any:
    """An optax-style transformation that knows optree and torch, and has never heard of dbuf."""

    def init(params: Any) -> RMSState:
        return RMSState(optree.tree_map(torch.zeros_like, params))

    def update(grads: Any, state: RMSState, params: Any = None) -> tuple[Any, RMSState]:
        square = optree.tree_map(lambda s, g: 0.9 * s + 0.1 * g * g, state.square, grads)
        return optree.tree_map(lambda g, s: -rate * g / (s.sqrt() + 1e-8), grads, square), RMSState(square)

    return init, update


@pytest.mark.parametrize("compiled", [False, True])
def test_an_element_wise_transformation_from_elsewhere_works_unchanged(compiled: bool) -> None:
    init, update = rmsprop(0.1)
    params, grads = shard(tensors(MATRICES, 0)), shard(tensors(MATRICES, 1))
    call = dbuf.jit(update) if compiled else update
    updates, state = call(grads, init(params), params)
    expected, _ = update(tensors(MATRICES, 1), init(tensors(MATRICES, 0)))
    assert isinstance(updates["first"], dbuf.DBuffer) and isinstance(state, RMSState)
    testing.assert_close(whole(updates), expected)
    ours = optim.GradientTransformation(init, update)
    both = optim.chain(ours, optim.scale_by_learning_rate(0.5))
    twice, _ = both.update(grads, both.init(params), params)
    testing.assert_close(whole(twice), dbuf.tree.map(lambda x: -0.5 * x, expected))


SHAPES_AS_TENSORS = tensors(SHAPES, 0)
