"""Training runs that several test files compare: on ranks by `dbuf.train`, and in one process by torch alone."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import torch

import cheap_kernels
import dbuf
import models
from dbuf import tree
from dbuf.optim import GradientTransformation
from dbuf.train import Strategy, init, make_train_step

LAYERS = 1
ROWS = 36  # a multiple of 1, 2, 3 and 4 ranks times 1 and 3 microbatches
GROUPS = tuple(models.weights(LAYERS))  # embedding, one block, head
RATES = {"sgd": 0.3, "adamw": 0.02}
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp")


def strategy_for(name: str, mesh_shape: tuple[int, ...]) -> Strategy:
    """The strategy of this name for a mesh of that many axes."""
    make = getattr(Strategy, name)
    return make() if name in ("hsdp", "hfsdp") else make(axes=len(mesh_shape))  # type: ignore[no-any-return]


def optimizers(swap: bool) -> dict[str, str]:
    """Which optimizer each group has: one run shows SGD and AdamW at once, and swapped runs both on all groups."""
    names = ("sgd", "adamw")
    return {group: names[(i + swap) % 2] for i, group in enumerate(GROUPS)}


def optimizer(of_group: dict[str, str]) -> GradientTransformation:
    """SGD with momentum and AdamW, each on its own groups of a dict of buffers."""
    parts = {
        "sgd": dbuf.optim.sgd(RATES["sgd"], momentum=0.9),
        "adamw": dbuf.optim.adamw(RATES["adamw"], weight_decay=0.1),
    }

    def pick(groups: dict[str, Any], name: str) -> dict[str, Any]:
        return {group: groups[group] for group in groups if of_group[group] == name}

    def start(params: dict[str, Any]) -> Any:
        return {name: part.init(pick(params, name)) for name, part in parts.items()}

    def update(grads: dict[str, Any], state: Any, params: dict[str, Any]) -> tuple[Any, Any]:
        done = {n: part.update(pick(grads, n), state[n], pick(params, n)) for n, part in parts.items()}
        updates = {group: done[of_group[group]][0][group] for group in params}
        return updates, {name: state for name, (_, state) in done.items()}

    return GradientTransformation(start, update)


@functools.cache
def alone(swap: bool, steps: int, clip: float | None = None) -> dict[str, Any]:
    """Losses and gradient norms of every step, and the parameters after the last; by torch alone."""
    groups = {g: {k: v.clone().requires_grad_() for k, v in ts.items()} for g, ts in models.weights(LAYERS).items()}
    of_group = optimizers(swap)
    leaves = {n: [p for g, ts in groups.items() if of_group[g] == n for p in ts.values()] for n in RATES}
    sgd = torch.optim.SGD(leaves["sgd"], lr=RATES["sgd"], momentum=0.9)
    adamw = torch.optim.AdamW(leaves["adamw"], lr=RATES["adamw"], weight_decay=0.1)
    losses, norms = [], []
    for i in range(steps):
        sgd.zero_grad(), adamw.zero_grad()
        loss = models.language_loss(models.plain)(groups, models.batch(i, ROWS))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_([*leaves["sgd"], *leaves["adamw"]], clip or math.inf))
        sgd.step(), adamw.step()
        losses.append(loss.detach())
    return {"losses": losses, "norms": norms, "params": tree.map(lambda p: p.detach().clone(), groups)}


def start(
    mesh_shape: tuple[int, ...], name: str, make: GradientTransformation, **options: Any
) -> tuple[Any, Strategy, Any]:
    """A mesh, a strategy for it, and the first state."""
    mesh = dbuf.init_mesh(("outer", "inner")[-len(mesh_shape) :], mesh_shape)
    strategy = strategy_for(name, mesh_shape)
    layout = {"layout": options.pop("layout")} if "layout" in options else {}
    params = models.shard_groups(models.weights(LAYERS), mesh, strategy.optim, dp_size=strategy.dp_size(mesh), **layout)
    return mesh, strategy, init(params, make, strategy, **options)


def batch_of(mesh: Any, step: int, **options: Any) -> torch.Tensor:
    """This rank's share of a step's batch."""
    coordinate, rank = mesh.get_coordinate(), 0
    for size, at in zip(mesh.shape, coordinate, strict=True):
        rank = rank * size + at
    return models.share(models.batch(step, ROWS, **options), rank, mesh.size())


def train(
    mesh_shape: tuple[int, ...],
    name: str,
    microbatches: int,
    steps: int,
    *,
    compiled: bool = False,
    clip: float | None = None,
    **options: Any,
) -> dict[str, Any]:
    """What `alone` returns, by `dbuf.train` on this rank; with the report of a compiled step."""
    make = optimizer(optimizers(swap=microbatches > 1))
    mesh, strategy, state = start(mesh_shape, name, make, **options)
    step: Callable[..., Any] = make_train_step(
        models.language_loss(), make, strategy, microbatches=microbatches, clip_norm=clip
    )
    step = dbuf.jit(step, donate_argnums=0) if compiled else step
    losses, norms = [], []
    with cheap_kernels.graphs_alone() if compiled else contextlib.nullcontext():
        for i in range(steps):
            state, metrics = step(state, batch_of(mesh, i))
            losses.append(metrics["loss"])
            norms.append(metrics["grad_norm"])
    out = {"losses": losses, "norms": norms, "params": models.whole(state.params)}
    if isinstance(step, dbuf.Jitted):
        out["report"] = step.inspect(state, batch_of(mesh, 0))
    return out
