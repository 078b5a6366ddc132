"""Where every tensor of a group lies in its flat buffer, and where the buffer is cut: integers only.

A `GlobalLayout` reads no rank, group or device, so any rank's range can be computed anywhere. `pieces` is
the one primitive behind unpacking, masks, norms, all-to-all splits, checkpoints and reports.

    size          0                                            48
    tensors       [ 5 x 4 = 20 elements   |3 |. | 2 x 6 = 12 ].....       (. = padding)
    segments      [       segment 0          |     segment 1      ]
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Any, NoReturn, TypeAlias

from dbuf.compat import register_constant
from dbuf.errors import LayoutError, explain, require_positive
from dbuf.placement import (
    BlockAtomic,
    Placement,
    Placements,
    RowAtomic,
    TensorAtomic,
    describe,
    num_sharded,
)

__all__ = ["GlobalLayout", "Piece", "Shape", "check_shapes", "num_row_dims"]

Shape: TypeAlias = tuple[int, ...]
Piece: TypeAlias = tuple[int, int, int, int]
"""`(tensor, start_in_tensor, numel, start_in_range)`."""


@dataclass(frozen=True, eq=False)
class GlobalLayout:
    """Offsets of a group's tensors in one flat buffer, and the cuts between its segments, in elements.

    Construction checks nothing, so that it costs nothing; call `validate` on a layout built by hand. A tensor
    with a zero dimension occupies nothing: its offset means nothing and no piece of it ever appears.

    Args:
        tensor_shapes: Global shape of each tensor, in tree order.
        tensor_to_offset: Offset of each tensor, in the same order.
        size: Number of elements of the whole buffer, padding included.
        rank_to_offset: Start of each segment; segment `k` runs to the next entry, the last one to `size`.
        align: What equal segments were rounded to, and what uneven ones are rounded to on the wire, in elements.
        row_dims: How many leading dimensions number the rows of a tensor; see `num_row_dims`. With 2, a stack of
            matrices `(experts, out, in)` may be cut between any two of its `experts * out` rows.

    Example:
        >>> layout = GlobalLayout(((5, 4), (3,)), (0, 20), 24, (0, 12)).validate()
        >>> layout.segment(1), layout.pieces(12, 12)
        ((12, 12), ((0, 12, 8, 0), (1, 0, 3, 8)))
    """

    tensor_shapes: tuple[Shape, ...]
    tensor_to_offset: tuple[int, ...]
    size: int
    rank_to_offset: tuple[int, ...]
    align: int = 1
    row_dims: int = 1

    def __repr__(self) -> str:
        named = zip((field.name for field in fields(self)), self._key, strict=False)
        return f"GlobalLayout({', '.join(f'{name}={value!r}' for name, value in named)})"

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is not GlobalLayout:
            return NotImplemented
        return hash(self) == hash(other) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # By fields: what is cached below is not sent to other processes or kept in checkpoints.
        return GlobalLayout, self._key

    @property
    def dp_size(self) -> int:
        """Number of segments."""
        return len(self.rank_to_offset)

    @cached_property
    def tensor_numels(self) -> tuple[int, ...]:
        """Number of elements of each tensor."""
        return tuple(map(math.prod, self.tensor_shapes))

    @cached_property
    def is_even(self) -> bool:
        """Whether all segments are equally long, so that no collective needs padding or split sizes."""
        return len({stop - start for start, stop in pairwise((*self.rank_to_offset, self.size))}) <= 1

    def row_size(self, tensor: int) -> int:
        """Number of elements in one row of a tensor: the product of `shape[row_dims:]`; 1 for a scalar.

        Example:
            >>> GlobalLayout(((5, 4), ()), (0, 20), 21, (0,)).row_size(0)
            4
        """
        shape = self.tensor_shapes[tensor]
        return math.prod(shape[num_row_dims(shape, self.row_dims) :])

    def segment(self, k: int) -> tuple[int, int]:
        """Return `(start, numel)` of segment `k`.

        Args:
            k: Segment index, from 0 to `dp_size - 1`.

        Raises:
            LayoutError: There is no such segment.

        Example:
            >>> GlobalLayout(((4,),), (0,), 4, (0, 3)).segment(1)
            (3, 1)
        """
        if not 0 <= k < self.dp_size:
            _refuse(
                "GlobalLayout.segment",
                f"there is no segment {k}.",
                got=f"k={k} of {self.dp_size} segments",
                need=f"0 <= k < {self.dp_size}",
                fix="layout.local_range(placements, mesh_shape, coordinate) for a rank's part",
            )
        return self._span(k, k + 1)

    def local_range(
        self, placements: Placements, mesh_shape: Sequence[int], coordinate: Sequence[int]
    ) -> tuple[int, int]:
        """Return `(start, numel)` of what the rank at `coordinate` holds under normalized `placements`.

        The buffer is cut from the innermost mesh axis outwards: the innermost sharded axis is the most
        significant digit of the segment index. On a mesh (outer M, inner N), both sharded,
        `segment = inner * M + outer`. With fewer sharded axes a rank holds `dp_size / prod(sharded sizes)`
        consecutive segments, so that what it holds under `(Replicate(), RowAtomic())` contains what it holds
        under `(RowAtomic(), RowAtomic())`.

        Args:
            placements: One placement a mesh axis, as `dbuf.placement.normalize` returns them.
            mesh_shape: Sizes of the mesh axes, outermost first.
            coordinate: The rank's index on each axis.

        Returns:
            Start and number of elements in the buffer; `(0, size)` where no axis is sharded.

        Raises:
            LayoutError: The product of the sharded axes' sizes does not divide `dp_size`.

        Example:
            >>> layout = GlobalLayout(((8,),), (0,), 8, (0, 2, 4, 6))
            >>> layout.local_range((RowAtomic(), RowAtomic()), (2, 2), (1, 0))
            (2, 2)
        """
        first = len(placements) - num_sharded(placements)
        parts, index = 1, 0
        for axis in range(first, len(placements)):  # outer to inner: a digit weighs all sizes outside of it
            index += coordinate[axis] * parts
            parts *= mesh_shape[axis]
        if self.dp_size % parts:
            self._refuse_too_fine(placements, mesh_shape, parts)
        held = self.dp_size // parts
        return self._span(index * held, (index + 1) * held)

    def pieces(self, start: int, numel: int) -> tuple[Piece, ...]:
        """Return the parts of tensors that lie in a range of the buffer, in buffer order.

        Args:
            start: Start of the range.
            numel: Length of the range.

        Returns:
            One `(tensor, start_in_tensor, numel, start_in_range)` a tensor that the range meets. Padding and
            tensors without elements never appear.

        Raises:
            LayoutError: The range leaves the buffer.

        Example:
            >>> GlobalLayout(((2, 3), (4,)), (0, 8), 12, (0,)).pieces(4, 6)
            ((0, 4, 2, 0), (1, 0, 2, 4))
        """
        stop = start + numel
        if not 0 <= start <= stop <= self.size:
            _refuse(
                "GlobalLayout.pieces",
                "the range leaves the buffer.",
                got=f"[{start}, {stop})",
                need=f"a range within [0, {self.size})",
                fix="layout.pieces(*layout.segment(k))",
            )
        order, offsets = self._order
        first = max(bisect_right(offsets, start) - 1, 0)
        found = []
        for position in range(first, bisect_left(offsets, stop)):
            tensor, offset = order[position], offsets[position]
            begin, end = max(offset, start), min(offset + self.tensor_numels[tensor], stop)
            if begin < end:  # false for the first only, where the range starts in the padding behind it
                found.append((tensor, begin - offset, end - begin, begin - start))
        return tuple(found)

    def admits(self, placement: Placement) -> bool:
        """Say whether no cut of this layout breaks what `placement` keeps whole.

        Judged from offsets and cuts alone, not from who planned the layout. `Replicate` and `Partial` cut
        nothing.

        Example:
            >>> layout = GlobalLayout(((4, 2),), (0,), 8, (0, 2))
            >>> layout.admits(RowAtomic()), layout.admits(BlockAtomic(2))
            (True, False)
        """
        return self.first_violation(placement) is None

    def first_violation(self, placement: Placement) -> str | None:
        """Name the first cut that breaks what `placement` keeps whole, and its tensor; None if no cut does.

        Example:
            >>> print(GlobalLayout(((4, 2),), (0,), 8, (0, 3)).first_violation(RowAtomic()))
            the cut at 3 splits tensor 0 of shape (4, 2) after 3 elements; RowAtomic() cuts at multiples of 2
        """
        if placement not in self._violations:
            self._violations[placement] = self._find_violation(placement)
        return self._violations[placement]

    def validate(self) -> GlobalLayout:
        """Check a layout built by hand, and return it.

        Raises:
            LayoutError: A field is not made of ints, tensors overlap or leave the buffer, or cuts are out of order.

        Example:
            >>> GlobalLayout(((2, 2),), (0,), 4, (0, 2)).validate().dp_size
            2
        """
        self._check_types()
        check_shapes(self.tensor_shapes, "GlobalLayout")
        require_positive(self.align, "align", "GlobalLayout", LayoutError)
        require_positive(self.row_dims, "row_dims", "GlobalLayout", LayoutError)
        self._check_tensors()
        self._check_cuts()
        return self

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        """An expression for generated code, and the names that it needs (torch's protocol)."""
        return repr(self), {"GlobalLayout": GlobalLayout}

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        # A layout that cuts dim 0 alone is what it was before there were others.
        return tuple(getattr(self, field.name) for field in fields(self)[: None if self.row_dims > 1 else -1])

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    @cached_property
    def _order(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Tensors that hold elements, by offset; and their offsets."""
        held = [tensor for tensor, numel in enumerate(self.tensor_numels) if numel]
        held.sort(key=self.tensor_to_offset.__getitem__)
        return tuple(held), tuple(self.tensor_to_offset[tensor] for tensor in held)

    @cached_property
    def _violations(self) -> dict[Placement, str | None]:
        """Answers of `first_violation`, kept because every redistribution asks again."""
        return {}

    def _span(self, first: int, last: int) -> tuple[int, int]:
        """Start and length of segments `first` to `last - 1` together."""
        start = self.rank_to_offset[first]
        return start, (self.rank_to_offset[last] if last < self.dp_size else self.size) - start

    def _find_violation(self, placement: Placement) -> str | None:
        order, offsets = self._order
        for cut in self.rank_to_offset:
            position = bisect_left(offsets, cut) - 1  # the last tensor that starts before the cut
            if position < 0:
                continue
            tensor, into = order[position], cut - offsets[position]
            unit, stack = self._unit(tensor, placement)
            if into < self.tensor_numels[tensor] and into % stack % unit:
                rule = "keeps it whole" if isinstance(placement, TensorAtomic) else f"cuts at multiples of {unit}"
                shape = self.tensor_shapes[tensor]
                where = f"the cut at {cut} splits tensor {tensor} of shape {shape} after {into} elements"
                return f"{where}; {describe(placement)} {rule}"
        return None

    def _unit(self, tensor: int, placement: Placement) -> tuple[int, int]:
        """Number of elements of a tensor that `placement` never separates, and after how many they begin anew."""
        numel = self.tensor_numels[tensor]
        if isinstance(placement, TensorAtomic):
            return numel, numel
        shape, row = self.tensor_shapes[tensor], self.row_size(tensor)
        stack = math.prod(shape[num_row_dims(shape, self.row_dims) - 1 :])
        if isinstance(placement, BlockAtomic):
            return row * placement.block_size, stack
        return (row, stack) if isinstance(placement, RowAtomic) else (1, numel)

    def _refuse_too_fine(self, placements: Placements, mesh_shape: Sequence[int], parts: int) -> NoReturn:
        _refuse(
            "GlobalLayout.local_range",
            f"cannot shard {parts} ways a layout that was planned for {self.dp_size}.",
            got=f"placements {describe(placements)} on a mesh of shape {tuple(mesh_shape)}",
            need=f"a product of sharded axis sizes that divides {self.dp_size}",
            fix=f"plan the group with dp_size={parts}, or shard fewer axes",
        )

    def _check_types(self) -> None:
        shapes = self.tensor_shapes
        if not isinstance(shapes, tuple) or any(type(shape) is not tuple for shape in shapes):
            _refuse_field("tensor_shapes", shapes, "a tuple of tuples of ints")
        for name, values in (
            ("tensor_to_offset", self.tensor_to_offset),
            ("rank_to_offset", self.rank_to_offset),
            ("size", (self.size,)),
        ):
            if type(values) is not tuple or any(type(value) is not int or value < 0 for value in values):
                _refuse_field(name, getattr(self, name), "ints of at least 0, in a tuple if several")

    def _check_tensors(self) -> None:
        if len(self.tensor_shapes) != len(self.tensor_to_offset):
            pair = f"{len(self.tensor_shapes)} shapes and {len(self.tensor_to_offset)} offsets"
            _refuse_field("tensor_to_offset", pair, "one offset a tensor")
        order, offsets = self._order
        for position, (tensor, offset) in enumerate(zip(order, offsets, strict=True)):
            last = position + 1 == len(order)
            end, limit = offset + self.tensor_numels[tensor], self.size if last else offsets[position + 1]
            if end > limit:
                _refuse(
                    "GlobalLayout",
                    f"tensor {tensor} " + ("leaves the buffer." if last else f"overlaps tensor {order[position + 1]}."),
                    got=f"tensor {tensor} of shape {self.tensor_shapes[tensor]} in [{offset}, {end})",
                    need=f"an end of at most {limit}",
                    fix=f"size={end}" if last else f"offset {end} for tensor {order[position + 1]}",
                )

    def _check_cuts(self) -> None:
        cuts = (*self.rank_to_offset, self.size)
        if not self.rank_to_offset or cuts[0] != 0 or any(a > b for a, b in pairwise(cuts)):
            need = f"at least one cut, the first 0, never decreasing, none past size={self.size}"
            _refuse_field("rank_to_offset", self.rank_to_offset, need)


# A layout met while a step is traced is a constant of the program, and its questions are answered for real.
register_constant(GlobalLayout, ("local_range", "pieces", "admits", "segment", "row_size", "__eq__", "__hash__"))


def num_row_dims(shape: Shape, row_dims: int) -> int:
    """How many leading dimensions number the rows of a tensor, if `row_dims` may: never the last one, but dim 0 always.

    Example:
        >>> [num_row_dims(shape, 2) for shape in ((128, 5760, 2880), (5760, 2880), (2880,), ())]
        [2, 1, 1, 1]
    """
    return max(1, min(row_dims, len(shape) - 1))


def check_shapes(shapes: Sequence[Sequence[int]], where: str) -> tuple[Shape, ...]:
    """Return `shapes` as plain tuples, refusing whatever is not a tuple of ints of at least 0.

    Args:
        shapes: One shape a tensor.
        where: The function that was called, for the message.

    Raises:
        LayoutError: A dimension is negative, a bool, or not an int.

    Example:
        >>> check_shapes([[2, 3], []], "plan_row_atomic")
        ((2, 3), ())
    """
    result = tuple(map(tuple, shapes))
    for tensor, shape in enumerate(result):
        if any(type(dim) is not int or dim < 0 for dim in shape):
            _refuse(
                where,
                f"tensor {tensor} has a bad shape.",
                got=f"{shape!r}",
                need="ints of at least 0",
                fix="tuple(tensor.shape)",
            )
    return result


def _refuse(where: str, what: str, *, got: str, need: str, fix: str) -> NoReturn:
    raise LayoutError(explain(where, what, got=got, need=need, fix=fix))


def _refuse_field(name: str, value: object, need: str) -> NoReturn:
    """Refuse a field of a layout built by hand."""
    fix = "plan_row_atomic or plan_tensor_atomic, which get it right"
    _refuse("GlobalLayout", f"{name} is malformed.", got=f"{value!r}", need=need, fix=fix)
