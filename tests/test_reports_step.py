"""Faults that users of neighbouring projects reported, as requirements on steps: each test is named after its report.

P = pytorch/pytorch, M = NVIDIA/Megatron-LM. Reports on single movements are in test_reports_movement.py.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._inductor.utils import run_and_get_code

import cheap_kernels
import dbuf
import models
import programs
from dbuf import Partial, Replicate, RowAtomic, testing, tree
from models import Gathers, allocations, memory_of, shard_groups


def _mesh() -> Any:
    return dbuf.init_mesh(("dp",))


def _tokens() -> torch.Tensor:
    return models.share(models.batch(), dist.get_rank(), dist.get_world_size())


def _graphs() -> dict[str, Any]:
    ddp = shard_groups(models.weights(1), _mesh(), Replicate())
    zero3 = shard_groups(models.weights(1), _mesh(), RowAtomic())
    half = functools.partial(dbuf.gathered, dtype=torch.bfloat16)
    mesh = _mesh()

    def ddp_step(params: Any, tokens: torch.Tensor) -> Any:
        loss, grads = dbuf.value_and_grad(models.language_loss())(params, tokens)
        assert all(g.placements == (Partial("sum"),) for g in grads.values())
        return tree.map(lambda p, g: p - 0.1 * g, params, dbuf.allreduce(grads)), dbuf.pmean(loss, mesh)

    def zero3_step(params: Any, tokens: torch.Tensor) -> Any:
        loss, grads = dbuf.value_and_grad(models.language_loss(half))(params, tokens)
        return tree.map(lambda p, g: p - 0.1 * g, params, grads), dbuf.pmean(loss, mesh)

    calls = {"ddp": (ddp_step, ddp, _tokens()), "zero3": (zero3_step, zero3, _tokens())}
    return {
        name: (report.collectives, report.scalars, report.graph_breaks, report.sequence)
        for name, report in programs.inspect_in_turns(calls).items()
    }


@pytest.mark.slow
def test_P109697_and_P161153_and_P115484_whole_steps_in_one_graph() -> None:
    """P#109697: a DDP step is one graph with one all-reduce a buffer.

    P#161153, P#115484: so is a ZeRO-3 step; it gathers in bf16 from fp32 shards, again in the backward, and sums
    gradients in fp32.
    """
    got: dict[str, Any] = {}
    for part in testing.run(_graphs, world_size=2):
        got |= part
    collectives, scalars, breaks, _ = got["ddp"]
    assert (collectives, scalars, breaks) == ({"all_reduce": 3}, {"all_reduce": 1}, 0)
    collectives, scalars, breaks, sequence = got["zero3"]
    assert (collectives, scalars, breaks) == (
        {"all_gather": 5, "reduce_scatter": 3},
        {"all_reduce": 1},
        0,
    )
    gathers = [c for c in sequence if c.kind == "all_gather"]
    assert [c.backward for c in gathers] == [False] * 3 + [True] * 2  # the embedding's backward reads no weight
    assert {c.dtype for c in gathers} == {torch.bfloat16}
    assert {c.dtype for c in sequence if c.kind == "reduce_scatter"} == {torch.float32}


def _by_func(params: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """The step's gradients by torch.func over the movements themselves, scaled by hand."""
    locals_, spec = tree.flatten(params)

    def loss_fn(*leaves: torch.Tensor) -> torch.Tensor:
        return models.language_loss(models.kept)(tree.unflatten(list(leaves), spec), tokens) / dist.get_world_size()

    grads, loss = torch.func.grad_and_value(loss_fn, argnums=tuple(range(len(locals_))))(*locals_)
    return loss * dist.get_world_size(), tree.unflatten(list(grads), spec)


def _routes() -> dict[str, Any]:
    params, tokens = shard_groups(models.weights(1), _mesh(), RowAtomic()), _tokens()

    def both(params: Any, tokens: torch.Tensor) -> Any:
        by_autograd = dbuf.value_and_grad(models.language_loss(models.kept))(params, tokens)
        return by_autograd, _by_func(params, tokens)

    eager = both(params, tokens)
    with cheap_kernels.graphs_alone():
        compiled = dbuf.jit(both)(params, tokens)
    return {
        "eager": [(loss, models.whole(grads)) for loss, grads in eager],
        "compiled": [(loss, models.whole(grads)) for loss, grads in compiled],
        "types": {type(leaf) for leaf in tree.leaves([eager, compiled])},
    }


@pytest.mark.slow
def test_P138217_and_P167732_autograd_and_func_give_the_same_numbers() -> None:
    """And P#142076: whatever a step returns, eager or compiled, is exactly a `torch.Tensor`."""
    for got in testing.run(_routes, world_size=2):
        testing.assert_close(got["eager"][0], got["eager"][1])
        testing.assert_close(got["compiled"][0], got["eager"][0])
        testing.assert_close(got["compiled"][1], got["eager"][1])
        assert got["types"] == {torch.Tensor}


def _eager_between() -> tuple[int, ...]:
    params, tokens = shard_groups(models.weights(3, width=24, hidden=40), _mesh(), RowAtomic()), _tokens()
    counts = []
    for use in (models.kept, dbuf.gathered, lambda fn: dbuf.remat(dbuf.gathered(fn))):
        variables = tree.map(lambda x: x.detach().requires_grad_(), params)
        with Gathers() as gathers:
            loss = models.language_loss(use)(variables, tokens)
        counts.append(gathers.alive(params["block0"].layout.size * 4))
        loss.backward()
    return tuple(counts)


def test_autoparallel410_and_469_and_P146693_no_full_weight_is_saved() -> None:
    """In eager, by the memory of what was gathered; test_rematerialize.py reads compiled graphs and code."""
    assert testing.run(_eager_between, world_size=2) == [(3, 0, 0)] * 2


def test_P195329_a_donated_update_allocates_nothing_of_full_size() -> None:
    numel = 5000
    params = dbuf.shard({f"w{i}": torch.rand(numel // 10) for i in range(10)}, _mesh(), RowAtomic())
    sgd = dbuf.optim.sgd(0.1, momentum=0.9)

    def update(params: Any, state: Any, grads: Any) -> Any:
        updates, state = sgd.update(grads, state, params)
        return dbuf.optim.apply_updates(params, updates), state

    jitted, grads = dbuf.jit(update, donate_argnums=(0, 1)), tree.map(torch.ones_like, params)
    pointer = params.local.data_ptr()
    params, state = jitted(params, sgd.init(params), grads)
    assert params.local.data_ptr() == pointer
    assert max(allocations(lambda: jitted(params, state, grads)), default=0) < numel


def test_M7264_nothing_per_parameter_on_the_host() -> None:
    """The program of an update on a buffer of 300 tensors is that of an update on one, guards included."""
    found = []
    for tensors in (1, 300):
        torch.compiler.reset()
        like = {f"w{i}": torch.ones(600 // tensors) for i in range(tensors)}
        params = dbuf.shard(like, _mesh(), RowAtomic())
        adamw = dbuf.optim.adamw(1e-3)

        def update(params: Any, state: Any, adamw: Any = adamw) -> Any:
            updates, state = adamw.update(params, state, params)
            return dbuf.optim.apply_updates(params, updates), state

        jitted = dbuf.jit(update)
        _, (code,) = run_and_get_code(jitted, params, adamw.init(params))
        found.append((dict(jitted.inspect(params, adamw.init(params)).ops), code.count("cpp_fused"), len(code)))
    assert found[0] == found[1]


def _gradients_alive() -> tuple[int, int]:
    layers = 4
    groups = {k: ts for k, ts in models.weights(layers, width=24, hidden=40).items() if "block" in k}
    params = shard_groups(groups, _mesh(), RowAtomic())

    def loss_fn(params: Any, h: torch.Tensor) -> torch.Tensor:
        for group in params.values():
            h = dbuf.gathered(models.block)(group, h)
        return h.square().mean()

    code = programs.code_of(dbuf.jit(dbuf.grad(loss_fn)), params, torch.ones(3, 24))
    full = params["block0"].layout.size
    assert full > sum(t.numel() for t in groups["block0"].values())  # padding, which once held all of them alive
    held = [[kind for kind, nbytes in now.values() if nbytes == full * 4] for now in memory_of(code)]
    return max(kinds.count("empty") for kinds in held), max(map(len, held))


@pytest.mark.slow
def test_ISEEKYAN158_reduce_scatter_inputs_are_not_all_alive_at_once() -> None:
    """Of four blocks: at most two full-size gradients at once, and with two gathered weights four full-size buffers."""
    for gradients, everything in testing.run(_gradients_alive, world_size=2):
        print(f"full-size gradients alive at once: {gradients}; with weights: {everything}")
        assert gradients <= 2
        assert everything <= 6  # and two that an exchange on gloo receives


def test_P168890_a_compiled_result_feeds_the_next_function() -> None:
    buf = dbuf.shard({"w": torch.tensor([1.0, 2.0])}, _mesh(), RowAtomic())
    first, second = dbuf.jit(lambda b: tree.map(torch.neg, b)), dbuf.jit(lambda b: tree.map(torch.exp, b))
    out = second(first(buf))
    assert type(out) is dbuf.DBuffer and out.spec == buf.spec
    testing.assert_close(out.local, torch.tensor([-1.0, -2.0]).exp())
