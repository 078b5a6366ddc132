"""Muon: momentum, made orthogonal matrix by matrix by Newton-Schulz on the rank that owns it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch

from dbuf.errors import DbufError, TreeError, explain, require_positive
from dbuf.layout import Shape
from dbuf.optim.arguments import require_known, require_numbers
from dbuf.optim.base import GradientTransformation, LearningRate, PyTree
from dbuf.optim.by_owner import by_owner
from dbuf.optim.decay import descend
from dbuf.optim.paths import on_matrices
from dbuf.optim.scale import ema
from dbuf.plan.owners import newton_schulz_flops

__all__ = ["COEFFICIENTS", "muon", "orthogonalize"]

_WHERE = "dbuf.optim.muon"

Triple = tuple[float, float, float]

_POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)

COEFFICIENTS: dict[str, tuple[Triple, ...]] = {
    "jordan": ((3.4445, -4.7750, 2.0315),),
    "polar_express": (*[(a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in _POLAR_EXPRESS], (1.875, -1.25, 0.375)),
    "cubic": ((1.5, -0.5, 0.0),),
}
"""`(a, b, c)` of the steps `X <- a X + (b X Xᵀ + c (X Xᵀ)²) X`, the last of a set for all further steps.

* `"jordan"`: singular values end between about 0.7 and 1.2 after 5 steps. Four decimals, as in Jordan et al., "Muon",
  https://kellerjordan.github.io/posts/muon/, and in `torch.optim.Muon`.
* `"polar_express"`: for singular values of at least 1e-3, each step the best for what the one before leaves. Double
  precision, divided by powers of 1.01 for rounding in bf16, as in Amsel et al., "The Polar Express",
  https://arxiv.org/abs/2505.16932.
* `"cubic"`: the classical iteration, exact and slow; Björck and Bowie, 1971.
"""

_SCALES: dict[str, Callable[[int, int], float]] = {
    "spectral": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "none": lambda rows, columns: 1.0,
}


def muon(
    learning_rate: LearningRate,
    momentum: float = 0.95,
    weight_decay: float = 0.1,
    *,
    nesterov: bool = True,
    steps: int = 5,
    coefficients: str = "jordan",
    scale: str = "spectral",
    heads: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    eps: float = 1e-7,
) -> GradientTransformation:
    """Momentum orthogonalised by Newton-Schulz, with decoupled weight decay; for matrices.

    A tensor of more than two dimensions is a stack of matrices, such as experts: its last two dimensions are rows and
    columns. With `heads` a matrix is a stack of that many of equal height, one below the other, as heads are in a
    projection to queries, keys or values: give those a `muon` of their own in `dbuf.optim.partition`.

    Momentum is sharded like the parameters, and only directions travel. Give norms, biases and embeddings to another
    optimizer with `dbuf.optim.partition`.

    Args:
        learning_rate: A number, a 0-d tensor, or a function of the number of updates done so far (0-d int64).
        momentum: Decay of the running mean of gradients, in [0, 1).
        weight_decay: Fraction of the parameter taken off per unit of learning rate.
        nesterov: Blend the gradient into the mean once more.
        steps: Newton-Schulz steps.
        coefficients: A set of `COEFFICIENTS`.
        scale: `"spectral"`, `sqrt(max(1, rows / columns))`, as Jordan has it; `"match_rms_adamw"`,
            `0.2 * sqrt(max(rows, columns))`, with which AdamW's learning rate and decay fit (Liu et al., "Muon is
            Scalable for LLM Training", https://arxiv.org/abs/2502.16982); or `"none"`. Of a head if there are some.
        heads: Matrices that the rows of each are cut into, each made orthogonal by itself.
        dtype: What Newton-Schulz computes in.
        eps: The least norm that a matrix is divided by.

    Returns:
        `chain(ema(...), by_owner(...), add_decayed_weights(...), scale_by_learning_rate(...))`.

    Raises:
        DbufError: An argument is out of its range.
        TreeError: In `init`, a tensor is no matrix, or its rows are no multiple of `heads`.
        PlacementError: In `update`, gradients or state are not placed and laid out like the parameters.

    Communication:
        Two all-to-alls a buffer, see `by_owner`.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; the rule of
        `torch.optim.Muon`.
    """
    require_known(_WHERE, "coefficients", coefficients, COEFFICIENTS)
    require_known(_WHERE, "scale", scale, _SCALES)
    require_positive(heads, "heads", _WHERE, DbufError)
    require_positive(steps, "steps", _WHERE, DbufError)
    require_numbers(_WHERE, below=1.0, momentum=momentum)
    require_numbers(_WHERE, eps=eps)
    factor = _SCALES[scale]

    def init(param: torch.Tensor) -> PyTree:
        _require_heads(tuple(param.shape), heads)
        return ()

    def update(grad: torch.Tensor, state: PyTree) -> tuple[torch.Tensor, PyTree]:
        rows, columns = grad.shape[-2] // heads, grad.shape[-1]
        matrices = grad.view(*grad.shape[:-2], heads, rows, columns)
        direction = factor(rows, columns) * orthogonalize(matrices, steps, coefficients, dtype=dtype, eps=eps)
        return direction.flatten(-3, -2), state

    direction = by_owner(init, update, cost=_cost(heads))
    inner = descend("muon", ema(momentum, nesterov), direction, learning_rate=learning_rate, weight_decay=weight_decay)
    return on_matrices(_WHERE, inner)


def orthogonalize(
    x: torch.Tensor,
    steps: int = 5,
    coefficients: str = "jordan",
    *,
    dtype: torch.dtype = torch.bfloat16,
    eps: float = 1e-7,
) -> torch.Tensor:
    """About `U Vᵀ` of the singular value decomposition `U S Vᵀ`, by Newton-Schulz.

    Args:
        x: `(..., rows, columns)`, each matrix by itself.
        steps: Newton-Schulz steps.
        coefficients: A set of `COEFFICIENTS`.
        dtype: What the steps compute in; the norm that comes first is in the dtype of `x`.
        eps: The least norm that a matrix is divided by: a zero matrix stays zero.

    Returns:
        The shape and dtype of `x`.

    Raises:
        DbufError: No such coefficients, `steps` is no positive int, or `x` is no matrix.

    Example:
        >>> orthogonalize(3 * torch.eye(2), 20, "cubic", dtype=torch.float32).round(decimals=4)
        tensor([[1., 0.],
                [0., 1.]])
    """
    require_known("dbuf.optim.orthogonalize", "coefficients", coefficients, COEFFICIENTS)
    require_positive(steps, "steps", "dbuf.optim.orthogonalize", DbufError)
    if x.ndim < 2:
        raise DbufError(
            explain(
                "dbuf.optim.orthogonalize",
                "not a matrix.",
                got=f"a tensor of shape {tuple(x.shape)}",
                need="a shape (..., rows, columns)",
                fix="x.unsqueeze(0), or another optimizer for vectors",
            )
        )
    triples = COEFFICIENTS[coefficients]
    wide = x if x.shape[-2] <= x.shape[-1] else x.mT
    wide = (wide / wide.square().sum((-2, -1), keepdim=True).sqrt().clamp(min=eps)).to(dtype)
    for i in range(steps):
        a, b, c = triples[min(i, len(triples) - 1)]
        gram = wide @ wide.mT
        wide = a * wide + (b * gram + c * (gram @ gram)) @ wide
    return (wide if x.shape[-2] <= x.shape[-1] else wide.mT).to(x.dtype)


@lru_cache
def _cost(heads: int) -> Callable[[Shape], float]:
    """One function for one number of heads, so that plans of equal optimizers are made once."""
    return lambda shape: newton_schulz_flops((*shape[:-2], heads, shape[-2] // heads, shape[-1]))


def _require_heads(shape: Shape, heads: int) -> None:
    if shape[-2] % heads:
        raise TreeError(
            explain(
                _WHERE,
                f"{heads} heads do not divide the rows of a matrix.",
                got=f"a tensor of shape {shape}",
                need=f"shape[-2] a multiple of {heads}",
                fix="a muon without heads for this tensor, with dbuf.optim.partition",
            )
        )
