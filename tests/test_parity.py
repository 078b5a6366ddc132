"""Training on ranks is training in one process: losses, gradients and parameters, with SGD and AdamW.

The single process is plain torch: no buffer, no dbuf optimizer. AdamW alone would not do: it divides a gradient by
its own size, so that one too large by the world size goes unseen (shown below).
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import cheap_kernels
import dbuf
import models
from dbuf import Replicate, RowAtomic, testing, tree

STEPS, LAYERS = 5, 1
KEPT_STEPS = (1, 5)
RATES = {"sgd": 0.5, "adamw": 0.02}
MESHES: dict[str, tuple[tuple[int, ...], Any]] = {
    "1": ((1,), (RowAtomic(),)),
    "2": ((2,), (RowAtomic(),)),
    "3": ((3,), (RowAtomic(),)),
    "4": ((4,), (RowAtomic(),)),
    "2x2 sharded": ((2, 2), (RowAtomic(), RowAtomic())),
    "2x2 hybrid": ((2, 2), (Replicate(), RowAtomic())),
}


@functools.cache
def _alone() -> dict[str, Any]:
    """Losses of every step, gradients of the first, parameters after steps 1 and 5; by torch alone."""
    out: dict[str, Any] = {}
    for name in RATES:
        groups = {g: {k: v.clone().requires_grad_() for k, v in ts.items()} for g, ts in models.weights(LAYERS).items()}
        leaves = tree.leaves(groups)
        if name == "sgd":
            optimizer: torch.optim.Optimizer = torch.optim.SGD(leaves, lr=RATES[name], momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(leaves, lr=RATES[name], weight_decay=0.1)
        got: dict[str, Any] = {"losses": [], "params": {}}
        for i in range(1, STEPS + 1):
            optimizer.zero_grad()
            loss = models.language_loss(models.plain)(groups, models.batch(i))
            loss.backward()
            if i == 1:
                got["grads"] = tree.map(lambda p: p.grad.clone(), groups)
            optimizer.step()
            got["losses"].append(loss.detach())
            if i in KEPT_STEPS:
                got["params"][i] = tree.map(lambda p: p.detach().clone(), groups)
        out[name] = got
    return out


def _optimizers() -> dict[str, Any]:
    adamw = dbuf.optim.adamw(RATES["adamw"], weight_decay=0.1)
    return {"sgd": dbuf.optim.sgd(RATES["sgd"], momentum=0.9), "adamw": adamw}


def _train(shape: tuple[int, ...], placements: Any, compiled: bool, options: Any, too_large: int = 1) -> dict[str, Any]:
    """Both optimizers side by side in one step, so that there is one program to compile."""
    mesh = dbuf.init_mesh(("outer", "inner")[-len(shape) :], shape)
    optimizers = _optimizers()

    def step(params: Any, states: Any, tokens: torch.Tensor) -> tuple[Any, ...]:
        losses, grads = {}, {}
        for name, optimizer in optimizers.items():
            loss, g = dbuf.value_and_grad(models.language_loss())(params[name], tokens)
            grads[name] = tree.map(lambda x: x * too_large, dbuf.redistribute(g, placements))
            losses[name] = dbuf.pmean(loss, mesh)
            updates, state = optimizer.update(grads[name], states[name], params[name])
            params = {**params, name: dbuf.optim.apply_updates(params[name], updates)}
            states = {**states, name: state}
        return params, states, losses, grads

    params = {name: models.shard_groups(models.weights(LAYERS), mesh, placements) for name in optimizers}
    states = {name: optimizer.init(params[name]) for name, optimizer in optimizers.items()}
    run = dbuf.jit(step, donate_argnums=(0, 1), options=options) if compiled else step
    out: dict[str, Any] = {name: {"losses": [], "params": {}} for name in optimizers}
    for i in range(1, STEPS + 1):
        tokens = models.share(models.batch(i), mesh.get_rank() if len(shape) == 1 else _flat_rank(mesh), mesh.size())
        params, states, losses, grads = run(params, states, tokens)
        for name, got in out.items():
            got["losses"].append(losses[name])
            if i == 1:
                got["grads"] = models.whole(grads[name])
            if i in KEPT_STEPS:
                got["params"][i] = tree.map(torch.clone, models.whole(params[name]))
    assert not compiled or run.compiles == 1
    return out


def _train_without_kernels(*args: Any) -> dict[str, Any]:
    with cheap_kernels.graphs_alone():
        return _train(*args)


def _flat_rank(mesh: Any) -> int:
    outer, inner = mesh.get_coordinate()
    return outer * mesh.shape[1] + inner


def _check(got: dict[str, Any], name: str) -> None:
    expected = _alone()[name]
    testing.assert_close(got["losses"], expected["losses"])
    testing.assert_close(got["params"], expected["params"])


@pytest.mark.parametrize("mesh", MESHES)
def test_eager(mesh: str) -> None:
    shape, placements = MESHES[mesh]
    for got in testing.run(_train, shape, placements, False, None, world_size=torch.Size(shape).numel()):
        for name in RATES:
            testing.assert_close(got[name]["grads"], _alone()[name]["grads"])
            _check(got[name], name)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_compiled(mesh: str) -> None:
    """One mesh as a user compiles it, the others without kernels."""
    shape, placements = MESHES[mesh]
    options = cheap_kernels.AS_USERS_DO if mesh == "1" else None
    run = _train if mesh == "1" else _train_without_kernels
    for got in testing.run(run, shape, placements, True, options, world_size=torch.Size(shape).numel()):
        for name in RATES:
            testing.assert_close(got[name]["grads"], _alone()[name]["grads"])
            _check(got[name], name)


def test_a_gradient_too_large_by_the_world_size_is_seen() -> None:
    """By gradients, and by SGD; AdamW's losses and parameters are those of the right gradient."""
    for got in testing.run(_train, (2,), (RowAtomic(),), False, None, 2, world_size=2):
        for name in RATES:
            with pytest.raises(AssertionError):
                testing.assert_close(got[name]["grads"], _alone()[name]["grads"])
        with pytest.raises(AssertionError):
            _check(got["sgd"], "sgd")
        _check(got["adamw"], "adamw")


def test_training_moves_and_falls() -> None:
    """Parity of a model that stands still would show nothing."""
    for name, got in _alone().items():
        assert got["losses"][-1] < 0.95 * got["losses"][0], name
        moved = tree.map(lambda a, b: (a - b).abs().max().item(), got["params"][1], got["params"][5])
        assert min(tree.leaves(moved)) > 1e-3, name
