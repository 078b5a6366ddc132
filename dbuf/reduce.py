"""Reductions over content: never over gaps or padding, replicas counted once, each buffer over its own mesh."""

from __future__ import annotations

from typing import Any

import torch

from dbuf import tree as trees
from dbuf.buffer import DBuffer, require_buffers
from dbuf.collectives import move
from dbuf.errors import PlacementError, explain
from dbuf.mesh import DeviceMesh, MeshSum
from dbuf.plan.route import Steps
from dbuf.refusals import refuse_partial

__all__ = ["all_finite", "global_norm", "norms", "pmean", "psum", "vdot"]


def global_norm(bufs: Any, mesh: DeviceMesh | None = None) -> torch.Tensor:
    """The 2-norm of everything in a tree of buffers.

    Args:
        bufs: A pytree of DBuffers, replicated or sharded, on any meshes.
        mesh: The mesh that those of the buffers are slices of, such as `mesh["inner"]`. Along the axes that a
            slice lacks its tensors are different ones, experts for instance, and all of them count. By default
            each buffer counts over its own mesh alone.

    Returns:
        A 0-d fp32 tensor (fp64 for fp64 buffers), equal on all ranks of the buffers' mesh, or of `mesh`.

    Raises:
        PlacementError: A buffer is partial: the norm of contributions is not the norm of their sum.

    Communication:
        One all-reduce of one element for each sharded axis of each kind of buffer. Replicas are counted once.

    Gradient:
        That of `sqrt(sum(x * x))`, each rank for its own part.
    """
    return torch.sqrt(_sum_over_content(bufs, bufs, "dbuf.global_norm", mesh))


def vdot(a: Any, b: Any) -> torch.Tensor:
    """The inner product of two trees of buffers with equal specs.

    Args:
        a: A pytree of DBuffers, replicated or sharded.
        b: Another with the same structure and specs.

    Returns:
        A 0-d fp32 tensor (fp64 for fp64 buffers), equal on all ranks.

    Raises:
        PlacementError: A buffer is partial.
        TreeError: The trees or specs differ.

    Communication:
        As `global_norm`.

    Gradient:
        That of `sum(a * b)`, each rank for its own part.
    """
    return _sum_over_content(a, b, "dbuf.vdot")


def norms(buf: DBuffer) -> Any:
    """The 2-norm of each tensor of a buffer.

    Args:
        buf: Replicated or sharded.

    Returns:
        The buffer's tree of 0-d fp32 tensors (fp64 for fp64), equal on all ranks; 0 for an empty tensor.

    Raises:
        PlacementError: The buffer is partial.

    Communication:
        One all-reduce of one element a tensor for each sharded axis.
    """
    spec = buf.spec
    refuse_partial(spec, "dbuf.norms")
    sizes = spec.split_sizes()
    parts = buf.local.split_with_sizes(sizes) if len(sizes) > 1 else (buf.local,)
    zero = _square_sum(buf.local[:0], buf.local[:0])  # depends on the buffer on ranks that own nothing, too
    squares = [_square_sum(parts[part], parts[part]) if part >= 0 else zero for part in spec.part_of_tensor()]
    if not squares:
        return trees.fill([], spec.treespec(), spec.present())
    total = move(torch.stack(squares), spec.sum_over_shards())
    return trees.fill(list(torch.sqrt(total).unbind(0)), spec.treespec(), spec.present())


def all_finite(bufs: Any) -> torch.Tensor:
    """Whether everything in a tree of buffers is finite, decided alike on all ranks.

    Args:
        bufs: A pytree of DBuffers; partial ones are judged by their contributions.

    Returns:
        A 0-d bool tensor.

    Communication:
        One all-reduce of one element for each axis of each mesh.
    """
    counts: dict[DeviceMesh, Any] = {}
    for buf in require_buffers(bufs, "dbuf.all_finite"):
        bad = buf.local.new_zeros((), dtype=torch.float32)
        for start, numel in buf.spec.content_runs():
            bad = bad + (~torch.isfinite(buf.local[start : start + numel])).sum()
        counts[buf.mesh] = counts[buf.mesh] + bad if buf.mesh in counts else bad
    total = None
    for mesh, bad in counts.items():
        here = psum(bad, mesh)
        total = here if total is None else total + here
    return total == 0 if total is not None else torch.tensor(True)


def psum(x: torch.Tensor, mesh: DeviceMesh, axes: Any = None) -> torch.Tensor:
    """Sum a plain tensor over mesh axes.

    Args:
        x: Any shape; each rank's own.
        mesh: From `init_mesh`.
        axes: Names or indices of axes; by default all.

    Returns:
        A new tensor of the same shape, equal along the axes.

    Communication:
        One all-reduce for each axis of more than one rank.

    Gradient:
        The sum over the same axes.
    """
    return _sum(x, MeshSum(mesh, axes, "dbuf.psum").steps())


def pmean(x: torch.Tensor, mesh: DeviceMesh, axes: Any = None) -> torch.Tensor:
    """Average a plain tensor over mesh axes; see `psum`.

    Example:
        >>> import dbuf
        >>> pmean(torch.tensor(3.0), dbuf.init_mesh())
        tensor(3.)
    """
    over = MeshSum(mesh, axes, "dbuf.pmean")
    return _sum(x * (1.0 / over.num_ranks()), over.steps())


def _sum(x: torch.Tensor, steps: Steps) -> torch.Tensor:
    # gloo wants a dimension, and the collectives here move 1-D tensors.
    return move(x.reshape(-1), steps).reshape(x.shape)


def _sum_over_content(a: Any, b: Any, where: str, mesh: DeviceMesh | None = None) -> torch.Tensor:
    """Products summed on each rank first, then one small all-reduce for each set of sharded axes."""
    lefts, rights = require_buffers(a, where), require_buffers(b, where)
    _require_equal_specs(lefts, rights, where)
    sums: dict[Steps, torch.Tensor] = {}
    for left, right in zip(lefts, rights, strict=True):
        refuse_partial(left.spec, where)
        total = _square_sum(left.local[:0], right.local[:0])  # depends on both on ranks that own nothing, too
        for start, numel in left.spec.content_runs():
            total = total + _square_sum(left.local[start : start + numel], right.local[start : start + numel])
        steps = left.spec.sum_over_shards() + _steps_over_other_axes(left, mesh, where)
        sums[steps] = sums[steps] + total if steps in sums else total
    totals = [_sum(total, steps) for steps, total in sums.items()]
    out = totals[0] if totals else torch.zeros(())
    for total in totals[1:]:
        out = out + total
    return out


def _steps_over_other_axes(buf: DBuffer, mesh: DeviceMesh | None, where: str) -> Steps:
    if mesh is None or buf.spec.mesh == mesh:
        return ()
    own = buf.spec.mesh.mesh_dim_names or ()
    return MeshSum(mesh, tuple([name for name in mesh.mesh_dim_names or () if name not in own]), where).steps()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _square_sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    wide = _wide(a.dtype)
    return (a.to(wide) * b.to(wide)).sum()


def _require_equal_specs(lefts: list[DBuffer], rights: list[DBuffer], where: str) -> None:
    if len(lefts) == len(rights) and all([a.spec == b.spec for a, b in zip(lefts, rights, strict=True)]):
        return
    raise PlacementError(
        explain(
            where,
            "the two trees are laid out differently.",
            got=f"{[a.spec for a in lefts]}\n{[b.spec for b in rights]}",
            need="equal specs, buffer by buffer",
            fix="dbuf.redistribute(b, placements, layout=a.layout) first",
        )
    )
