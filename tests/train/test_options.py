"""What a step can do besides: clipping, aux, skipping, changing rates and shapes, bf16, several meshes, refusals."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cheap_kernels
import dbuf
import models
import training
from dbuf import DbufError, LayoutError, PlacementError, Replicate, RowAtomic, TreeError, testing, tree
from dbuf.train import Strategy, init, make_train_step

STEPS = 3


@pytest.mark.parametrize("name", ["ddp", "zero3"])
def test_clipping_is_that_of_one_process(name: str) -> None:
    clip = 0.5
    run = functools.partial(training.train, clip=clip)
    expected = training.alone(False, STEPS, clip)
    assert all(norm > clip for norm in expected["norms"])  # or nothing is shown
    for got in testing.run(run, (2,), name, 1, STEPS, world_size=2):
        testing.assert_close(got, expected)


def _aux() -> Any:
    mesh = dbuf.init_mesh(("dp",))
    optimizer, strategy = dbuf.optim.sgd(0.1), Strategy.zero2()
    params = models.shard_groups(models.weights(1), mesh, strategy.optim)
    inner = models.language_loss()

    def loss_fn(params: Any, batch: Any) -> Any:
        tokens = batch["tokens"]
        aux = {
            "mean": tokens.float().mean(),
            "count": tokens[:, 1:].ne(0).sum(),
            "flag": (tokens >= 0).all(),
            "small": torch.tensor(200, dtype=torch.uint8),
            "name": "lm",
        }
        return inner(params, batch["tokens"]), aux

    step = make_train_step(loss_fn, optimizer, strategy, has_aux=True, microbatches=3)
    batch = {"tokens": training.batch_of(mesh, 0), "rate": torch.tensor(0.5)}
    return step(init(params, optimizer, strategy), batch)[1]["aux"]


def test_floating_aux_is_averaged_and_counts_are_summed() -> None:
    tokens = models.batch(0, training.ROWS)
    for aux in testing.run(_aux, world_size=2):
        testing.assert_close(aux["mean"], tokens.float().mean())
        assert aux["count"] == tokens[:, 1:].ne(0).sum()
        assert (aux["flag"], aux["small"]) == (2 * 3, 200 * 2 * 3)  # ranks and microbatches
        assert aux["name"] == "lm"


@pytest.mark.parametrize("make", [lambda p: p, lambda p: {"z": torch.ones(2, dtype=torch.complex64)}])
def test_aux_that_cannot_be_averaged_is_refused(make: Any) -> None:
    """Was wrong: the parts of a sharded buffer were averaged with each other."""
    optimizer = dbuf.optim.sgd(0.1)
    mesh, strategy, state = training.start((1,), "zero3", optimizer)
    inner = models.language_loss()
    step = make_train_step(lambda p, t: (inner(p, t), make(p)), optimizer, strategy, has_aux=True)
    with pytest.raises(TreeError, match="aux cannot be averaged"):
        step(state, training.batch_of(mesh, 0))


def _skip(name: str, compiled: bool) -> Any:
    """Of two ranks the last one's third batch gives a gradient that is not a number."""
    optimizer = dbuf.optim.adamw(0.02)
    mesh, strategy, state = training.start((2,), name, optimizer)
    inner = models.language_loss()

    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        return inner(params, batch["tokens"]) * batch["factor"]

    step: Any = make_train_step(loss_fn, optimizer, strategy, skip_nonfinite=True)
    step = dbuf.jit(step) if compiled else step
    states, skipped = [state], []
    with cheap_kernels.graphs_alone() if compiled else contextlib.nullcontext():
        for i in range(4):
            factor = torch.tensor(math.nan if i == 2 and dist.get_rank() == 1 else 1.0)
            state, metrics = step(state, {"tokens": training.batch_of(mesh, i), "factor": factor})
            states.append(state)
            skipped.append(metrics["skipped"].item())
    return [tree.leaves(s._replace(skipped=())) for s in states], skipped


@pytest.mark.parametrize(
    ("name", "compiled"),
    [("ddp", False), ("zero1", False), ("zero3", False), pytest.param("zero3", True, marks=pytest.mark.slow)],
)
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_all(name: str, compiled: bool) -> None:
    for states, skipped in testing.run(_skip, name, compiled, world_size=2):
        assert skipped == [0, 0, 1, 1]
        testing.assert_bitwise(states[3], states[2])
        for before, after in ((1, 2), (3, 4)):
            assert any(not torch.equal(a, b) for a, b in zip(states[before], states[after], strict=True))
        assert all(bool(torch.isfinite(x).all()) for x in states[4] if isinstance(x, torch.Tensor))


@cheap_kernels.graphs_alone()
def _many_steps() -> Any:
    """A rate that changes, a state from elsewhere, and then batches of many lengths."""

    def rate(step: torch.Tensor) -> torch.Tensor:
        return 0.1 / (step + 1)

    optimizer = dbuf.optim.adamw(rate)
    mesh, strategy, state = training.start((2,), "zero3", optimizer)
    step = dbuf.jit(make_train_step(models.language_loss(), optimizer, strategy), donate_argnums=0)
    for i in range(20):
        state, _ = step(state, training.batch_of(mesh, i))
    fresh = step.compiles
    elsewhere = copy.deepcopy(training.start((2,), "zero3", optimizer)[2])
    elsewhere, _ = step(elsewhere, training.batch_of(mesh, 0))
    again = step.compiles
    losses = []
    for context in range(1, 21):
        state, metrics = step(state, training.batch_of(mesh, context, context=context))
        losses.append(metrics["loss"].item())
    return fresh, again, step.compiles, losses, state.step.item(), elsewhere.step.item()


@pytest.mark.slow
def test_one_compile_for_changing_rates_and_few_for_changing_lengths() -> None:
    for fresh, again, all_compiles, losses, steps, other in testing.run(_many_steps, world_size=2):
        assert (fresh, again, steps, other) == (1, 1, 40, 1)
        assert all_compiles <= 3  # the first length, any length, and perhaps length 1
        assert len(losses) == 20 and all(map(math.isfinite, losses))


def _gather_bytes(dtype: torch.dtype | None) -> Any:
    optimizer = dbuf.optim.sgd(0.1)
    mesh, strategy, state = training.start((2,), "zero3", optimizer, compute_dtype=dtype)
    step = make_train_step(models.language_loss(), optimizer, strategy, compute_dtype=dtype)
    report = dbuf.inspect(step, state, training.batch_of(mesh, 0))
    gathers = [c for c in report.sequence if c.kind == "all_gather"]
    scatters = [c for c in report.sequence if c.kind == "reduce_scatter"]
    return sum(c.nbytes for c in gathers), {str(c.dtype) for c in gathers}, {str(c.dtype) for c in scatters}


@pytest.mark.slow
def test_a_bf16_wire_halves_the_bytes_of_gathers_and_leaves_reductions_in_fp32() -> None:
    (wide, *_), *_ = testing.run(_gather_bytes, None, world_size=2)
    for nbytes, gathers, scatters in testing.run(_gather_bytes, torch.bfloat16, world_size=2):
        assert nbytes * 2 == wide
        assert (gathers, scatters) == ({"torch.bfloat16"}, {"torch.float32"})


# Several meshes: attention on both axes of (2, 2), experts on the inner one, different ones on each outer half.


def _dense(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["w"])


def _expert_weights() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [{"w": torch.randn(4, 4, generator=generator)} for _ in range(3)]


def _rows() -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(6))


def _experts(clip: float) -> Any:
    """Expert k serves the rows of outer half k, which is a dispatch that needs no exchange."""
    mesh = dbuf.init_mesh(("outer", "inner"), (2, 2))
    inner = mesh["inner"]
    outer_at, inner_at = mesh.get_coordinate()
    attention, *experts = _expert_weights()
    strategy = {"attention": Strategy.hsdp(), "experts": Strategy.zero3()}
    params = {
        "attention": dbuf.shard(attention, mesh, strategy["attention"].optim, dp_size=2),
        "experts": dbuf.shard(experts[outer_at], inner, strategy["experts"].optim, dp_size=2),
    }
    optimizer = dbuf.optim.sgd(1.0)
    state = init(params, optimizer, strategy)

    def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        h = dbuf.gathered(_dense)(params["attention"], x)
        return dbuf.gathered(_dense)(params["experts"], h).square().mean()

    step = make_train_step(loss_fn, optimizer, strategy, clip_norm=clip)
    x = _rows().chunk(4)[2 * outer_at + inner_at]
    for _ in range(2):
        state, metrics = step(state, x)
    return models.whole(state.params), metrics


@pytest.mark.parametrize("clip", [math.inf, 0.01])
def test_experts_on_one_axis_and_attention_on_both(clip: float) -> None:
    """Gradients are divided by all ranks, and every expert counts once in the norm, on all ranks alike."""
    attention, *experts = [tree.map(lambda t: t.clone().requires_grad_(), w) for w in _expert_weights()]
    leaves = [attention["w"], *(e["w"] for e in experts)]
    for _ in range(2):
        halves = _rows().chunk(2)
        loss = sum(_dense(e, _dense(attention, x)).square().mean() / 2 for e, x in zip(experts, halves, strict=True))
        grads = torch.autograd.grad(loss, leaves)
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
        with torch.no_grad():
            for leaf, g in zip(leaves, grads, strict=True):
                leaf -= g * (clip / (norm + 1e-6)).clamp(max=1.0)
    for rank, (params, metrics) in enumerate(testing.run(_experts, clip, world_size=4)):
        testing.assert_close(metrics["loss"], loss.detach())
        testing.assert_close(metrics["grad_norm"], norm)
        testing.assert_close(params["attention"]["w"], attention["w"].detach())
        testing.assert_close(params["experts"]["w"], experts[rank // 2]["w"].detach())


# Refusals.


def _state(strategy: Strategy | None = None, **options: Any) -> Any:
    strategy = strategy or Strategy.zero3()
    mesh = dbuf.init_mesh()
    optimizer = dbuf.optim.sgd(0.1)
    params = models.shard_groups(models.weights(1), mesh, strategy.optim)
    return mesh, optimizer, init(params, optimizer, strategy, **options)


def test_a_batch_that_cannot_be_cut_is_named() -> None:
    mesh, optimizer, state = _state()
    step = make_train_step(models.language_loss(), optimizer, Strategy.zero3(), microbatches=5)
    with pytest.raises(
        DbufError, match=r"(?s)cut into 5 equal microbatches.*batch: \(36, 5\).*multiple of 5"
    ) as caught:
        step(state, training.batch_of(mesh, 0))
    with pytest.raises(DbufError) as under_jit:
        dbuf.jit(step)(state, training.batch_of(mesh, 0))
    assert str(caught.value) == str(under_jit.value)


def test_a_state_of_another_strategy_or_dtype_is_refused() -> None:
    mesh, optimizer, state = _state()
    step = make_train_step(models.language_loss(), optimizer, Strategy.ddp())
    with pytest.raises(PlacementError, match=r"(?s)the state was made for another step.*Replicate"):
        step(state, training.batch_of(mesh, 0))
    with pytest.raises(DbufError, match=r"(?s)a step takes a TrainState.*dict.*dbuf.train.init"):
        step({}, training.batch_of(mesh, 0))  # type: ignore[arg-type]
    zero1 = Strategy.zero1()
    _, _, state = _state(zero1, compute_dtype=torch.bfloat16)
    step = make_train_step(models.language_loss(), optimizer, zero1, compute_dtype=torch.float16)
    with pytest.raises(PlacementError, match=r"(?s)weights that rest in torch.bfloat16.*compute_dtype, torch.float16"):
        step(state, training.batch_of(mesh, 0))


def test_init_refuses_what_cannot_be_trained() -> None:
    mesh, optimizer = dbuf.init_mesh(), dbuf.optim.sgd(0.1)
    whole = dbuf.shard({"n": torch.arange(3)}, mesh, Replicate())
    with pytest.raises(TreeError, match=r"(?s)parameters are floating DBuffers.*torch.int64"):
        init({"n": whole}, optimizer, Strategy.ddp())
    with pytest.raises(TreeError, match="no buffer"):
        init({}, optimizer, Strategy.ddp())
    with pytest.raises(TreeError, match=r"(?s)not every leaf is a DBuffer.*\['w'\]: Tensor"):
        init({"w": torch.ones(3)}, optimizer, Strategy.ddp())
    partial = dbuf.shard({"w": torch.ones(3)}, mesh, dbuf.Partial("sum"))
    with pytest.raises(PlacementError, match="holds contributions"):
        init(partial, optimizer, Strategy.ddp())
    with pytest.raises(PlacementError, match="a strategy for 2 mesh axes"):
        init(dbuf.shard({"w": torch.ones(3)}, mesh, RowAtomic()), optimizer, Strategy.hsdp())
    with pytest.raises(DbufError, match="microbatches"):
        make_train_step(models.language_loss(), optimizer, Strategy.ddp(), microbatches=0)


def _too_few_segments() -> None:
    mesh = dbuf.init_mesh(("outer", "inner"), (2, 2))
    params = dbuf.shard({"w": torch.ones(8, 2)}, mesh, Strategy.hsdp().optim, dp_size=2)
    with pytest.raises(LayoutError, match="cannot shard 4 ways a layout that was planned for 2"):
        init(params, dbuf.optim.sgd(0.1), Strategy.hfsdp())


def test_init_refuses_a_layout_of_too_few_segments() -> None:
    testing.run(_too_few_segments, world_size=4)


def _ranks_differ() -> str:
    mesh, strategy = dbuf.init_mesh(), Strategy.zero3()
    params = dbuf.shard({"w": torch.ones(2 + dist.get_rank())}, mesh, strategy.optim)
    try:
        init(params, dbuf.optim.sgd(0.1), strategy)
    except TreeError as error:
        return str(error)
    return ""


def test_init_compares_ranks() -> None:
    messages = testing.run(_ranks_differ, world_size=2)
    assert "ranks disagree" in messages[0] and messages[0] == messages[1]
