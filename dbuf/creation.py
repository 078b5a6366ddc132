"""From full tensors to a `DBuffer`."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from dbuf import mesh as meshes
from dbuf import tree as trees
from dbuf.buffer import DBuffer, check_leaves, is_buffer
from dbuf.collectives import move
from dbuf.compat import register_constant
from dbuf.errors import PlacementError, TreeError, explain
from dbuf.layout import GlobalLayout
from dbuf.mesh import DeviceMesh
from dbuf.placement import (
    Placement,
    Placements,
    Replicate,
    ShardLayout,
    normalize,
)
from dbuf.plan.choice import check_fits, settle_layout
from dbuf.plan.route import WAIT
from dbuf.spec import BufferSpec

__all__ = ["shard"]

_WHERE = "dbuf.shard"


def shard(
    tensors: Any,
    mesh: DeviceMesh,
    placements: Placement | Placements,
    *,
    layout: ShardLayout | GlobalLayout = ShardLayout.PADDED,
    dp_size: int | None = None,
    align: int = 1,
    broadcast_from: int | None = None,
) -> DBuffer:
    """Put a tree of full tensors into one buffer, of which every rank keeps its own part.

        full tree on each rank           rank 0: [a a b b]
        {a: (3, 2), b: (2,)}      =>     rank 1: [a a . .]      (. = padding)

    Args:
        tensors: A pytree of full tensors of one dtype; `None` holds none. Any strides. Meta tensors give a meta
            buffer, for planning.
        mesh: From `init_mesh`.
        placements: One entry a mesh axis, outermost first; one alone will do on a 1-D mesh. A `Partial` axis
            takes the tensors as this rank's contributions.
        layout: How to cut the group, or a layout that a planner made.
        dp_size: Segments to plan for; by default one a rank of the mesh. An HSDP group that is never sharded
            over the outer axis plans for the inner one alone, and pays padding for that.
        align: Round equal segments, and what uneven ones put on the wire, up to this many elements; NCCL wants
            16 bytes.
        broadcast_from: A rank of the mesh, in row-major order, whose values all ranks take.

    Returns:
        A buffer whose local tensor owns memory of its own size only. Gaps and padding are zero.

    Raises:
        TreeError: A leaf is no plain tensor, dtypes or devices differ, or static metadata holds a tensor.
        PlacementError: Not placements of this mesh.
        LayoutError: The layout does not fit the tensors or the placements.

    Communication:
        None; with `broadcast_from`, one broadcast of the whole flat buffer over the mesh, outside any trace.

    Gradient:
        Zeros outside this rank's part. With `broadcast_from` none: the values are taken, not differentiated.

    Example:
        >>> import dbuf
        >>> buf = shard({"w": torch.ones(3, 2), "b": torch.zeros(2)}, dbuf.init_mesh(), dbuf.RowAtomic())
        >>> buf.local
        tensor([1., 1., 1., 1., 1., 1., 0., 0.])
    """
    leaves, treespec = trees.flatten(tensors)
    present = tuple([leaf is not None for leaf in leaves])
    leaves = [leaf for leaf in leaves if leaf is not None]
    if not torch.compiler.is_compiling():
        _check_mesh(mesh, broadcast_from)
        _refuse_buffers(tensors)
        structure, _ = trees.Structure.of(tensors, _WHERE)
        check_leaves(leaves, structure.paths, _WHERE)
    all_shapes = tuple([tuple(leaf.shape) for leaf in leaves])
    request = _Request(mesh, placements, all_shapes, layout, dp_size, align, treespec, present)
    spec = request.spec()
    if broadcast_from is None:
        return DBuffer(_cut(leaves, spec), spec)
    return DBuffer(_broadcast(leaves, spec, broadcast_from), spec)


def _check_mesh(mesh: DeviceMesh, broadcast_from: int | None) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise PlacementError(
            explain(_WHERE, "no mesh.", got=repr(mesh), need="a mesh of ranks", fix="dbuf.init_mesh(('dp',))")
        )
    if broadcast_from is not None and broadcast_from not in range(mesh.size()):
        raise PlacementError(
            explain(
                _WHERE,
                "broadcast_from is no rank of the mesh.",
                got=f"broadcast_from={broadcast_from!r} on {mesh.size()} ranks",
                need=f"a number from 0 to {mesh.size() - 1}",
                fix="broadcast_from=0",
            )
        )


def _refuse_buffers(tensors: Any) -> None:
    """A buffer is a node with a tensor in it, which would be taken for a full one."""
    named = trees.flatten_with_paths(tensors, is_leaf=is_buffer)[0]
    if bad := [f"tensors{path}: {leaf!r}" for path, leaf in named if is_buffer(leaf)]:
        raise TreeError(
            explain(
                _WHERE,
                "a buffer is sharded already.",
                got="\n".join(bad),
                need="full tensors",
                fix="dbuf.redistribute(buf, placements), or dbuf.unpack(dbuf.allgather(buf)) for its tensors",
            )
        )


@dataclasses.dataclass(frozen=True)
class _Request:
    """The arguments of `shard` but its tensors, so that a traced `shard` plans for real."""

    mesh: DeviceMesh
    placements: Placement | Placements
    shapes: tuple[tuple[int, ...], ...]
    layout: ShardLayout | GlobalLayout
    dp_size: int | None
    align: int
    treespec: Any
    present: tuple[bool, ...]

    def __hash__(self) -> int:
        return hash((self.mesh, self.shapes))

    def spec(self) -> BufferSpec:
        placements = normalize(self.placements, self.mesh.ndim, _WHERE)
        dp_size = self.mesh.size() if self.dp_size is None else self.dp_size
        layout = settle_layout(self.shapes, placements, self.layout, dp_size, self.align, 1, _WHERE)
        check_fits(layout, placements, meshes.shape_of(self.mesh), _WHERE)
        tree = trees.fill(list(range(len(self.shapes))), self.treespec, self.present)
        return BufferSpec(self.mesh, placements, layout, trees.Structure.of(tree, _WHERE)[0])


register_constant(_Request, ("spec", "__eq__", "__hash__"))


def _cut(leaves: list[torch.Tensor], spec: BufferSpec) -> torch.Tensor:
    """This rank's flat part: each leaf is cut to the local range first, then only those cuts are concatenated.

    Concatenating whole leaves would need the full buffer; a view of one would keep the full storage alive.
    """
    parts: list[torch.Tensor] = []
    cursor = 0
    like = leaves[0] if leaves else torch.empty(0)
    for tensor, start, numel, place in spec.local_pieces():
        if place > cursor:
            parts.append(like.new_zeros(place - cursor))
        parts.append(_run_of(leaves[tensor], start, numel))
        cursor = place + numel
    if cursor < spec.local_numel() or not parts:
        parts.append(like.new_zeros(spec.local_numel() - cursor))
    # Empty, but a rank that owns nothing must take part in the backward's collectives like the others.
    owned = {tensor for tensor, *_ in spec.local_pieces()}
    parts += [_run_of(leaf, 0, 0) for i, leaf in enumerate(leaves) if leaf.requires_grad and i not in owned]
    # Inductor turns a concatenation of one slice into the slice itself, a view of the full tensor.
    return torch.cat(parts) if len(parts) > 1 else torch.cat([*parts, like.new_zeros(0)])


def _run_of(leaf: torch.Tensor, start: int, numel: int) -> torch.Tensor:
    """Elements `start` to `start + numel` of a tensor in row-major order, without copying the whole of it."""
    if leaf.ndim > 1 and leaf.numel():
        row = leaf[0].numel()
        first, stop = start // row, -(-(start + numel) // row)
        flat = leaf[first:stop].reshape(-1)
        return flat if flat.numel() == numel else flat[start - first * row :][:numel]
    return leaf.reshape(-1)[start : start + numel]


def _broadcast(leaves: list[torch.Tensor], spec: BufferSpec, source: int) -> torch.Tensor:
    """This rank's part of the source's tensors: the whole flat buffer is sent, then cut."""
    whole = BufferSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, spec.layout, spec.tree)
    flat = _cut(leaves, whole).detach()
    if spec.num_ranks() > 1:
        group = meshes.suffix_group(spec.mesh, spec.mesh.ndim)
        flat = move(flat, (("broadcast", source, group), WAIT))
    start, numel = spec.local_range
    return flat[start : start + numel].clone()
