"""Stochastic gradient descent, with or without momentum: unlike Adam, it shows a wrongly scaled gradient."""

from __future__ import annotations

from dbuf.errors import DbufError, explain
from dbuf.optim.arguments import require_numbers
from dbuf.optim.base import GradientTransformation, LearningRate, chain, named, to_state_dtype
from dbuf.optim.scale import scale_by_learning_rate, trace

__all__ = ["sgd"]

_WHERE = "dbuf.optim.sgd"


def sgd(learning_rate: LearningRate, momentum: float = 0.0, *, nesterov: bool = False) -> GradientTransformation:
    """Gradient descent: `update = -lr * trace`, where `trace = grad + momentum * trace`.

    The same rule as `torch.optim.SGD`, without dampening.

    Args:
        learning_rate: A number, a 0-d tensor, or a function of the number of updates done so far (0-d int64).
        momentum: Decay of the sum of gradients, in [0, 1). At 0 no sum is kept.
        nesterov: Step along `grad + momentum * trace`.

    Returns:
        `chain(trace(...), scale_by_learning_rate(...))`, or the latter alone.

    Raises:
        DbufError: `nesterov` without momentum, or a number out of range.
        PlacementError: In `update`, gradients or state are not placed and laid out like the parameters.

    Communication:
        None.

    Source: Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013.

    Example:
        >>> sgd(0.1, momentum=0.9).init({})[0]
        TraceState(trace={})
    """
    require_numbers(_WHERE, below=1.0, momentum=momentum)
    if nesterov and not momentum:
        raise DbufError(
            explain(
                _WHERE, "nesterov without momentum.", got="momentum=0.0", need="momentum above 0", fix="momentum=0.9"
            )
        )
    first = trace(momentum, nesterov) if momentum else to_state_dtype(_WHERE)
    return named("sgd", chain(first, scale_by_learning_rate(learning_rate)))
