"""Decoupled weight decay, on all elements or on those of some tensors."""

from __future__ import annotations

import torch

from dbuf import tree
from dbuf.buffer import DBuffer, buffers, is_buffer
from dbuf.errors import PlacementError, explain
from dbuf.optim.arguments import require_callable, require_numbers
from dbuf.optim.base import GradientTransformation, LearningRate, PyTree, chain, named, require_same_specs
from dbuf.optim.paths import Rule, decide
from dbuf.optim.scale import scale_by_learning_rate

__all__ = ["add_decayed_weights", "descend"]

_WHERE = "dbuf.optim.add_decayed_weights"


def add_decayed_weights(weight_decay: float, mask: Rule | None = None) -> GradientTransformation:
    """Add a fraction of the parameters to the updates.

    Args:
        weight_decay: The fraction, per unit of learning rate.
        mask: `mask(path, shape)` says which tensors decay, such as `dbuf.optim.is_matrix`; by default all do.

    Returns:
        The transformation. Its state is one buffer of bools for each buffer of which only some tensors decay, one byte
        an element, and None for the others: one operation a buffer, whatever the number of tensors.

    Raises:
        DbufError: `weight_decay` is no number of at least 0, or `mask` no function.
        PlacementError: In `update`, gradients or state are not placed and laid out like the parameters.

    Source:
        Loshchilov and Hutter, "Decoupled Weight Decay Regularization", https://arxiv.org/abs/1711.05101.
    """
    require_numbers(_WHERE, weight_decay=weight_decay)
    require_callable(_WHERE, "mask", mask, "lambda path, shape: len(shape) >= 2")

    def init(params: PyTree) -> PyTree:
        if mask is None or not weight_decay:
            return ()
        masks = iter([_mask(buf, keep) for buf, keep in decide(mask, params)])
        return tree.map(lambda p: next(masks) if is_buffer(p) else p, params, is_leaf=is_buffer)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        require_same_specs(_WHERE, params, grads=grads)
        if not weight_decay:
            return grads, state
        keeps = [[True]] * len(buffers(params)) if mask is None else [keep for _, keep in decide(mask, params)]
        flags = [None] * len(keeps) if mask is None else _flags(params, state, keeps)
        rest = zip(buffers(params), flags, keeps, strict=True)

        def decay(grad: DBuffer | None) -> DBuffer | None:
            if grad is None:
                return None
            param, flag, keep = next(rest)
            if not any(keep):
                return grad
            decayed = grad.local + weight_decay * param.local.to(grad.local.dtype)
            return DBuffer(decayed if flag is None else torch.where(flag.local, decayed, grad.local), grad.spec)

        return tree.map(decay, grads, is_leaf=is_buffer), state

    return GradientTransformation(init, update)


def descend(
    name: str,
    *directions: GradientTransformation,
    learning_rate: LearningRate,
    weight_decay: float,
    mask: Rule | None = None,
) -> GradientTransformation:
    """The end that optimizers share: a direction, decoupled weight decay, a step down, under the user's name."""
    return named(
        name, chain(*directions, add_decayed_weights(weight_decay, mask), scale_by_learning_rate(learning_rate))
    )


def _mask(buf: DBuffer, keep: list[bool]) -> DBuffer | None:
    """True where an element belongs to a tensor that decays; None where all do, or none."""
    if all(keep) or not any(keep):
        return None
    local = torch.zeros_like(buf.local, dtype=torch.bool)
    for tensor, _, numel, place in buf.spec.local_pieces():
        if keep[tensor]:
            local[place : place + numel] = True
    return DBuffer(local, buf.spec)


def _flags(params: PyTree, state: PyTree, keeps: list[list[bool]]) -> list[DBuffer | None]:
    """The mask of each buffer, made for these parameters and this rule."""
    places, entries = tree.leaves(params, is_leaf=is_buffer), tree.leaves(state, is_leaf=is_buffer)
    flags = [flag for place, flag in zip(places, entries, strict=False) if place is not None]
    specs = [
        param.spec if any(keep) and not all(keep) else None for param, keep in zip(buffers(params), keeps, strict=True)
    ]
    if len(places) != len(entries) or [None if flag is None else flag.spec for flag in flags] != specs:
        raise PlacementError(
            explain(
                _WHERE,
                "the mask in the state is not that of these parameters.",
                got="a mask of other buffers, of another layout, or of a rule that takes other tensors",
                need="the state that init gave for parameters placed and laid out like these",
                fix="init(params) again; the mask depends on nothing else",
            )
        )
    return flags
