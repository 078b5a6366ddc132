"""Clipping of gradients by their norm over all buffers and ranks."""

from __future__ import annotations

from dbuf.buffer import buffers
from dbuf.mesh import DeviceMesh
from dbuf.optim.arguments import require_numbers
from dbuf.optim.base import GradientTransformation, PyTree, each, require_same_specs
from dbuf.reduce import global_norm
from dbuf.transforms import require_one_mesh, widest_mesh

_WHERE = "dbuf.optim.clip_by_global_norm"

__all__ = ["clip_by_global_norm"]


def clip_by_global_norm(max_norm: float, mesh: DeviceMesh | None = None) -> GradientTransformation:
    """Scale all gradients down together, where their 2-norm is above `max_norm`.

    Args:
        max_norm: The largest norm that passes.
        mesh: The mesh that those of the buffers are slices of; see `dbuf.global_norm`. By default the largest mesh
            among the buffers, as in `make_train_step`, so that all ranks clip alike.

    Returns:
        The transformation, without state. Its result depends on the world size within the rounding of one sum.

    Raises:
        DbufError: `max_norm` is no number of at least 0.
        PlacementError: In `init`, the buffers live on meshes of which none holds the others.

    Communication:
        That of `dbuf.global_norm`.

    Source:
        Pascanu et al., "On the difficulty of training recurrent neural networks", https://arxiv.org/abs/1211.5063, with
        the 1e-6 of `torch.nn.utils.clip_grad_norm_`.
    """
    require_numbers(_WHERE, max_norm=max_norm)

    def init(params: PyTree) -> PyTree:
        if mesh is None and buffers(params):
            require_one_mesh(_WHERE, buffers(params), "clip_by_global_norm(max_norm, mesh)")
        return ()

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        require_same_specs(_WHERE, params, grads=grads)
        bufs = buffers(grads)
        over = widest_mesh(bufs) if mesh is None and bufs else mesh
        factor = (max_norm / (global_norm(grads, over) + 1e-6)).clamp(max=1.0)
        return each(lambda g: (g * factor).to(g.dtype), grads), state

    return GradientTransformation(init, update)
