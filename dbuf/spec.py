"""`BufferSpec`: everything about a buffer but its numbers, as one hashable constant.

While a step is traced, the methods of a spec run for real and their results become constants of the program, so
that no planning is traced, and Dynamo guards a spec by one equality whatever the number of tensors.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch

from dbuf import mesh as meshes
from dbuf.compat import register_constant
from dbuf.errors import PlacementError, explain
from dbuf.layout import GlobalLayout, num_row_dims
from dbuf.mesh import DeviceMesh
from dbuf.placement import (
    Partial,
    Placement,
    Placements,
    Replicate,
    ShardLayout,
    TensorAtomic,
    describe,
    dual_placements,
    is_sharded,
    normalize,
    num_sharded,
    shard_placement,
)
from dbuf.plan.blocks import scale_layout
from dbuf.plan.choice import check_fits, settle_layout
from dbuf.plan.route import Steps, plan_route
from dbuf.plan.selection import merge_steps, select_layout, selection_steps
from dbuf.refusals import refuse_other_reduction, refuse_other_rows
from dbuf.tree import Structure

__all__ = ["BufferSpec"]

Shape = tuple[int, ...]
Wire = tuple[torch.dtype | None, torch.dtype | None]
KEEP: Wire = (None, None)  # the buffer's own dtype, and the default for its gradient


class BufferSpec:
    """Mesh, placements, layout and tree structure of a buffer.

    Args:
        mesh: Where the buffer lives.
        placements: One entry a mesh axis, outermost first; already normalised.
        layout: Where each tensor lies in the flat buffer.
        tree: The user's containers and key paths.
        wire: The dtype in which gathers send the buffer, and that in which they reduce its gradient; see `with_wire`.
    """

    def __init__(
        self, mesh: DeviceMesh, placements: Placements, layout: GlobalLayout, tree: Structure, wire: Wire = KEEP
    ) -> None:
        self.mesh = mesh
        self.placements = placements
        self.layout = layout
        self.tree = tree
        self.wire = wire
        self._hash = hash((mesh, placements, layout, tree, wire))

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, BufferSpec):
            return self is other
        mine = (self._hash, self.placements, self.wire, self.layout, self.mesh, self.tree)
        if mine != (other._hash, other.placements, other.wire, other.layout, other.mesh, other.tree):
            return False
        # Equal parts become one object: a guard that compares them at every call costs nothing a tensor.
        self.layout, self.tree = other.layout, other.tree
        return True

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        axes = ", ".join(f"{n}={s}" for n, s in zip(self.mesh.mesh_dim_names or (), self.mesh.shape, strict=False))
        return (
            f"BufferSpec({describe(self.placements)} on ({axes}), {_count(len(self.tree.paths), 'tensor')}, "
            f"{_count(self.layout.size, 'element')} in {_count(self.layout.dp_size, 'segment')})"
        )

    def __copy__(self) -> BufferSpec:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> BufferSpec:
        return self  # a constant: copies of a buffer share it

    # -- this rank's share -----------------------------------------------------------------------------------

    @cached_property
    def coordinate(self) -> tuple[int, ...]:
        """This rank's place in the mesh."""
        coordinate = self.mesh.get_coordinate()
        if coordinate is None:
            raise PlacementError(
                explain(
                    "dbuf",
                    "this process is not part of the buffer's mesh.",
                    got=f"rank {torch.distributed.get_rank()}, mesh {self.mesh}",
                    need="a mesh that this rank belongs to",
                    fix="leave this process out of the step, or make the mesh over all ranks",
                )
            )
        return tuple(coordinate)

    @cached_property
    def local_range(self) -> tuple[int, int]:
        """`(start, numel)` of this rank's contiguous part of the flat buffer."""
        return self.layout.local_range(self.placements, meshes.shape_of(self.mesh), self.coordinate)

    def local_numel(self) -> int:
        """Elements in this rank's tensor."""
        return self.local_range[1]

    @cached_property
    def _local(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Shape, ...]]:
        start, numel = self.local_range
        sizes: list[int] = []
        part_of: list[int] = [-1] * len(self.layout.tensor_shapes)
        whole = num_sharded(self.placements) == 0  # then a tensor without elements is here too
        # A whole tensor is shown as it is, however finely its layout might be cut.
        keeps = whole or isinstance(shard_placement(self.placements), TensorAtomic)
        dims = [1 if keeps else num_row_dims(shape, self.layout.row_dims) for shape in self.layout.tensor_shapes]
        shapes = [shape if whole else (0, *shape[n:]) for shape, n in zip(self.layout.tensor_shapes, dims, strict=True)]
        cursor = 0
        for tensor, _, piece, place in self.layout.pieces(start, numel):
            if place > cursor:
                sizes.append(place - cursor)
            part_of[tensor] = len(sizes)
            shapes[tensor] = _rows_of(self.layout.tensor_shapes[tensor], dims[tensor], piece)
            sizes.append(piece)
            cursor = place + piece
        if cursor < numel:
            sizes.append(numel - cursor)
        return tuple(sizes), tuple(part_of), tuple(shapes)

    def split_sizes(self) -> tuple[int, ...]:
        """Sizes that cut the local tensor into one part a tensor, with gaps and padding as parts of their own."""
        return self._local[0]

    def part_of_tensor(self) -> tuple[int, ...]:
        """For each tensor its part in `split_sizes`, -1 where this rank owns nothing of it."""
        return self._local[1]

    def local_shapes(self) -> tuple[Shape, ...]:
        """For each tensor the shape of what this rank holds: `(rows, *shape[row_dims:])` where axes are sharded."""
        return self._local[2]

    def local_pieces(self) -> tuple[tuple[int, int, int, int], ...]:
        """`(tensor, start_in_tensor, numel, start_in_local)` of what this rank holds."""
        return self.layout.pieces(*self.local_range)

    def content_runs(self) -> tuple[tuple[int, int], ...]:
        """`(start, numel)` of the runs of the local tensor that hold content, neighbours joined."""
        runs: list[tuple[int, int]] = []
        for _, _, numel, place in self.local_pieces():
            if runs and sum(runs[-1]) == place:
                runs[-1] = (runs[-1][0], runs[-1][1] + numel)
            else:
                runs.append((place, numel))
        return tuple(runs)

    # -- the tree --------------------------------------------------------------------------------------------

    def treespec(self) -> Any:
        """Torch's spec of the containers."""
        return self.tree.spec

    def present(self) -> tuple[bool, ...]:
        """For each leaf of the containers whether it holds a tensor."""
        return self.tree.present

    def tree_paths(self) -> tuple[str, ...]:
        """The key path of each tensor."""
        return self.tree.paths

    def global_shapes(self) -> tuple[Shape, ...]:
        """The global shape of each tensor."""
        return self.layout.tensor_shapes

    def selected(self, mask: tuple[bool, ...]) -> BufferSpec:
        """The spec of the tensors that `mask` keeps, each rank keeping what it holds of them."""
        layout, tree = select_layout(self.layout, mask), self.tree.keep(mask)
        return BufferSpec(self.mesh, self.placements, layout, tree, self.wire)

    def has_selection(self, part: BufferSpec) -> bool:
        """Whether `part` is what `selected` gives for some mask."""
        kept = set(part.tree.paths)
        return part == self.selected(tuple(path in kept for path in self.tree.paths))

    def steps_to_selection(self, part: BufferSpec) -> Steps:
        """Steps from this rank's tensor to its part of a selection."""
        return selection_steps(self._places_of(part), self.local_numel())

    def steps_from_selection(self, part: BufferSpec) -> Steps:
        """Steps from this rank's tensor followed by its part of a selection to the merged tensor."""
        return merge_steps(self._places_of(part), self.local_numel())

    def _places_of(self, part: BufferSpec) -> list[tuple[int, int]]:
        kept = set(part.tree.paths)
        paths = self.tree.paths
        return [(place, numel) for tensor, _, numel, place in self.local_pieces() if paths[tensor] in kept]

    # -- groups ----------------------------------------------------------------------------------------------

    def mesh_shape(self) -> tuple[int, ...]:
        """Ranks along each axis."""
        return meshes.shape_of(self.mesh)

    def num_ranks(self) -> int:
        """Ranks in the mesh."""
        return math.prod(self.mesh_shape())

    def sum_over_shards(self) -> Steps:
        """Steps that sum a tensor over the sharded axes, each replica for itself."""
        first = len(self.placements) - num_sharded(self.placements)
        return meshes.sum_over(self.mesh, tuple(range(first, len(self.placements))))

    def has_partial(self) -> bool:
        """Whether the numbers are contributions to a reduction rather than values."""
        return any(isinstance(p, Partial) for p in self.placements)

    # -- other specs -----------------------------------------------------------------------------------------

    def with_placements(self, placements: Placement | Placements, where: str) -> BufferSpec:
        """The same buffer at other placements of the same layout.

        Raises:
            PlacementError: Not placements of this mesh, or a partial axis would change its reduction.
            LayoutError: The layout cannot be cut that way.
        """
        return self.with_layout(placements, self.layout, where)

    def with_layout(
        self, placements: Placement | Placements, layout: GlobalLayout | ShardLayout, where: str
    ) -> BufferSpec:
        """The same tensors at other placements in another layout, given or to be planned; see `with_placements`."""
        target = normalize(placements, self.mesh.ndim, where)
        layout = self._settle(target, layout, where)
        check_fits(layout, target, meshes.shape_of(self.mesh), where)
        for axis, (old, new) in enumerate(zip(self.placements, target, strict=True)):
            if isinstance(old, Partial) and isinstance(new, Partial) and old != new:
                refuse_other_reduction(self, axis, target, where)
        return BufferSpec(self.mesh, target, layout, self.tree, self.wire)

    def _settle(self, target: Placements, layout: GlobalLayout | ShardLayout, where: str) -> GlobalLayout:
        mine = self.layout
        return settle_layout(mine.tensor_shapes, target, layout, mine.dp_size, mine.align, mine.row_dims, where)

    def dual(self) -> BufferSpec:
        """The spec of this buffer's gradient, which knows nothing of the wire."""
        return BufferSpec(self.mesh, dual_placements(self.placements), self.layout, self.tree)

    def with_wire(self, dtype: torch.dtype | None, grad_dtype: torch.dtype | None) -> BufferSpec:
        """The same buffer for gathers in other dtypes; those that a gather names itself go before these."""
        return BufferSpec(self.mesh, self.placements, self.layout, self.tree, (dtype, grad_dtype))

    def of_scales(self, block: int) -> BufferSpec:
        """The spec of one number for each block of `block` elements of each row, held by who holds the block."""
        return BufferSpec(self.mesh, self.placements, scale_layout(self.layout, block), self.tree)

    def gathered_placements(self) -> Placements:
        """These placements with every sharded axis replicated."""
        return tuple(Replicate() if is_sharded(p) else p for p in self.placements)

    def reduced_placements(self) -> Placements:
        """These placements with every partial axis replicated."""
        return tuple(Replicate() if isinstance(p, Partial) else p for p in self.placements)

    def route(self, target: BufferSpec, function: str, where: str) -> Steps:
        """The steps from here to `target`, for this rank.

        Args:
            target: A spec made by `with_placements` or `with_layout`.
            function: The public function that asks; it may take only rows of its own name, `redistribute` any.
            where: For the message.

        Raises:
            PlacementError: The way holds a row of another name.
        """
        # What `plan_route` caches knows no mesh: one made in a new world equals the old one and has other groups.
        ends = (self.placements, self.layout, target.placements, target.layout)
        hops = plan_route(*ends, meshes.shape_of(self.mesh), self.coordinate)
        rows = {hop.row.function for hop in hops}
        pairs = zip(self.placements, target.placements, strict=True)
        if any(is_sharded(old) and is_sharded(new) and old != new for old, new in pairs):
            rows.add("redistribute")  # another kind of shard, even where it moves nothing
        if function != "redistribute" and rows - {function}:
            refuse_other_rows(self, target, function, where, sorted(rows - {function}))
        return tuple(_bind(step, self.mesh) for hop in hops for step in hop.steps)


def _bind(step: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
    """Put the name of the group where the plan has an axis, or a number of axes."""
    if step[0] in ("all_gather", "reduce_scatter", "all_reduce"):
        return (*step[:-1], meshes.axis_group(mesh, step[-1]))
    if step[0] == "all_to_all":
        return (*step[:-1], meshes.suffix_group(mesh, step[-1]))
    return step


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _rows_of(shape: Shape, dims: int, numel: int) -> Shape:
    if not shape:
        return ()
    return (numel // math.prod(shape[dims:]), *shape[dims:])


register_constant(
    BufferSpec,
    (
        "mesh",
        "placements",
        "layout",
        "tree",
        "local_numel",
        "split_sizes",
        "part_of_tensor",
        "local_shapes",
        "local_pieces",
        "content_runs",
        "treespec",
        "present",
        "tree_paths",
        "global_shapes",
        "selected",
        "has_selection",
        "steps_to_selection",
        "steps_from_selection",
        "mesh_shape",
        "num_ranks",
        "sum_over_shards",
        "has_partial",
        "with_placements",
        "with_layout",
        "dual",
        "wire",
        "with_wire",
        "of_scales",
        "gathered_placements",
        "reduced_placements",
        "route",
        "__eq__",
        "__hash__",
    ),
)
