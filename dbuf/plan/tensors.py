"""Plan a layout in which every tensor lies whole in the segment of its owner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from dbuf.errors import LayoutError, explain, require_positive
from dbuf.layout import GlobalLayout, check_shapes
from dbuf.placement import ShardLayout

__all__ = ["plan_tensor_atomic"]

_WHERE = "plan_tensor_atomic"


def plan_tensor_atomic(
    shapes: Sequence[Sequence[int]],
    dp_size: int,
    *,
    tensor_owners: Sequence[int],
    shard_layout: ShardLayout = ShardLayout.UNPADDED,
    align: int = 1,
) -> GlobalLayout:
    """Lay tensors out by owner, in tensor order within an owner and without gaps.

    Args:
        shapes: Global shape of each tensor. One with a zero dimension occupies nothing; its offset is where
            its owner's next tensor starts.
        dp_size: Number of segments, one an owner; a segment may be empty.
        tensor_owners: Segment index of each tensor's owner. An owner is a segment, not a rank: which rank
            holds segment `k` follows from the mesh (`GlobalLayout.local_range`).
        shard_layout: UNPADDED for segments as long as their content, PADDED for segments as long as the
            longest.
        align: Elements; PADDED rounds segments up to a multiple of it, uneven ones are rounded only on the
            wire.

    Returns:
        A layout that admits `TensorAtomic()`.

    Raises:
        LayoutError: A shape or number is malformed, or owners and shapes do not pair up.

    Example:
        >>> layout = plan_tensor_atomic([(4, 4), (3,), (2, 6)], 3, tensor_owners=[1, 1, 0])
        >>> layout.tensor_to_offset, layout.size, layout.rank_to_offset
        ((12, 28, 0), 31, (0, 12, 31))
    """
    require_positive(dp_size, "dp_size", _WHERE, LayoutError)
    require_positive(align, "align", _WHERE, LayoutError)
    checked = check_shapes(shapes, _WHERE)
    _check_owners(tensor_owners, len(checked), dp_size)
    within, loads = [], [0] * dp_size
    for shape, owner in zip(checked, tensor_owners, strict=True):
        within.append(loads[owner])
        loads[owner] += math.prod(shape)
    if ShardLayout(shard_layout) is ShardLayout.PADDED:
        loads = [-(-max(loads) // align) * align] * dp_size
    *cuts, size = accumulate(loads, initial=0)
    offsets = tuple(cuts[owner] + start for owner, start in zip(tensor_owners, within, strict=True))
    return GlobalLayout(checked, offsets, size, tuple(cuts), align)


def _check_owners(owners: Sequence[int], tensors: int, dp_size: int) -> None:
    if len(owners) != tensors:
        raise LayoutError(
            explain(
                _WHERE,
                "owners and shapes do not pair up.",
                got=f"{len(owners)} owners for {tensors} tensors",
                need="one owner a tensor, in the same order",
                fix="tensor_owners=[k % dp_size for k in range(len(shapes))]",
            )
        )
    bad = [(k, owner) for k, owner in enumerate(owners) if type(owner) is not int or not 0 <= owner < dp_size]
    if bad:
        raise LayoutError(
            explain(
                _WHERE,
                f"{len(bad)} of {tensors} owners are not segments.",
                got="\n".join(f"tensor {tensor}: owner {owner!r}" for tensor, owner in bad),
                need=f"segment indices, ints from 0 to {dp_size - 1}",
                fix="a larger dp_size, or owners taken modulo dp_size",
            )
        )
