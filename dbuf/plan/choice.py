"""Which layout a buffer gets, and whether it fits the placements asked for."""

from __future__ import annotations

from dbuf.errors import LayoutError, explain
from dbuf.layout import GlobalLayout, Shape
from dbuf.placement import BlockAtomic, Placements, ShardLayout, TensorAtomic, describe, shard_placement
from dbuf.plan.rows import plan_row_atomic

__all__ = ["check_fits", "settle_layout"]


def settle_layout(
    shapes: tuple[tuple[int, ...], ...],
    placements: Placements,
    layout: ShardLayout | GlobalLayout | tuple[object, ...],
    dp_size: int,
    align: int,
    row_dims: int,
    where: str,
) -> GlobalLayout:
    """The layout asked for: a planner's, checked against the shapes, or a new one for the kind of shard.

    Raises:
        LayoutError: A planned layout is for other shapes, a plan stands in the place of its layout, or
            `TensorAtomic` came without one.
    """
    kind = shard_placement(placements)
    if isinstance(layout, GlobalLayout):
        if layout.tensor_shapes != shapes:
            raise LayoutError(
                explain(
                    where,
                    "the layout was planned for other tensors.",
                    got=f"shapes {layout.tensor_shapes}",
                    need=f"shapes {shapes}",
                    fix="plan the layout from these shapes: buf.layout.tensor_shapes of a buffer",
                )
            )
        return layout
    if isinstance(layout, tuple):
        raise LayoutError(
            explain(
                where,
                "a plan is more than its layout.",
                got=f"layout={type(layout).__name__}(...)",
                need="a GlobalLayout or a ShardLayout",
                fix="layout=plan.layout",
            )
        )
    if isinstance(kind, TensorAtomic):
        raise LayoutError(
            explain(
                where,
                "TensorAtomic does not say who owns which tensor.",
                got=f"placements {describe(placements)} with layout={layout!r}",
                need="a layout with an owner for each tensor",
                fix="layout=dbuf.plan_tensor_atomic(shapes, dp_size, tensor_owners=...)",
            )
        )
    block_size = kind.block_size if isinstance(kind, BlockAtomic) else 1
    return plan_row_atomic(
        shapes, dp_size, block_size=block_size, shard_layout=ShardLayout(layout), align=align, row_dims=row_dims
    )


def check_fits(layout: GlobalLayout, placements: Placements, mesh_shape: Shape, where: str) -> None:
    """Refuse placements that this layout cannot be cut by.

    Raises:
        LayoutError: The cut is finer than planned, or splits what the placement keeps whole.
    """
    layout.local_range(placements, mesh_shape, (0,) * len(mesh_shape))
    kind = shard_placement(placements)
    if kind is None:
        return
    violation = layout.first_violation(kind)
    if violation is not None:
        raise LayoutError(
            explain(
                where,
                f"the layout does not fit {kind!r}.",
                got=violation,
                need=f"a layout whose cuts respect {kind!r}",
                fix="layout=dbuf.plan_tensor_atomic(shapes, dp_size, tensor_owners=...)"
                if isinstance(kind, TensorAtomic)
                else "layout=ShardLayout.PADDED, or a GlobalLayout from a planner, to move to one that fits",
            )
        )
