"""Lion: the sign of a blend of momentum and gradient."""

from __future__ import annotations

import torch

from dbuf.optim.arguments import require_numbers
from dbuf.optim.base import GradientTransformation, LearningRate, PyTree, each, require_same_specs
from dbuf.optim.decay import descend
from dbuf.optim.paths import Rule
from dbuf.optim.scale import TraceState, zeros_like_state

__all__ = ["lion", "scale_by_lion"]


def lion(
    learning_rate: LearningRate,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 0.0,
    *,
    mask: Rule | None = None,
) -> GradientTransformation:
    """Lion with decoupled weight decay: half of Adam's state, and updates of one size.

        update = -lr * (sign(b1 * m + (1 - b1) * grad) + weight_decay * param),   m = b2 * m + (1 - b2) * grad

    Args:
        learning_rate: A number, a 0-d tensor, or a function of the number of updates done so far (0-d int64); the
            paper takes 3 to 10 times less than for AdamW, and as many times more weight decay.
        b1: Weight of the mean in the direction, in [0, 1).
        b2: Decay of the mean, in [0, 1).
        weight_decay: Fraction of the parameter taken off per unit of learning rate.
        mask: `mask(path, shape)` says which tensors decay; by default all do.

    Returns:
        `chain(scale_by_lion(...), add_decayed_weights(...), scale_by_learning_rate(...))`.

    Raises:
        PlacementError: In `update`, gradients or state are not placed and laid out like the parameters.

    Communication:
        None.

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", https://arxiv.org/abs/2302.06675.

    Example:
        >>> lion(1e-4).init({})[0]
        TraceState(trace={})
    """
    direction = scale_by_lion(b1, b2)
    return descend("lion", direction, learning_rate=learning_rate, weight_decay=weight_decay, mask=mask)


def scale_by_lion(b1: float = 0.9, b2: float = 0.99) -> GradientTransformation:
    """Lion's direction; its state is a `TraceState`."""
    require_numbers("dbuf.optim.scale_by_lion", below=1.0, b1=b1, b2=b2)

    def update(grads: PyTree, state: TraceState, params: PyTree) -> tuple[PyTree, TraceState]:
        require_same_specs("dbuf.optim.scale_by_lion", params, grads=grads, **{"state.trace": state.trace})
        direction = each(lambda m, g: torch.sign(b1 * m + (1 - b1) * g.to(m.dtype)), state.trace, grads)
        new = each(lambda m, g: b2 * m + (1 - b2) * g.to(m.dtype), state.trace, grads)
        return direction, TraceState(new)

    return GradientTransformation(lambda params: TraceState(zeros_like_state(params)), update)
