"""The same step by dbuf: each strategy, and what the parts of it are worth."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from _lines_torch import ADAMW, Setup, Step
from _model import loss_fn, weights

import dbuf
from dbuf.schedule import Overlap
from dbuf.train import Strategy, init, make_train_step


def train(setup: Setup, strategy: Strategy, compiled: bool = True, **options: Any) -> Step:
    """One buffer a group."""
    groups = weights(setup.size, setup.device)
    params = {name: _shard(setup, tensors, strategy) for name, tensors in groups.items()}
    return _run(setup, params, strategy, compiled, options)


def by_parameter(setup: Setup, **options: Any) -> Step:
    """As SimpleFSDP does, https://arxiv.org/abs/2411.00284: a collective a parameter, under the same passes."""
    strategy, groups = Strategy.zero3(), weights(setup.size, setup.device)
    params = {
        group: {name: _shard(setup, tensor, strategy) for name, tensor in tensors.items()}
        for group, tensors in groups.items()
    }
    return _run(setup, params, strategy, True, options)


def _shard(setup: Setup, tensors: Any, strategy: Strategy) -> dbuf.DBuffer:
    return dbuf.shard(tensors, setup.mesh, strategy.optim, dp_size=strategy.dp_size(setup.mesh))


def _run(setup: Setup, params: Any, strategy: Strategy, compiled: bool, options: dict[str, Any]) -> Step:
    b1, b2 = ADAMW["betas"]
    optimizer = dbuf.optim.adamw(ADAMW["lr"], b1, b2, ADAMW["eps"], ADAMW["weight_decay"])
    low = None if setup.dtype == torch.float32 else setup.dtype
    state = init(params, optimizer, strategy, compute_dtype=low)

    def use(fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return dbuf.gathered(fn)

    def loss(params: Any, batch: torch.Tensor) -> torch.Tensor:
        return loss_fn(params, batch, setup.size.heads, use)

    whole = make_train_step(loss, optimizer, strategy, compute_dtype=low)

    def step(state: Any, batch: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """No gradient norm, which no other line has: what a compiled step does not return is not computed."""
        state, metrics = whole(state, batch)
        return state, metrics["loss"]

    do: Any = dbuf.jit(step, donate_argnums=0, **options) if compiled else step

    def run(batch: torch.Tensor) -> torch.Tensor:
        nonlocal state
        state, loss = do(state, batch)
        return loss

    return run


LINES: dict[str, Callable[[Setup], Step]] = {
    "by parameter": functools.partial(by_parameter, overlap=Overlap(groups_in_flight=12)),
    "by parameter, no overlap": functools.partial(by_parameter, overlap=False),
    "dbuf ddp": functools.partial(train, strategy=Strategy.ddp()),
    "dbuf zero1": functools.partial(train, strategy=Strategy.zero1()),
    "dbuf zero2": functools.partial(train, strategy=Strategy.zero2()),
    "dbuf zero3": functools.partial(train, strategy=Strategy.zero3()),
    "dbuf zero3, no overlap": functools.partial(train, strategy=Strategy.zero3(), overlap=False),
    "dbuf zero3, no exchange": functools.partial(train, strategy=Strategy.zero3(), overlap=Overlap(exchange=False)),
    "dbuf zero3, three groups": functools.partial(
        train, strategy=Strategy.zero3(), overlap=Overlap(groups_in_flight=3)
    ),
    "dbuf zero3 eager": functools.partial(train, strategy=Strategy.zero3(), compiled=False),
}
