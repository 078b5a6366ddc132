"""Put tensors into equal segments of a given length, so that every boundary falls on an atom's edge or in a gap.

A tensor that one boundary cuts need only be placed so that its own atoms meet there, whatever its atom is; one that two
or more boundaries cut also needs a segment that is a multiple of its atom. So tensors that fit whole go where they fit,
the coarsest atoms first, and a boundary that no tensor ends at is crossed by the one that leaves the smallest gap:

    segment       |                    |                    |
    tensors       [ whole ][ whole ][.][  crosses  ][ whole ]
                                     gap: r % atom, so that r - gap, whole atoms, lie before the boundary

Small tensors of any atom are kept back to fill such gaps, in which no boundary lies.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from dbuf.plan.first import FirstAtLeast

__all__ = ["ORDERS", "Order", "Run", "pack"]

Run: TypeAlias = tuple[int, int, int, int]
"""`(unit, numel, start, count)`: so many tensors of one kind, back to back."""

_SCANNED = 32  # atoms of either end of the list that are tried at a boundary: keeps packing near-linear


class Order(NamedTuple):
    """What is tried first.

    Attributes:
        largest: Cross a boundary with the largest tensor of an atom rather than with the smallest.
        keep_back: Keep tensors smaller than the coarsest atom for gaps.
        long_first: Place tensors longer than a segment before whole ones, where they leave no gap.
        stiff_first: Cross a boundary with a tensor that may cross no second one, before the smallest gap decides.
    """

    largest: bool
    keep_back: bool
    long_first: bool
    stiff_first: bool = False


ORDERS = (
    *(Order(largest, keep, first) for keep in (True, False) for first in (True, False) for largest in (True, False)),
    *(Order(True, True, first, stiff_first=True) for first in (True, False)),
)


def pack(
    kinds: Mapping[tuple[int, int], int], num_segments: int, segment: int, order: Order
) -> tuple[list[Run] | None, int]:
    """Place every tensor, or find no room for them.

    Args:
        kinds: How many tensors there are of each `(unit, numel)`; a unit is an atom's elements and divides `numel`.
        num_segments: How many segments there are.
        segment: Elements of each.
        order: What is tried first.

    Returns:
        The runs, or None if this order finds no room; and the steps taken, for whoever keeps a budget.

    Example:
        >>> pack({(4, 8): 2, (3, 9): 1}, 2, 13, ORDERS[0])[0]
        [(4, 8, 0, 1), (4, 8, 9, 1), (3, 9, 17, 1)]
    """
    coarsest = max(unit for unit, _ in kinds)
    small = coarsest if order.keep_back else 0
    kept = {kind: count for kind, count in kinds.items() if kind[1] < small}
    packer = _Packer(num_segments, segment, sum(numel * count for (_, numel), count in kinds.items()), order)
    packer.fillers = _Stock(kept)
    fits = packer.place_all(_Stock({kind: count for kind, count in kinds.items() if kind[1] >= small}))
    if fits and kept:
        rest, packer.fillers = packer.fillers, _Stock({})
        fits = packer.place_all(rest)
    return (packer.runs if fits else None), packer.steps + len(kinds) // 8


class _Stock:
    """Tensors still to place: for each unit, the coarsest first, the sizes that are left, in ascending order."""

    def __init__(self, kinds: Mapping[tuple[int, int], int]) -> None:
        self.units = sorted({unit for unit, _ in kinds}, reverse=True)
        at = {unit: i for i, unit in enumerate(self.units)}
        self.sizes: list[list[int]] = [[] for _ in self.units]
        for unit, numel in sorted(kinds):
            self.sizes[at[unit]].append(numel)
        self.counts = dict(kinds)
        self.left = sum(kinds.values())
        self.long_left = 0
        self._top = 1 + max((numel for _, numel in kinds), default=0)
        self._smallness = FirstAtLeast([self._top - sizes[0] for sizes in self.sizes])
        self.held = list(range(len(self.units)))

    def fitting(self, room: int) -> tuple[int, int] | None:
        """The index of the coarsest unit of which a tensor fits, and the largest that does."""
        i = self._smallness.find(0, max(self._top - room, 1))
        return None if i is None else (i, self.sizes[i][bisect_right(self.sizes[i], room) - 1])

    def take(self, i: int, numel: int, count: int) -> None:
        kind = self.units[i], numel
        self.counts[kind] -= count
        self.left -= count
        if not self.counts[kind]:
            sizes = self.sizes[i]
            del sizes[bisect_right(sizes, numel) - 1]
            self._smallness.set(i, self._top - sizes[0] if sizes else 0)
            if not sizes:
                del self.held[bisect_right(self.held, i) - 1]


class _Packer:
    """A cursor over the segments, and what it has placed."""

    def __init__(self, num_segments: int, segment: int, content: int, order: Order) -> None:
        self.segment, self.order = segment, order
        self.waste = num_segments * segment - content  # what may still be left empty
        self.at = self.steps = 0
        self.runs: list[Run] = []
        self.fillers: _Stock

    def place_all(self, stock: _Stock) -> bool:
        stock.long_left = sum(count for (_, numel), count in stock.counts.items() if numel > self.segment)
        while stock.left:
            self.steps += 1
            room = self.segment - self.at % self.segment
            long_first = self.order.long_first and stock.long_left
            if long_first and (found := self._crossing(stock, room, self.segment)) and found[0] == 0:
                self._place(stock, found[1], found[2], 1)
            elif whole := stock.fitting(room):
                i, numel = whole
                self._place(stock, i, numel, min(stock.counts[stock.units[i], numel], room // numel))
            elif not self._cross(stock, room):
                return False
        return True

    def _cross(self, stock: _Stock, room: int) -> bool:
        """Take the tensor that leaves the smallest gap before it, or leave the rest of the segment empty."""
        found = self._crossing(stock, room, 0)
        gap = room if found is None else found[0]
        if found is None and room == self.segment:
            return False  # longer than a segment, and no atom of it meets the boundaries
        if gap and not self._leave(gap):
            return False
        if found is not None and gap < room:
            self._place(stock, found[1], found[2], 1)
        return True

    def _crossing(self, stock: _Stock, room: int, longer_than: int) -> tuple[int, int, int] | None:
        """`(gap, index of the unit, numel)` of the tensor that may cross the next boundary after the smallest gap."""
        held = stock.held
        tried = held if len(held) <= 2 * _SCANNED else held[:_SCANNED] + held[-_SCANNED:]
        self.steps += len(tried) // 4
        best: tuple[bool, int, int, int] | None = None
        for i in tried:
            unit, sizes = stock.units[i], stock.sizes[i]
            gap, once = room % unit, self.segment % unit > 0
            legal = bisect_right(sizes, self.segment + room - gap) if once else len(sizes)
            if not legal:
                continue
            numel = sizes[legal - 1] if self.order.largest or longer_than else sizes[0]
            bends = self.order.stiff_first and not (once and numel > self.segment)
            if numel > longer_than and (best is None or (bends, gap) < best[:2]):
                best = bends, gap, i, numel
            if best is not None and not best[0] and not best[1]:
                break
        return best[1:] if best is not None else None

    def _leave(self, gap: int) -> bool:
        """Go on by `gap` elements, with what has been kept back in them and the rest empty."""
        end = self.at + gap
        while (whole := self.fillers.fitting(end - self.at)) is not None:
            i, numel = whole
            count = min(self.fillers.counts[self.fillers.units[i], numel], (end - self.at) // numel)
            self._place(self.fillers, i, numel, count)
            self.steps += 1
        self.waste -= end - self.at
        self.at = end
        return self.waste >= 0

    def _place(self, stock: _Stock, i: int, numel: int, count: int) -> None:
        self.runs.append((stock.units[i], numel, self.at, count))
        self.at += numel * count
        stock.long_left -= count if numel > self.segment else 0
        stock.take(i, numel, count)
