"""Stochastic gradient descent, with or without momentum: unlike Adam, it shows a wrongly scaled gradient."""

from __future__ import annotations

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

__all__ = ["SGDState", "sgd"]


class SGDState(NamedTuple):
    """What SGD remembers.

    Attributes:
        step: Number of updates done, a 0-d int64 tensor.
        trace: Decaying sum of gradients, buffers like the parameters' in float32 (or wider); `()` without
            momentum.
    """

    step: torch.Tensor
    trace: PyTree


def sgd(learning_rate: LearningRate, momentum: float = 0.0) -> GradientTransformation:
    """Gradient descent: `update = -lr * trace`, where `trace = grad + momentum * trace`.

    The same rule as `torch.optim.SGD`, without dampening.

    Args:
        learning_rate: A number, a 0-d tensor, or a function of the number of updates done so far (0-d int64).
        momentum: Decay of the sum of gradients, in [0, 1). At 0 no sum is kept.

    Returns:
        The transformation; its state is an `SGDState`.

    Raises:
        PlacementError: In `update`, gradients or state are not placed and laid out like the parameters.

    Communication:
        None.

    Source: Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013.

    Example:
        >>> sgd(0.1).init({})
        SGDState(step=tensor(0), trace=())
    """

    def init(params: PyTree) -> SGDState:
        step = torch.zeros((), dtype=torch.int64, device=device_of(params))
        if not momentum:
            return SGDState(step, ())
        return SGDState(step, tree.map(lambda p: torch.zeros_like(p, dtype=state_dtype(p.dtype)), params))

    def update(grads: PyTree, state: SGDState, params: PyTree) -> tuple[PyTree, SGDState]:
        require_same_specs("dbuf.optim.sgd", params, grads=grads)
        trace: PyTree = ()
        direction = tree.map(lambda g: g.to(state_dtype(g.dtype)), grads)
        if momentum:
            require_same_specs("dbuf.optim.sgd", params, **{"state.trace": state.trace})
            direction = trace = tree.map(lambda t, g: g + momentum * t, state.trace, direction)
        rate = learning_rate_at(learning_rate, state.step)
        return tree.map(lambda d: -rate * d, direction), SGDState(state.step + 1, trace)

    return GradientTransformation(init, update)
