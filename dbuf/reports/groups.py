"""The layout that a group gets, by the name of its kind."""

from __future__ import annotations

from collections.abc import Sequence

from dbuf.layout import GlobalLayout, Shape, check_shapes
from dbuf.placement import BlockAtomic, Placements, ShardLayout, TensorAtomic, shard_placement
from dbuf.plan import plan_compact, plan_owners, plan_row_atomic, plan_tensor_atomic
from dbuf.plan.rows import row_units

__all__ = ["plan_group"]

_WHERE = "dbuf layout"


def plan_group(
    shapes: Sequence[Shape],
    dp_size: int,
    placements: Placements,
    *,
    shard_layout: ShardLayout | str = ShardLayout.PADDED,
    align: int = 1,
    row_dims: int = 1,
    names: Sequence[str] = (),
) -> GlobalLayout:
    """The layout of a group: as `shard` plans it, or `"compact"`; owners balance what they hold.

    Args:
        shapes: Global shape of each tensor.
        dp_size: Number of segments.
        placements: Their shard says what is kept whole.
        shard_layout: A `ShardLayout`, or `"compact"`.
        align: See `plan_row_atomic`.
        row_dims: See `plan_row_atomic`.
        names: What to call the tensors in messages.

    Raises:
        LayoutError: A block does not divide a tensor's rows.

    Example:
        >>> from dbuf import RowAtomic
        >>> plan_group([(5, 6), (7, 4)], 2, (RowAtomic(),), shard_layout="compact").size
        60
    """
    kind = shard_placement(placements)
    if isinstance(kind, TensorAtomic):
        owners = plan_owners(shapes, dp_size).owners
        return plan_tensor_atomic(shapes, dp_size, tensor_owners=owners, align=align)
    block_size = kind.block_size if isinstance(kind, BlockAtomic) else 1
    if names:
        row_units(check_shapes(shapes, _WHERE), block_size, row_dims, _WHERE, names)
    if shard_layout == "compact":
        return plan_compact(shapes, dp_size, block_size=block_size, align=align, row_dims=row_dims).layout
    how = ShardLayout(shard_layout)
    return plan_row_atomic(shapes, dp_size, block_size=block_size, shard_layout=how, align=align, row_dims=row_dims)
