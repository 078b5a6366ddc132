"""Pieces of optimizers that work element by element: what `chain` puts together, named as in optax."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from dbuf import tree
from dbuf.buffer import buffers
from dbuf.errors import DbufError, explain
from dbuf.optim.arguments import require_numbers, require_rate
from dbuf.optim.base import (
    GradientTransformation,
    LearningRate,
    PyTree,
    device_of,
    each,
    require_same_specs,
    state_dtype,
)

__all__ = [
    "LearningRateState",
    "ScaleByAdamState",
    "TraceState",
    "ema",
    "scale",
    "scale_by_adam",
    "scale_by_learning_rate",
    "set_learning_rate",
    "trace",
    "zeros_like_state",
]


def zeros_like_state(params: PyTree) -> PyTree:
    """Zeros placed and laid out like the parameters, float32 or wider."""
    return each(lambda p: torch.zeros_like(p, dtype=state_dtype(p.dtype)), params)


def scale(factor: float) -> GradientTransformation:
    """Multiply updates by a number; their dtype stays."""
    return GradientTransformation(
        lambda params: (), lambda grads, state, params: (each(lambda g: factor * g, grads), state)
    )


class LearningRateState(NamedTuple):
    """What `scale_by_learning_rate` remembers.

    Attributes:
        step: Number of updates done, a 0-d int64 tensor.
        learning_rate: The rate itself, a 0-d tensor that may be replaced; `()` where a schedule says it.
    """

    step: torch.Tensor
    learning_rate: PyTree


def scale_by_learning_rate(learning_rate: LearningRate) -> GradientTransformation:
    """Turn a direction into a step down: multiply by minus the learning rate.

    Args:
        learning_rate: A number or a 0-d tensor, which goes into the state, where `set_learning_rate` changes it; or a
            function of the number of updates done so far (0-d int64).

    Returns:
        The transformation; its state is a `LearningRateState`.

    Raises:
        DbufError: The learning rate is something else.
    """
    require_rate("dbuf.optim.scale_by_learning_rate", learning_rate)

    def init(params: PyTree) -> LearningRateState:
        device = device_of(params)
        step = torch.zeros((), dtype=torch.int64, device=device)
        if callable(learning_rate):
            return LearningRateState(step, ())
        # Not float64 for all: Dynamo takes such a 0-d tensor for a Python number, and traces the step twice.
        dtype = max((state_dtype(p.dtype) for p in buffers(params)), key=lambda dtype: dtype.itemsize, default=None)
        return LearningRateState(step, torch.tensor(float(learning_rate), dtype=dtype, device=device))

    def update(grads: PyTree, state: LearningRateState, params: PyTree) -> tuple[PyTree, LearningRateState]:
        rate = learning_rate(state.step) if callable(learning_rate) else state.learning_rate
        return each(lambda g: -rate * g, grads), LearningRateState(state.step + 1, state.learning_rate)

    return GradientTransformation(init, update)


def set_learning_rate(state: PyTree, learning_rate: float) -> PyTree:
    """The same optimizer state with another learning rate; a compiled step goes on without a compile.

    Args:
        state: A state, or a tree that holds states, of optimizers that were made with a number.
        learning_rate: The new rate, for all of them.

    Returns:
        The same tree; what a schedule says is left as it is.

    Raises:
        DbufError: There is no rate in it that could change.

    Example:
        >>> from dbuf.optim import sgd
        >>> set_learning_rate(sgd(0.1).init({}), 0.5)[-1].learning_rate
        tensor(0.5000)
    """
    changed = []

    def change(node: PyTree) -> PyTree:
        if not isinstance(node, LearningRateState) or not isinstance(node.learning_rate, torch.Tensor):
            return node
        changed.append(LearningRateState(node.step, torch.full_like(node.learning_rate, learning_rate)))
        return changed[-1]

    out = tree.map(change, state, is_leaf=lambda node: isinstance(node, LearningRateState))
    if not changed:
        raise DbufError(
            explain(
                "dbuf.optim.set_learning_rate",
                "the state holds no learning rate that could change.",
                got="a state without one, or one that a schedule says",
                need="the state of an optimizer that was made with a number",
                fix="adamw(1e-3) in place of adamw(schedule)",
            )
        )
    return out


class TraceState(NamedTuple):
    """What `trace` and `ema` remember.

    Attributes:
        trace: Decaying sum of gradients, buffers like the parameters' in float32 (or wider).
    """

    trace: PyTree


def trace(decay: float, nesterov: bool = False) -> GradientTransformation:
    """Momentum: `trace = grad + decay * trace`; with `nesterov` the direction is `grad + decay * trace`.

    Args:
        decay: Of the sum of gradients, in [0, 1).
        nesterov: Look one step ahead.

    Returns:
        The transformation; its state is a `TraceState`.

    Source:
        Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013.
    """
    require_numbers("dbuf.optim.trace", below=1.0, decay=decay)

    def update(grads: PyTree, state: TraceState, params: PyTree) -> tuple[PyTree, TraceState]:
        require_same_specs("dbuf.optim.trace", params, grads=grads, **{"state.trace": state.trace})
        new = each(lambda t, g: g.to(t.dtype) + decay * t, state.trace, grads)
        direction = each(lambda t, g: g.to(t.dtype) + decay * t, new, grads) if nesterov else new
        return direction, TraceState(new)

    return GradientTransformation(lambda params: TraceState(zeros_like_state(params)), update)


def ema(decay: float, nesterov: bool = False) -> GradientTransformation:
    """A running mean of gradients: `mean = decay * mean + (1 - decay) * grad`.

    The start of the mean is not corrected; that of optax is by default (its `debias`).

    Args:
        decay: Of the mean, in [0, 1).
        nesterov: The direction is `decay * mean + (1 - decay) * grad` with the new mean, as `torch.optim.Muon` has it.

    Returns:
        The transformation; its state is a `TraceState`.
    """
    require_numbers("dbuf.optim.ema", below=1.0, decay=decay)

    def update(grads: PyTree, state: TraceState, params: PyTree) -> tuple[PyTree, TraceState]:
        require_same_specs("dbuf.optim.ema", params, grads=grads, **{"state.trace": state.trace})

        def blend(mean: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
            return decay * mean + (1 - decay) * grad.to(mean.dtype)

        new = each(blend, state.trace, grads)
        return each(blend, new, grads) if nesterov else new, TraceState(new)

    return GradientTransformation(lambda params: TraceState(zeros_like_state(params)), update)


class ScaleByAdamState(NamedTuple):
    """What Adam remembers.

    Attributes:
        step: Number of updates done, a 0-d int64 tensor.
        mu: Running mean of gradients, buffers like the parameters' in float32 (or wider).
        nu: Running mean of squared gradients, likewise.
        nu_max: The largest `nu` so far, with `amsgrad`; `()` without.
    """

    step: torch.Tensor
    mu: PyTree
    nu: PyTree
    nu_max: PyTree = ()


def scale_by_adam(
    b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, *, amsgrad: bool = False
) -> GradientTransformation:
    """Adam's direction: the mean of gradients over the root of the mean of their squares.

    Args:
        b1: Decay of the mean of gradients, in [0, 1).
        b2: Decay of the mean of squared gradients, in [0, 1).
        eps: Added to the denominator, outside of the square root.
        amsgrad: Divide by the largest mean of squares so far.

    Returns:
        The transformation; its state is a `ScaleByAdamState`.

    Source:
        Kingma and Ba, "Adam", https://arxiv.org/abs/1412.6980; for `amsgrad` Reddi et al., "On the Convergence of Adam
        and Beyond", https://arxiv.org/abs/1904.09237, in the form of `torch.optim.AdamW`.
    """
    require_numbers("dbuf.optim.scale_by_adam", below=1.0, b1=b1, b2=b2)
    require_numbers("dbuf.optim.scale_by_adam", eps=eps)

    def init(params: PyTree) -> ScaleByAdamState:
        step = torch.zeros((), dtype=torch.int64, device=device_of(params))
        mu, nu = zeros_like_state(params), zeros_like_state(params)
        return ScaleByAdamState(step, mu, nu, zeros_like_state(params) if amsgrad else ())

    def update(grads: PyTree, state: ScaleByAdamState, params: PyTree) -> tuple[PyTree, ScaleByAdamState]:
        moments = {"state.mu": state.mu, "state.nu": state.nu}
        require_same_specs("dbuf.optim.scale_by_adam", params, grads=grads, **moments)
        step = state.step + 1
        mu = each(lambda m, g: b1 * m + (1 - b1) * g.to(m.dtype), state.mu, grads)
        nu = each(lambda v, g: b2 * v + (1 - b2) * g.to(v.dtype).square(), state.nu, grads)
        nu_max = each(torch.maximum, state.nu_max, nu) if amsgrad else ()
        corrections: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}

        # sqrt and division, not rsqrt or pow: those depend on an element's position in the buffer (vector or
        # scalar code), and the result may not depend on how the buffer is cut.
        def direction(m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if m.dtype not in corrections:
                corrections[m.dtype] = _one_minus_power(b1, step, m.dtype), _one_minus_power(b2, step, m.dtype)
            mu_scale, nu_scale = corrections[m.dtype]
            return m / mu_scale / ((v / nu_scale).sqrt() + eps)

        return each(direction, mu, nu_max if amsgrad else nu), ScaleByAdamState(step, mu, nu, nu_max)

    return GradientTransformation(init, update)


def _one_minus_power(base: float, step: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`1 - base ** step` for a 0-d integer `step`, without cancellation when `base` is near 1."""
    return -torch.expm1(step.to(dtype) * math.log(base)) if base else torch.ones_like(step, dtype=dtype)
