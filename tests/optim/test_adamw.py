"""AdamW and SGD against torch's own, and what every element-wise optimizer here must hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import cheap_kernels  # noqa: F401
import dbuf
from dbuf import testing
from dbuf.buffer import is_buffer
from dbuf.errors import PlacementError, TreeError
from dbuf.optim import GradientTransformation, adamw, apply_updates, chain, sgd

RTOL = 2e-6  # fp32, a few updates; other orders of the same arithmetic
SHAPES = {"w": (5, 4), "b": (3,), "s": ()}


def _tensors(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def _shard(seed: int, dtype: torch.dtype = torch.float32, **options: object) -> dict[str, dbuf.DBuffer]:
    mesh = dbuf.init_mesh(("dp",))
    return {
        name: dbuf.shard(_tensors(seed + i, dtype), mesh, dbuf.RowAtomic(), **options)
        for i, name in enumerate(("block0", "block1"))
    }


def _ours(optimizer: GradientTransformation, steps: int) -> list[torch.Tensor]:
    params = _shard(0)
    state = optimizer.init(params)
    for step in range(steps):
        updates, state = optimizer.update(_shard(100 + 10 * step), state, params)
        params = apply_updates(params, updates)
    return [tensor for buf in params.values() for tensor in dbuf.unpack(buf).values()]


def _theirs(make: Callable[..., torch.optim.Optimizer], steps: int, rate: Callable[[int], float]) -> list[torch.Tensor]:
    params = [tensor for i in range(2) for tensor in _tensors(i).values()]
    optimizer = make(params)
    for step in range(steps):
        grads = [tensor for i in range(2) for tensor in _tensors(100 + 10 * step + i).values()]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
    return params


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize(("b1", "b2", "weight_decay"), [(0.9, 0.999, 1e-4), (0.8, 0.95, 0.1), (0.0, 0.5, 0.0)])
def test_adamw_is_torchs(steps: int, b1: float, b2: float, weight_decay: float) -> None:
    ours = _ours(adamw(0.05, b1, b2, eps=1e-6, weight_decay=weight_decay), steps)
    theirs = _theirs(
        lambda params: torch.optim.AdamW(params, betas=(b1, b2), eps=1e-6, weight_decay=weight_decay),
        steps,
        lambda step: 0.05,
    )
    torch.testing.assert_close(ours, theirs, rtol=RTOL, atol=RTOL)


def test_adamw_has_optax_defaults() -> None:
    theirs = _theirs(lambda params: torch.optim.AdamW(params, weight_decay=1e-4), 3, lambda step: 1e-2)
    torch.testing.assert_close(_ours(adamw(1e-2), 3), theirs, rtol=RTOL, atol=RTOL)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_torchs(momentum: float) -> None:
    theirs = _theirs(lambda params: torch.optim.SGD(params, lr=1.0, momentum=momentum), 4, lambda step: 0.05)
    torch.testing.assert_close(_ours(sgd(0.05, momentum), 4), theirs, rtol=RTOL, atol=RTOL)


@pytest.mark.parametrize("make", [adamw, sgd])
def test_learning_rate_is_a_function_of_the_updates_done(make: Callable[..., GradientTransformation]) -> None:
    peer = {
        adamw: lambda params: torch.optim.AdamW(params, weight_decay=1e-4),
        sgd: lambda params: torch.optim.SGD(params, lr=1.0),
    }[make]
    theirs = _theirs(peer, 4, lambda step: 0.1 * (step + 1))
    torch.testing.assert_close(_ours(make(lambda step: 0.1 * (step + 1)), 4), theirs, rtol=RTOL, atol=RTOL)
    fixed = _theirs(peer, 2, lambda step: 0.1)
    torch.testing.assert_close(_ours(make(torch.tensor(0.1)), 2), fixed, rtol=RTOL, atol=RTOL)


@pytest.mark.parametrize("optimizer", [adamw(0.1), sgd(0.1, momentum=0.9)])
def test_bf16_parameters_have_fp32_state_and_updates(optimizer: GradientTransformation) -> None:
    params = _shard(0, torch.bfloat16)
    updates, state = optimizer.update(_shard(1, torch.bfloat16), optimizer.init(params), params)
    moments = [leaf for leaf in dbuf.tree.leaves(state, is_leaf=is_buffer) if is_buffer(leaf)]
    assert {buf.dtype for buf in (*moments, *updates.values())} == {torch.float32}
    assert {buf.dtype for buf in apply_updates(params, updates).values()} == {torch.bfloat16}
    assert [buf.spec for buf in moments[:2]] == [buf.spec for buf in params.values()]


@pytest.mark.parametrize("optimizer", [adamw(0.1), sgd(0.1, momentum=0.9), sgd(0.1)])
def test_update_writes_no_input(optimizer: GradientTransformation) -> None:
    params, grads = _shard(0), _shard(1)
    _, state = optimizer.update(_shard(2), optimizer.init(params), params)
    before = [leaf.clone() for leaf in dbuf.tree.leaves((params, grads, state))]
    updates, _ = optimizer.update(grads, state, params)
    apply_updates(params, updates)
    testing.assert_bitwise(dbuf.tree.leaves((params, grads, state)), before)


def test_nothing_recompiles_as_steps_pass() -> None:
    optimizer = adamw(lambda step: 0.1 / (step + 1))
    counter = CompileCounter()

    @torch.compile(backend=counter, fullgraph=True)
    def step(params: object, grads: object, state: object) -> tuple[object, object]:
        updates, state = optimizer.update(grads, state, params)
        return apply_updates(params, updates), state

    params = _shard(0)
    state = optimizer.init(params)
    for i in range(4):
        params, state = step(params, _shard(100 + i), state)
    assert counter.frame_count == 1
    assert int(state[0].step) == 4


def test_chain_passes_updates_on_and_keeps_each_state() -> None:
    params, grads = _shard(0), _shard(1)
    both = chain(sgd(-1.0, momentum=0.5), adamw(0.1))
    updates, state = both.update(grads, both.init(params), params)
    alone, _ = adamw(0.1).update(grads, adamw(0.1).init(params), params)
    testing.assert_bitwise(updates, alone)
    assert [type(part[0]).__name__ for part in state] == ["TraceState", "ScaleByAdamState"]
    assert chain().update(grads, chain().init(params), params) == (grads, ())


@pytest.mark.parametrize(("name", "make"), [("adamw", adamw), ("sgd", sgd)])
def test_a_partial_gradient_is_refused(name: str, make: Callable[..., GradientTransformation]) -> None:
    optimizer, params = make(0.1), dbuf.allgather(_shard(0))
    grads = dbuf.redistribute(params, dbuf.Partial("sum"))
    grads["block0"] = params["block0"]  # one is right, one is not
    with pytest.raises(PlacementError) as error:
        optimizer.update(grads, optimizer.init(params), params)
    first, *rest = str(error.value).splitlines()
    assert first == f"dbuf.optim.{name}: a gradient is not reduced yet."
    assert [line.split()[0] for line in rest] == ["got:", "need:", "try:"]
    assert "grads['block1'] has placements" in rest[0] and "block0" not in rest[0]
    assert "dbuf.redistribute(grads" in rest[2]


def test_every_buffer_that_is_cut_otherwise_is_listed() -> None:
    optimizer, params = adamw(0.1), _shard(0)
    grads = _shard(1, layout=dbuf.plan_row_atomic(tuple(SHAPES.values()), 1, align=64))
    with pytest.raises(PlacementError, match="buffers are not cut alike") as error:
        optimizer.update(grads, optimizer.init(params), params)
    assert "grads['block0'] has layout" in str(error.value)
    assert "grads['block1'] has layout" in str(error.value)


def test_state_of_other_parameters_is_refused() -> None:
    optimizer, params = adamw(0.1), _shard(0)
    whole = dbuf.allgather(params)
    with pytest.raises(PlacementError, match=r"state\.mu\['block0'\] has placements"):
        optimizer.update(params, optimizer.init(whole), params)
    with pytest.raises(TreeError, match="grads and params are trees of different structure"):
        optimizer.update({"block0": params["block0"]}, optimizer.init(params), params)
    with pytest.raises(PlacementError, match=r"dbuf.optim.apply_updates: .*\n.*updates\['block0'\]"):
        apply_updates(params, whole)


def _whole_after_three_steps(
    make: Callable[..., GradientTransformation],
) -> dict[str, dict[str, torch.Tensor]]:
    optimizer, params = make(0.05), _shard(0)
    state = optimizer.init(params)
    for step in range(3):
        updates, state = optimizer.update(_shard(100 + 10 * step), state, params)
        params = apply_updates(params, updates)
    return {name: dbuf.unpack(dbuf.allgather(buf)) for name, buf in params.items()}


@pytest.mark.parametrize("make", [adamw, sgd])
@pytest.mark.parametrize("world_size", [2, 3])
def test_result_does_not_depend_on_world_size(make: Callable[..., GradientTransformation], world_size: int) -> None:
    alone = _whole_after_three_steps(make)
    for result in testing.run(_whole_after_three_steps, make, world_size=world_size):
        testing.assert_bitwise(result, alone)
