"""What one mesh axis does to a buffer: inert, hashable placements, and the rules for tuples of them.

A tuple of placements has one entry a mesh axis, outermost first. Sharded axes are a suffix of it and carry
one and the same placement, so that every rank's part of a buffer is one contiguous range.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NoReturn, TypeAlias

from torch.distributed.tensor import Partial, Replicate, Shard

from dbuf.errors import PlacementError, explain, require_positive

__all__ = [
    "BlockAtomic",
    "Partial",
    "Placement",
    "Placements",
    "Replicate",
    "RowAtomic",
    "ShardLayout",
    "ShardPlacement",
    "TensorAtomic",
    "changed_mesh_axis",
    "describe",
    "dual",
    "dual_placements",
    "is_placement",
    "is_sharded",
    "normalize",
    "num_sharded",
    "shard_placement",
]

_KINDS = 'Replicate(), Partial("sum"), Partial("avg"), RowAtomic(), BlockAtomic(block_size) or TensorAtomic()'
_REDUCE_OPS = ("sum", "avg")


class _FlatShard(Shard):
    """What the three flat shards have in common: dim 0, value semantics, no attribute that can change.

    torch's `Shard.__eq__` compares `dim` alone and would call any subclass equal to `Shard(0)`, so
    equality, hash and repr are defined here, by type and fields.
    """

    def __init__(self) -> None:
        super().__init__(0)

    def _fields(self) -> tuple[int, ...]:
        """The constructor's arguments: all there is to compare, hash, print and pickle."""
        return ()

    def __eq__(self, other: object) -> bool:
        # False rather than NotImplemented: the latter hands over to Shard's own, which ignores the type.
        return type(other) is type(self) and other._fields() == self._fields()

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((type(self), self._fields()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self._fields()))})"

    __str__ = __repr__

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        """An expression for generated code, and the names that it needs (torch's protocol)."""
        return repr(self), {type(self).__name__: type(self)}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._fields()

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{self!r} is immutable: cannot set {name!r}; make a new placement instead")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{self!r} is immutable: cannot delete {name!r}; make a new placement instead")


class RowAtomic(_FlatShard):
    """Flat shard that never cuts a row: the `shape[1:]` elements at one index of dim 0.

    A layout planned with `row_dims` counts rows over more leading dimensions, and a row is `shape[row_dims:]`.

    Example:
        >>> RowAtomic() == RowAtomic(), RowAtomic() == Shard(0)
        (True, False)
    """


class BlockAtomic(_FlatShard):
    """Flat shard that never cuts a run of `block_size` consecutive rows; see `RowAtomic` for what a row is.

    Args:
        block_size: Rows in a block, at least 1.

    Raises:
        PlacementError: `block_size` is not a positive int, or is a bool.

    Example:
        >>> BlockAtomic(32)
        BlockAtomic(32)
    """

    block_size: int

    def __init__(self, block_size: int) -> None:
        super().__init__()
        require_positive(block_size, "block_size", "BlockAtomic", PlacementError)
        object.__setattr__(self, "block_size", block_size)

    def _fields(self) -> tuple[int, ...]:
        return (self.block_size,)


class TensorAtomic(_FlatShard):
    """Flat shard that keeps every tensor whole, on one owner; the layout, not the placement, says on which.

    Example:
        >>> TensorAtomic()
        TensorAtomic()
    """


class ShardLayout(StrEnum):
    """How a group is cut, one segment a rank: equal segments with padding, or uneven ones without."""

    PADDED = "padded"
    UNPADDED = "unpadded"

    def __repr__(self) -> str:
        return f"ShardLayout.{self.name}"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise PlacementError(
            explain(
                "ShardLayout",
                "no such layout.",
                got=repr(value),
                need="ShardLayout.PADDED or ShardLayout.UNPADDED, or their values 'padded' and 'unpadded'",
                fix="ShardLayout.PADDED",
            )
        )


ShardPlacement: TypeAlias = RowAtomic | BlockAtomic | TensorAtomic
Placement: TypeAlias = Replicate | Partial | RowAtomic | BlockAtomic | TensorAtomic
Placements: TypeAlias = tuple[Placement, ...]


def describe(placements: Placement | Sequence[Placement]) -> str:
    """Write placements so that they can be pasted back, which torch's own `Partial(sum)` cannot.

    Example:
        >>> print(describe((Partial("sum"), RowAtomic())))
        (Partial('sum'), RowAtomic())
    """
    if isinstance(placements, tuple | list):
        entries = [describe(entry) for entry in placements]
        return f"({entries[0]},)" if len(entries) == 1 else f"({', '.join(entries)})"
    return f"Partial({placements.reduce_op!r})" if isinstance(placements, Partial) else repr(placements)


def is_placement(node: object) -> bool:
    """Say whether an object is a placement of any kind, torch's own ones that dbuf refuses included."""
    return isinstance(node, Replicate | Partial | Shard)


def is_sharded(placement: Placement) -> bool:
    """Say whether a placement leaves each rank of its axis with a part of the buffer.

    Example:
        >>> is_sharded(RowAtomic()), is_sharded(Replicate())
        (True, False)
    """
    return isinstance(placement, _FlatShard)


def num_sharded(placements: Placements) -> int:
    """Count the sharded axes: the length of the sharded suffix of a normalized tuple.

    Example:
        >>> num_sharded((Replicate(), RowAtomic()))
        1
    """
    return sum(map(is_sharded, placements))


def shard_placement(placements: Placements) -> ShardPlacement | None:
    """Return the placement that the sharded axes of a normalized tuple share, or None if no axis is sharded.

    Example:
        >>> shard_placement((Replicate(), BlockAtomic(4)))
        BlockAtomic(4)
    """
    last = placements[-1] if placements else None
    return last if isinstance(last, RowAtomic | BlockAtomic | TensorAtomic) else None


def normalize(placements: Placement | Sequence[Placement], ndim: int, where: str) -> Placements:
    """Check a placement spec for a mesh of `ndim` axes and return it as a tuple.

    Args:
        placements: One placement an axis, outermost first; on a 1-D mesh a single placement will do.
        ndim: Number of mesh axes.
        where: The function that was called, for messages.

    Returns:
        A tuple of `ndim` placements whose sharded axes are a suffix and all carry the same placement.

    Raises:
        PlacementError: An entry is of another kind, the count is wrong, or the suffix rule is broken.

    Example:
        >>> normalize(RowAtomic(), 1, "dbuf.shard")
        (RowAtomic(),)
    """
    entries = tuple(placements) if isinstance(placements, tuple | list) else (placements,)
    for axis, entry in enumerate(entries):
        _check_kind(entry, axis, where)
    if len(entries) != ndim:
        raise PlacementError(
            explain(
                where,
                f"{_count(len(entries))} for a mesh of {ndim} {'axis' if ndim == 1 else 'axes'}.",
                got=describe(placements),
                need=f"a tuple of {ndim}, one entry a mesh axis, outermost first",
                fix=_example(ndim),
            )
        )
    _check_suffix(entries, where)
    return entries


def changed_mesh_axis(old: Placements, new: Placements) -> int | None:
    """Return the one mesh axis whose placement differs, or None if none does.

    Args:
        old: Placements before the move.
        new: Placements after it, on the same mesh.

    Returns:
        Index of the axis that differs, or None.

    Raises:
        PlacementError: More than one axis differs, or the tuples are of different lengths.

    Example:
        >>> changed_mesh_axis((Replicate(), RowAtomic()), (Replicate(), Replicate()))
        1
    """
    if len(old) != len(new):
        raise PlacementError(
            explain(
                "changed_mesh_axis",
                "the two placement tuples are for meshes of different sizes.",
                got=f"{describe(old)}\n{describe(new)}",
                need="two tuples of one length: one entry an axis of the same mesh",
                fix=_example(len(old)),
            )
        )
    changed = [axis for axis, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]
    if len(changed) > 1:
        step = (*old[: changed[-1]], new[changed[-1]], *old[changed[-1] + 1 :])
        raise PlacementError(
            explain(
                "changed_mesh_axis",
                f"placements differ on {len(changed)} mesh axes.",
                got=f"{describe(old)}\n{describe(new)}, different on axes {changed}",
                need="at most one axis that differs",
                fix=f"dbuf.redistribute, which goes axis by axis, or go to {describe(step)} first",
            )
        )
    return changed[0] if changed else None


def dual(placement: Placement) -> Placement:
    """Return the placement of the gradient of a buffer with this one.

    `shard -> the same shard`, `Replicate -> Partial("sum")`, `Partial -> Replicate`.

    Example:
        >>> dual(RowAtomic()), dual(Partial("avg"))
        (RowAtomic(), Replicate())
    """
    if isinstance(placement, Replicate):
        return Partial("sum")
    return Replicate() if isinstance(placement, Partial) else placement


def dual_placements(placements: Placements) -> Placements:
    """Return the dual of every entry.

    Example:
        >>> dual_placements((Partial("sum"), BlockAtomic(2)))
        (Replicate(), BlockAtomic(2))
    """
    return tuple(map(dual, placements))


def _check_kind(entry: object, axis: int, where: str) -> None:
    """Refuse an entry that is not one of the five kinds, saying what stands in for it."""
    # Exact types: torch's private subclasses of Partial carry state that no collective here knows about.
    if isinstance(entry, _FlatShard) or type(entry) is Replicate:
        return
    what, need, fix = f"axis {axis} has no placement that dbuf knows.", _KINDS, "RowAtomic()"
    if type(entry) is Partial:
        if entry.reduce_op in _REDUCE_OPS:
            return
        what, need = f"axis {axis} has the reduction {entry.reduce_op!r}.", 'Partial("sum") or Partial("avg")'
        fix = 'reduce over the axis yourself, or use Partial("sum")'
    elif isinstance(entry, Shard):
        what = f"axis {axis} has torch's {type(entry).__name__}, which says nothing about rows or owners."
        need = "RowAtomic(), BlockAtomic(block_size) or TensorAtomic() for a sharded axis"
    got = describe(entry) if isinstance(entry, Partial) else f"{entry!r} ({type(entry).__name__})"
    if isinstance(entry, type) and issubclass(entry, Replicate | Partial | _FlatShard):
        what, got, fix = (
            f"axis {axis} has a class.",
            f"the class {entry.__name__}",
            f"{entry.__name__}(...), an instance",
        )
    raise PlacementError(explain(where, what, got=got, need=need, fix=fix))


def _check_suffix(entries: Placements, where: str) -> None:
    """Refuse a sharded axis outside of an unsharded one, and sharded axes that disagree."""
    shards = [entry for entry in entries if is_sharded(entry)]
    rest = [entry for entry in entries if not is_sharded(entry)]
    if entries != (*rest, *shards):
        raise PlacementError(
            explain(
                where,
                "a sharded axis lies outside of an unsharded one, so a rank's part is not one range.",
                got=describe(entries),
                need="sharded axes last: a suffix of the tuple",
                fix=f"{describe((*rest, *shards))}, with the mesh axes in that order",
            )
        )
    if any(shard != shards[0] for shard in shards):
        raise PlacementError(
            explain(
                where,
                "the sharded axes carry different placements.",
                got=describe(entries),
                need="one and the same placement on every sharded axis",
                fix=describe((*rest, *[shards[-1]] * len(shards))),
            )
        )


def _count(number: int) -> str:
    return "one placement" if number == 1 else f"{number} placements"


def _example(ndim: int) -> str:
    """A legal tuple for a mesh of `ndim` axes, as text."""
    return describe((Replicate(),) * (ndim - 1) + (RowAtomic(),) * min(ndim, 1))
