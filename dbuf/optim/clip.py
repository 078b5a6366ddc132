"""Clipping of gradients by their norm over all buffers and ranks."""

from __future__ import annotations

from dbuf.mesh import DeviceMesh
from dbuf.optim.base import GradientTransformation, PyTree, each, require_same_specs
from dbuf.reduce import global_norm

__all__ = ["clip_by_global_norm"]


def clip_by_global_norm(max_norm: float, mesh: DeviceMesh | None = None) -> GradientTransformation:
    """Scale all gradients down together, where their 2-norm is above `max_norm`.

    Args:
        max_norm: The largest norm that passes.
        mesh: The mesh that those of the buffers are slices of; see `dbuf.global_norm`.

    Returns:
        The transformation, without state. Its result depends on the world size within the rounding of one sum.

    Communication:
        That of `dbuf.global_norm`.

    Source:
        Pascanu et al., "On the difficulty of training recurrent neural networks", https://arxiv.org/abs/1211.5063, with
        the 1e-6 of `torch.nn.utils.clip_grad_norm_`.
    """

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        require_same_specs("dbuf.optim.clip_by_global_norm", params, grads=grads)
        factor = (max_norm / (global_norm(grads, mesh) + 1e-6)).clamp(max=1.0)
        return each(lambda g: (g * factor).to(g.dtype), grads), state

    return GradientTransformation(lambda params: (), update)
