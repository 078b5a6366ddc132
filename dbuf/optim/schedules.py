"""Learning rates as functions of the number of updates done, for `LearningRate` arguments: nothing recompiles."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch

from dbuf.errors import DbufError, explain

__all__ = ["Schedule", "constant", "linear_warmup", "warmup_cosine", "warmup_stable_decay"]

Schedule: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""From updates done so far (0-d int64) to a learning rate (0-d float32)."""


def constant(value: float) -> Schedule:
    """The same learning rate at every step.

    Example:
        >>> constant(0.1)(torch.tensor(7))
        tensor(0.1000)
    """
    return lambda step: torch.full_like(step, value, dtype=torch.float32)


def linear_warmup(peak: float, warmup_steps: int) -> Schedule:
    """From `peak / warmup_steps` at the first update to `peak` after `warmup_steps` of them, and then constant.

    Example:
        >>> [round(linear_warmup(1.0, 4)(torch.tensor(step)).item(), 2) for step in (0, 1, 3, 9)]
        [0.25, 0.5, 1.0, 1.0]
    """
    _require_steps("linear_warmup", warmup_steps, warmup_steps=warmup_steps)
    return lambda step: peak * _ramp(step, warmup_steps)


def warmup_cosine(peak: float, warmup_steps: int, total_steps: int, end: float = 0.0) -> Schedule:
    """Linear warm-up, then half a cosine down to `end`, reached by the last of `total_steps` updates.

    Source:
        Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", https://arxiv.org/abs/1608.03983.

    Example:
        >>> rate = warmup_cosine(1.0, 1, 9)
        >>> [round(rate(torch.tensor(step)).item(), 2) for step in (0, 4, 8, 20)]
        [1.0, 0.5, 0.0, 0.0]
    """
    _require_steps("warmup_cosine", total_steps, warmup_steps=warmup_steps)

    def rate(step: torch.Tensor) -> torch.Tensor:
        part = _part(step + 1 - warmup_steps, total_steps - warmup_steps)
        return (end + (peak - end) * 0.5 * (1 + torch.cos(math.pi * part))) * _ramp(step, warmup_steps)

    return rate


def warmup_stable_decay(
    peak: float, warmup_steps: int, total_steps: int, decay_steps: int, end: float = 0.0
) -> Schedule:
    """Linear warm-up, constant, and a linear way down to `end` in the last `decay_steps` of `total_steps` updates.

    Source:
        Hu et al., "MiniCPM", https://arxiv.org/abs/2404.06395.

    Example:
        >>> rate = warmup_stable_decay(1.0, 2, 10, 4)
        >>> [round(rate(torch.tensor(step)).item(), 2) for step in (0, 1, 5, 7, 9)]
        [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    _require_steps("warmup_stable_decay", total_steps, warmup_steps=warmup_steps, decay_steps=decay_steps)

    def rate(step: torch.Tensor) -> torch.Tensor:
        part = _part(step + 1 - (total_steps - decay_steps), decay_steps)
        return (peak + (end - peak) * part) * _ramp(step, warmup_steps)

    return rate


def _ramp(step: torch.Tensor, steps: int) -> torch.Tensor:
    return _part(step + 1, steps)


def _part(done: torch.Tensor, of: int) -> torch.Tensor:
    """`done / of`, between 0 and 1; of nothing it is 0 before it begins and 1 from then on."""
    return (done.to(torch.float32) / of).clamp(0.0, 1.0) if of else (done > 0).to(torch.float32)


def _require_steps(name: str, total_steps: int, **phases: int) -> None:
    counts = {**phases, "total_steps": total_steps}
    whole = all(type(count) is int and count >= 0 for count in counts.values())
    if not whole or sum(phases.values()) > total_steps:
        raise DbufError(
            explain(
                f"dbuf.optim.{name}",
                "the phases of the schedule do not fit into its steps." if whole else "not a whole number of updates.",
                got=", ".join(f"{key}={count!r}" for key, count in counts.items()),
                need="phases that end by total_steps" if whole else "ints, none negative",
                fix="a larger total_steps, or shorter phases" if whole else "warmup_steps=100",
            )
        )
