"""The cheapest of the layouts that a group can have, by bytes held, sent and copied."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from dbuf.errors import LayoutError, explain, require_positive
from dbuf.layout import GlobalLayout, Shape, check_shapes
from dbuf.placement import BlockAtomic, RowAtomic, ShardLayout, ShardPlacement, TensorAtomic
from dbuf.plan.compact import CompactPlan, plan_compact
from dbuf.plan.owners import plan_owners
from dbuf.plan.rows import plan_row_atomic, row_units
from dbuf.plan.tensors import plan_tensor_atomic
from dbuf.tree import flatten_with_paths

__all__ = ["CostModel", "LayoutChoice", "LayoutOption", "plan_layout"]

_WHERE = "plan_layout"


class CostModel(NamedTuple):
    """What a byte costs: held for good, received in a gather, and copied after it.

    The defaults are those of training that gathers weights of 2 bytes and holds 16 bytes of main weights, gradients and
    optimizer state an element, on ranks whose memory copies 40 times as fast as they receive. Only ratios matter.

    Attributes:
        resident: Of a byte that the fullest rank holds.
        wire: Of a byte that a rank receives when the group is gathered.
        copy_out: Of a byte that a rank copies around a gather, where segments are uneven.
        resident_itemsize: Bytes that are held for an element.
        wire_itemsize: Bytes in which an element is sent and copied.
    """

    resident: float = 1.0
    wire: float = 1.0
    copy_out: float = 0.025
    resident_itemsize: int = 16
    wire_itemsize: int = 2


class LayoutOption(NamedTuple):
    """A layout, and what it costs.

    Attributes:
        name: `"padded"`, `"compact"`, `"unpadded"` or `"tensor_atomic"`.
        placement: What its sharded axes carry.
        layout: The layout.
        resident_nbytes: Held by the fullest rank.
        wire_nbytes: Received by a rank when the group is gathered.
        copy_out_nbytes: Copied by a rank around a gather; 0 where segments are equal.
        cost: The sum, each with its weight.
    """

    name: str
    placement: ShardPlacement
    layout: GlobalLayout
    resident_nbytes: int
    wire_nbytes: int
    copy_out_nbytes: int
    cost: float

    @property
    def max_segment(self) -> int:
        """Elements of the longest segment."""
        return _longest(self.layout)

    @property
    def overhead(self) -> float:
        """What the fullest rank holds by an even share of the content, less 1: 0.01 is 1 %."""
        content = sum(self.layout.tensor_numels)
        return self.max_segment * self.layout.dp_size / content - 1 if content else 0.0

    def __str__(self) -> str:
        return (
            f"{self.name:<13} {self.overhead:>10.2%} {self.resident_nbytes:>16,} {self.wire_nbytes:>16,} "
            f"{self.copy_out_nbytes:>16,} {self.cost:>12.4g}"
        )


class LayoutChoice(NamedTuple):
    """The cheapest layout, and all that there are.

    Attributes:
        best: The cheapest; of equal ones the first.
        options: PADDED, compact, UNPADDED and TensorAtomic.
        compact: What is known of the shortest equal segments possible.
    """

    best: LayoutOption
    options: tuple[LayoutOption, ...]
    compact: CompactPlan

    @property
    def layout(self) -> GlobalLayout:
        """The cheapest layout, for `dbuf.shard(layout=)`."""
        return self.best.layout

    @property
    def placement(self) -> ShardPlacement:
        """What sharded axes carry in the cheapest layout."""
        return self.best.placement

    def __str__(self) -> str:
        heads = ("above even", "resident bytes", "bytes received", "bytes copied", "cost")
        head = f"  {'':<13} {heads[0]:>10} {heads[1]:>16} {heads[2]:>16} {heads[3]:>16} {heads[4]:>12}"
        lines = [f"{'*' if option is self.best else ' '} {option}" for option in self.options]
        return "\n".join([head, *lines, f"  compact: {self.compact}"])


def plan_layout(
    tree: Any,
    dp_size: int,
    *,
    block_size: int = 1,
    align: int = 1,
    row_dims: int = 1,
    cost: CostModel = CostModel(),  # noqa: B008  (a constant)
) -> LayoutChoice:
    """Plan a group every way there is, and choose the cheapest.

    Equal segments cost padding; uneven ones a copy after each gather, and the fullest rank's share on the wire. Owners
    of whole tensors are chosen so that they hold about equally much.

    Args:
        tree: A list of global shapes, or any pytree of them or of tensors (meta ones will do); None holds none.
        dp_size: Number of segments.
        block_size: Rows in a block; 1 for `RowAtomic`.
        align: Elements; see `plan_row_atomic`.
        row_dims: How many leading dimensions number the rows; see `plan_row_atomic`.
        cost: What a byte held, received and copied costs.

    Returns:
        The choice and all options; printed, a table of them.

    Raises:
        LayoutError: A leaf has no shape, a shape or number is malformed, or `block_size` does not divide a tensor's
            rows; the message names the tensor by its path.

    Example:
        >>> choice = plan_layout({"w": (5, 6), "b": (7, 4)}, 2)
        >>> choice.best.name, choice.layout.size, choice.placement
        ('compact', 60, RowAtomic())
    """
    require_positive(dp_size, "dp_size", _WHERE, LayoutError)
    require_positive(align, "align", _WHERE, LayoutError)
    shapes, names = _shapes_of(tree)
    row_units(shapes, block_size, row_dims, _WHERE, names)
    rows: ShardPlacement = RowAtomic() if block_size == 1 else BlockAtomic(block_size)
    compact = plan_compact(shapes, dp_size, block_size=block_size, align=align, row_dims=row_dims)
    owners = plan_owners(shapes, dp_size).owners
    padded, unpadded = (
        plan_row_atomic(shapes, dp_size, block_size=block_size, shard_layout=how, align=align, row_dims=row_dims)
        for how in ShardLayout
    )
    options = (
        _price("padded", rows, padded, cost),
        _price("compact", rows, compact.layout, cost),
        _price("unpadded", rows, unpadded, cost),
        _price(
            "tensor_atomic",
            TensorAtomic(),
            plan_tensor_atomic(shapes, dp_size, tensor_owners=owners, align=align),
            cost,
        ),
    )
    return LayoutChoice(min(options, key=lambda option: option.cost), options, compact)


def _price(name: str, placement: ShardPlacement, layout: GlobalLayout, cost: CostModel) -> LayoutOption:
    longest, n = _longest(layout), layout.dp_size
    # What `plan_route` sends: uneven segments are padded to the longest, and cut to size in one copy of the whole.
    wire = longest if layout.is_even else -(-longest // layout.align) * layout.align
    copied = 0 if layout.is_even or n == 1 else wire + layout.size
    resident_nbytes = longest * cost.resident_itemsize
    wire_nbytes, copy_out_nbytes = (n - 1) * wire * cost.wire_itemsize, copied * cost.wire_itemsize
    total = cost.resident * resident_nbytes + cost.wire * wire_nbytes + cost.copy_out * copy_out_nbytes
    return LayoutOption(name, placement, layout, resident_nbytes, wire_nbytes, copy_out_nbytes, total)


def _longest(layout: GlobalLayout) -> int:
    return max(stop - start for start, stop in pairwise((*layout.rank_to_offset, layout.size)))


def _shapes_of(tree: Any) -> tuple[tuple[Shape, ...], list[str]]:
    """The shapes in a tree of shapes or tensors, and what to call them in messages."""
    named = [(path, leaf) for path, leaf in flatten_with_paths(tree, is_leaf=_is_shape)[0] if leaf is not None]
    bad = [f"{path or 'the tree'}: {type(leaf).__name__}" for path, leaf in named if not _has_shape(leaf)]
    if bad:
        raise LayoutError(
            explain(
                _WHERE,
                "not every leaf has a shape.",
                got="\n".join(bad),
                need="tuples of ints, or tensors",
                fix="plan_layout(dbuf.shapes(buf), dp_size), or a list of tuple(tensor.shape)",
            )
        )
    shapes = [tuple(leaf) if _is_shape(leaf) else tuple(leaf.shape) for _, leaf in named]
    return check_shapes(shapes, _WHERE), [path for path, _ in named]


def _is_shape(node: object) -> bool:
    """A tuple of numbers, empty for a scalar, or a list of some."""
    return (
        isinstance(node, tuple | list)
        and (bool(node) or isinstance(node, tuple))
        and not any(isinstance(entry, Sequence) or hasattr(entry, "shape") or entry is None for entry in node)
    )


def _has_shape(leaf: object) -> bool:
    return _is_shape(leaf) or hasattr(leaf, "shape")
