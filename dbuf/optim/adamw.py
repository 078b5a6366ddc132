"""AdamW on flat buffers: a few element-wise operations a group, whatever the number of its tensors."""

from __future__ import annotations

from dbuf.optim.base import GradientTransformation, LearningRate
from dbuf.optim.decay import descend
from dbuf.optim.paths import Rule
from dbuf.optim.quantized import quantized
from dbuf.optim.scale import scale_by_adam

__all__ = ["adamw", "adamw8bit"]


def adamw(
    learning_rate: LearningRate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    *,
    mask: Rule | None = None,
    amsgrad: bool = False,
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
        mask: `mask(path, shape)` says which tensors decay, such as `dbuf.optim.is_matrix`; by default all do.
        amsgrad: Divide by the largest `v` so far.

    Returns:
        `chain(scale_by_adam(...), add_decayed_weights(...), scale_by_learning_rate(...))`.

    Raises:
        DbufError: A number out of range, or a mask that is no function.
        PlacementError: In `update`, gradients or state are not placed and laid out like the parameters.

    Communication:
        None.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", https://arxiv.org/abs/1711.05101.

    Example:
        >>> adamw(1e-3).init({})[0]
        ScaleByAdamState(step=tensor(0), mu={}, nu={}, nu_max=())
    """
    direction = scale_by_adam(b1, b2, eps, amsgrad=amsgrad)
    return descend("adamw", direction, learning_rate=learning_rate, weight_decay=weight_decay, mask=mask)


def adamw8bit(
    learning_rate: LearningRate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    *,
    mask: Rule | None = None,
    block: int = 256,
) -> GradientTransformation:
    """AdamW whose moments are 8 bits wide: about a quarter of the bytes; see `adamw` and `quantized`."""
    direction = quantized(scale_by_adam(b1, b2, eps), block=block)
    return descend("adamw8bit", direction, learning_rate=learning_rate, weight_decay=weight_decay, mask=mask)
