"""Decoupled weight decay, on all elements or on those of some tensors."""

from __future__ import annotations

import torch

from dbuf import tree
from dbuf.buffer import DBuffer, buffers, is_buffer
from dbuf.optim.base import GradientTransformation, PyTree, require_same_specs
from dbuf.optim.paths import Rule, decide

__all__ = ["add_decayed_weights"]


def add_decayed_weights(weight_decay: float, mask: Rule | None = None) -> GradientTransformation:
    """Add a fraction of the parameters to the updates.

    Args:
        weight_decay: The fraction, per unit of learning rate.
        mask: `mask(path, shape)` says which tensors decay, such as `dbuf.optim.is_matrix`; by default all do.

    Returns:
        The transformation. Its state is one buffer of bools for each buffer of which only some tensors decay, one byte
        an element, and None for the others: one operation a buffer, whatever the number of tensors.

    Source:
        Loshchilov and Hutter, "Decoupled Weight Decay Regularization", https://arxiv.org/abs/1711.05101.
    """

    def init(params: PyTree) -> PyTree:
        if mask is None or not weight_decay:
            return ()
        masks = iter([_mask(buf, keep) for buf, keep in decide(mask, params)])
        return tree.map(lambda p: next(masks) if is_buffer(p) else p, params, is_leaf=is_buffer)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        require_same_specs("dbuf.optim.add_decayed_weights", params, grads=grads)
        if not weight_decay:
            return grads, state
        keeps = [[True]] * len(buffers(params)) if mask is None else [keep for _, keep in decide(mask, params)]
        flags = [None] * len(keeps) if mask is None else _entries(state)
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


def _mask(buf: DBuffer, keep: list[bool]) -> DBuffer | None:
    """True where an element belongs to a tensor that decays; None where all do, or none."""
    if all(keep) or not any(keep):
        return None
    local = torch.zeros_like(buf.local, dtype=torch.bool)
    for tensor, _, numel, place in buf.spec.local_pieces():
        if keep[tensor]:
            local[place : place + numel] = True
    return DBuffer(local, buf.spec)


def _entries(state: PyTree) -> list[DBuffer | None]:
    return tree.leaves(state, is_leaf=lambda node: node is None or is_buffer(node))
