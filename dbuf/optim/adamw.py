"""AdamW on flat buffers: a few element-wise operations a group, whatever the number of its tensors."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from dbuf import tree
from dbuf.optim.base import (
    GradientTransformation,
    LearningRate,
    PyTree,
    device_of,
    learning_rate_at,
    require_same_specs,
    state_dtype,
)

__all__ = ["AdamWState", "adamw"]


class AdamWState(NamedTuple):
    """What AdamW remembers.

    Attributes:
        step: Number of updates done, a 0-d int64 tensor.
        mu: Running mean of gradients, buffers like the parameters' in float32 (or wider).
        nu: Running mean of squared gradients, likewise.
    """

    step: torch.Tensor
    mu: PyTree
    nu: PyTree


def adamw(
    learning_rate: LearningRate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
) -> GradientTransformation:
    """Adam with decoupled weight decay.

    With `m`, `v` the running means after this gradient and `t` the number of updates including this one:

        update = -lr * (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay * param)

    The moments are float32 whatever the parameters' dtype, and so are the updates. They start at zero and are
    placed and laid out like the parameters, so each rank of a sharded axis holds only its own part of them.

    Args:
        learning_rate: A number, a 0-d tensor, or a function of the number of updates done so far (0-d int64).
        b1: Decay of the mean of gradients, in [0, 1).
        b2: Decay of the mean of squared gradients, in [0, 1).
        eps: Added to the denominator, outside of the square root.
        weight_decay: Fraction of the parameter taken off per unit of learning rate (the default is optax's;
            torch's is 1e-2).

    Returns:
        The transformation; its state is an `AdamWState`.

    Raises:
        PlacementError: In `update`, gradients or state are not placed and laid out like the parameters.

    Communication:
        None.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", https://arxiv.org/abs/1711.05101.

    Example:
        >>> adamw(1e-3).init({})
        AdamWState(step=tensor(0), mu={}, nu={})
    """

    def init(params: PyTree) -> AdamWState:
        def zeros() -> PyTree:
            return tree.map(lambda p: torch.zeros_like(p, dtype=state_dtype(p.dtype)), params)

        step = torch.zeros((), dtype=torch.int64, device=device_of(params))
        return AdamWState(step, zeros(), zeros())

    def update(grads: PyTree, state: AdamWState, params: PyTree) -> tuple[PyTree, AdamWState]:
        moments = {"state.mu": state.mu, "state.nu": state.nu}
        require_same_specs("dbuf.optim.adamw", params, grads=grads, **moments)
        rate = learning_rate_at(learning_rate, state.step)
        step = state.step + 1
        mu = tree.map(lambda m, g: b1 * m + (1 - b1) * g.to(m.dtype), state.mu, grads)
        nu = tree.map(lambda v, g: b2 * v + (1 - b2) * g.to(v.dtype).square(), state.nu, grads)
        mu_scale, nu_scale = _one_minus_power(b1, step), _one_minus_power(b2, step)

        # sqrt and division, not rsqrt or pow: those depend on an element's position in the buffer (vector or
        # scalar code), and the result may not depend on how the buffer is cut.
        def delta(p: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return -rate * (m / mu_scale / ((v / nu_scale).sqrt() + eps) + weight_decay * p.to(m.dtype))

        return tree.map(delta, params, mu, nu), AdamWState(step, mu, nu)

    return GradientTransformation(init, update)


def _one_minus_power(base: float, step: torch.Tensor) -> torch.Tensor:
    """`1 - base ** step` for a 0-d integer `step`, in float32, without cancellation when `base` is near 1."""
    return -torch.expm1(step * math.log(base)) if base else torch.ones_like(step, dtype=torch.float32)
