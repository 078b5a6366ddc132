"""Shampoo: each matrix preconditioned from both sides, on the rank that owns it."""

from __future__ import annotations

import math
from typing import Any

import torch

from dbuf.layout import Shape
from dbuf.optim.arguments import require_numbers
from dbuf.optim.base import GradientTransformation, LearningRate, PyTree
from dbuf.optim.by_owner import by_owner
from dbuf.optim.decay import descend
from dbuf.optim.paths import on_matrices
from dbuf.optim.scale import ema

__all__ = ["shampoo"]

_WHERE = "dbuf.optim.shampoo"


def shampoo(
    learning_rate: LearningRate,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
) -> GradientTransformation:
    """Shampoo for matrices, as long as RMSprop's step would be, with momentum and decoupled weight decay.

    With `L`, `R`, `v` the running means of `G Gᵀ`, `Gᵀ G` and `G * G`, corrected for their start:

        direction = (L + eps tr(L))^(-1/4) G (R + eps tr(R))^(-1/4),   scaled to the norm of G / (sqrt(v) + eps)

    Shampoo rather than SOAP: a power of a symmetric matrix changes little when the matrix does, also where gradients
    span fewer directions than there are. SOAP runs Adam in the eigenvectors, which rounding turns at will there, so
    that a compiled step, or one on another processor, would train another model.

    A tensor of more than two dimensions is a stack of matrices. Give norms, biases and embeddings to another
    optimizer with `dbuf.optim.partition`.

    Args:
        learning_rate: A number, a 0-d tensor, or a function of the number of updates done so far (0-d int64).
        b1: Decay of the mean of directions, in [0, 1).
        b2: Decay of the statistics, in [0, 1).
        eps: Ridge, as a part of the trace; and what is added to the root of the mean of squares.
        weight_decay: Fraction of the parameter taken off per unit of learning rate.

    Returns:
        `chain(by_owner(...), ema(...), add_decayed_weights(...), scale_by_learning_rate(...))`. A matrix of m x n
        keeps m² + n² + m n + 1 numbers with its owner.

    Raises:
        DbufError: An argument is out of its range.
        TreeError: In `init`, a tensor is no matrix.
        PlacementError: In `update`, gradients or state are not placed and laid out like the parameters.

    Communication:
        Two all-to-alls a buffer, see `by_owner`.

    Source: Gupta et al., "Shampoo", https://arxiv.org/abs/1802.09568; the norm by Anil et al., "Scalable Second Order
        Optimization for Deep Learning", https://arxiv.org/abs/2002.09018.
    """
    require_numbers(_WHERE, below=1.0, b1=b1, b2=b2)
    require_numbers(_WHERE, eps=eps)

    def init(param: torch.Tensor) -> PyTree:
        *stack, rows, columns = param.shape
        return {
            "step": param.new_zeros(()),
            "left": param.new_zeros(*stack, rows, rows),
            "right": param.new_zeros(*stack, columns, columns),
            "square": torch.zeros_like(param),
        }

    def update(grad: torch.Tensor, state: Any) -> tuple[torch.Tensor, PyTree]:
        new = {
            "step": state["step"] + 1,
            "left": b2 * state["left"] + (1 - b2) * grad @ grad.mT,
            "right": b2 * state["right"] + (1 - b2) * grad.mT @ grad,
            "square": b2 * state["square"] + (1 - b2) * grad.square(),
        }
        correction = 1 - b2 ** new["step"]
        left, right = (_inverse_fourth_root(new[side] / correction, eps) for side in ("left", "right"))
        direction = left @ grad @ right
        length = _norm(grad / ((new["square"] / correction).sqrt() + eps))
        return direction * (length / _norm(direction).clamp(min=1e-30)), new

    direction = by_owner(init, update, cost=_cost)
    inner = descend("shampoo", direction, ema(b1), learning_rate=learning_rate, weight_decay=weight_decay)
    return on_matrices(_WHERE, inner)


def _cost(shape: Shape) -> float:
    """Of the two eigendecompositions, on each matrix of a stack."""
    *stack, rows, columns = shape
    return float(math.prod(stack) * (rows**3 + columns**3))


def _inverse_fourth_root(x: torch.Tensor, eps: float) -> torch.Tensor:
    """`(x + eps * trace(x))^(-1/4)` of symmetric matrices; a zero matrix gives ones on the diagonal."""
    # `eigh` raises on numbers that are not finite; the gradient beside it makes the direction NaN all the same.
    values, vectors = torch.linalg.eigh(x.nan_to_num(0.0, 0.0, 0.0))
    ridge = eps * values.sum(-1, keepdim=True)
    values = torch.where(ridge > 0, values.clamp(min=0.0) + ridge, 1.0)
    root: torch.Tensor = (vectors * values.pow(-0.25).unsqueeze(-2)) @ vectors.mT
    return root


def _norm(x: torch.Tensor) -> torch.Tensor:
    return x.square().sum((-2, -1), keepdim=True).sqrt()
