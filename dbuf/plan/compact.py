"""Equal segments with less padding than the least common multiple asks for, and how far they are from the fewest.

Equal segments hold everything, so none is shorter than `ceil(content / segments)`, or than an even share of the atoms
of any tensor. A tensor of more atoms than two segments hold whole has two boundaries in it wherever it lies, so its
atom divides the segment. Lengths from the least that meets all this are tried in ascending order
(`dbuf.plan.packing`), and the first that packs is taken. Where nothing shorter than PADDED's packs, the answer is
PADDED's plan.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from dbuf.errors import LayoutError, require_positive
from dbuf.layout import GlobalLayout, check_shapes
from dbuf.plan.packing import ORDERS, Run, pack
from dbuf.plan.rows import plan_row_atomic, row_units

__all__ = ["CompactPlan", "plan_compact"]

_WHERE = "plan_compact"
# Steps of packing after which the search ends where it is, and those a tensor on top: the same count on every rank.
_MAX_STEPS, _STEPS_A_TENSOR = 60_000, 5
_BISECTIONS = 8
_MANY = 500  # kinds of tensors from which on a packing takes long, and a single order is tried
_COARSEST = 8  # atoms whose multiples are tried, those of the most elements


class CompactPlan(NamedTuple):
    """A layout of equal segments, and what is known of the shortest ones possible.

    Attributes:
        layout: The layout.
        content: Elements of all tensors.
        even: A segment's length if nothing were padded: `ceil(content / segments)`, rounded up to `align`.
        least: No equal segments of tensors in one piece are shorter: at least `even` and an even share of each tensor's
            atoms, and a multiple of the atoms of all tensors of which two segments cannot hold all atoms whole.
        padded: Length of PADDED's segments.
        forcing: The tensors of which two segments of `least` cannot hold all atoms, so that it is a multiple of theirs.
        is_padded: Whether the layout is PADDED's own, for want of a better one.
    """

    layout: GlobalLayout
    content: int
    even: int
    least: int
    padded: int
    forcing: tuple[int, ...]
    is_padded: bool

    @property
    def segment(self) -> int:
        """Elements of each segment."""
        return self.layout.size // self.layout.dp_size

    @property
    def overhead(self) -> float:
        """Padding by content: 0.01 is 1 %."""
        return _excess(self.layout.size, self.content)

    @property
    def is_least(self) -> bool:
        """Whether no equal segments are shorter, so that the plan is proved to be the best of its kind."""
        return self.segment == self.least

    def __str__(self) -> str:
        n = self.layout.dp_size
        text = f"{n} segments of {self.segment}: {self.overhead:.3%} padding"
        if not self.content:
            return text
        text += f" ({_excess(self.padded * n, self.content):.3%} as PADDED)"
        if self.is_least:
            text += "; no equal segments are shorter"
        else:
            text += f"; none can be shorter than {self.least}, {_excess(self.segment, self.least):.3%} less"
        if self.is_padded:
            text += "; this is PADDED's plan" + ("" if self.is_least else ", for nothing shorter was found")
        if self.forcing and self.least > self.even:
            names = ", ".join(f"{t} of shape {self.layout.tensor_shapes[t]}" for t in self.forcing[:4])
            more = f" and {len(self.forcing) - 4} more" if len(self.forcing) > 4 else ""
            text += f"; an even share is {self.even}, but atoms of what two segments cannot hold divide them: tensor "
            text += names + more
        return text


def plan_compact(
    shapes: Sequence[Sequence[int]], dp_size: int, *, block_size: int = 1, align: int = 1, row_dims: int = 1
) -> CompactPlan:
    """Lay tensors out in equal segments that are as short as a search finds, never longer than PADDED's.

    As with PADDED, nothing is copied after a gather and every collective has equal parts. Tensors lie in any order, and
    one that is not cut may start anywhere, not at a multiple of its rows. A function of shapes alone: every rank finds
    the same plan. A segment's length, and so every offset, depends on `dp_size`.

    Args:
        shapes: Global shape of each tensor; see `plan_row_atomic` for scalars and tensors without elements.
        dp_size: Number of segments.
        block_size: Rows in a block; 1 for `RowAtomic`.
        align: Elements; the length of a segment is a multiple of it.
        row_dims: How many leading dimensions number the rows; see `plan_row_atomic`.

    Returns:
        The layout, which admits `RowAtomic()` if `block_size` is 1 and `BlockAtomic(block_size)`, with what proves how
        good it is.

    Raises:
        LayoutError: A shape or number is malformed, or `block_size` does not divide a tensor's rows.

    Example:
        >>> plan = plan_compact([(5, 6), (7, 4), (3, 6)], 2)
        >>> print(plan)
        2 segments of 38: 0.000% padding (26.316% as PADDED); no equal segments are shorter
        >>> plan.layout.rank_to_offset, plan.layout.tensor_to_offset
        ((0, 38), (0, 30, 58))
    """
    require_positive(dp_size, "dp_size", _WHERE, LayoutError)
    require_positive(align, "align", _WHERE, LayoutError)
    checked = check_shapes(shapes, _WHERE)
    numels, units = list(map(math.prod, checked)), row_units(checked, block_size, row_dims, _WHERE)
    padded = plan_row_atomic(checked, dp_size, block_size=block_size, align=align, row_dims=row_dims)
    longest, content = padded.size // dp_size, sum(numels)
    kinds = Counter(sorted((unit, numel) for unit, numel in zip(units, numels, strict=True) if numel))
    even = _round_up(-(-content // dp_size), align)
    # Of each tensor some segment holds an even share of the atoms, rounded up.
    share = max((unit * -(-numel // (unit * dp_size)) for unit, numel in kinds), default=0)
    least = _least_segment(kinds, max(even, _round_up(share, align)), align, longest)
    found = _search(kinds, dp_size, _Lengths(kinds, least, align, longest)) if least < longest else None
    layout = padded
    if found is not None:
        segment, runs = found
        offsets, cuts = _offsets(numels, units, runs), tuple(range(0, segment * dp_size, segment))
        layout = GlobalLayout(checked, offsets, segment * dp_size, cuts, align, row_dims)
    forcing = tuple(t for t, numel in enumerate(numels) if numel and _half(units[t], numel) > least)
    return CompactPlan(layout, content, even, least, longest, forcing, found is None)


def _least_segment(kinds: Counter[tuple[int, int]], low: int, align: int, limit: int) -> int:
    """The shortest segment of at least `low` that is divided by the atoms of each tensor that two cannot hold."""
    by_half = sorted(kinds, key=lambda kind: -_half(*kind))
    # Of each prefix of the list, longest first, what its atoms' multiple is; beyond `limit` it does not matter which.
    multiples, multiple = [align], align
    for unit, _ in by_half:
        multiple = multiple if multiple > limit else math.lcm(multiple, unit)
        multiples.append(multiple)
    for count in range(sum(_half(*kind) > low for kind in by_half), -1, -1):
        # So many are cut twice where the segment is less than half of the last of them, and not of the next.
        high = _half(*by_half[count - 1]) - 1 if count else limit
        segment = _round_up(low, multiples[count])
        if segment <= min(high, limit):
            return segment
        low = max(low, high + 1)
    return limit


def _half(unit: int, numel: int) -> int:
    """The larger half of a tensor's atoms: two segments of that length hold all of them whole, shorter ones do not."""
    return -(-numel // (2 * unit)) * unit


class _Lengths:
    """Segments worth trying, between the least possible and PADDED's."""

    _EXCESSES = (100_000, 10_000, 3_000, 1_000, 300, 100, 30, 10, 3)  # one in so many

    def __init__(self, kinds: Counter[tuple[int, int]], least: int, align: int, limit: int) -> None:
        self.least, self.limit = least, limit
        self._step, self._many = align, len(kinds) > _MANY
        for unit, numel in kinds:
            if _half(unit, numel) > least:
                self._step = math.lcm(self._step, unit)
        weight: Counter[int] = Counter()
        for (unit, numel), count in kinds.items():
            weight[unit] += numel * count
        self._units = [unit for unit, _ in weight.most_common(_COARSEST)]

    def ascending(self) -> Iterator[int]:
        """The least, multiples of what many elements have as their atoms, and steps that double."""
        excess = (_round_up(self.least + self.least // share, self._step) for share in self._EXCESSES)
        if self._many:
            yield from sorted({s for s in (self.least, *excess) if s < self.limit})
            return
        steps = {self._step}
        for unit in self._units:
            steps |= (
                {math.lcm(step, unit) for step in tuple(steps)} if len(steps) < 32 else {math.lcm(self._step, unit)}
            )
        rounded = (_round_up(self.least, step) + k * step for step in steps for k in range(3))
        doubled = (self.least + (self._step << k) for k in range(max(self.limit // self._step, 1).bit_length()))
        yield from sorted({s for s in chain((self.least,), rounded, doubled, excess) if self.least <= s < self.limit})

    def between(self, low: int, high: int) -> int | None:
        """A length in the middle that fits the long tensors, or None where there is none."""
        middle = low + (high - low) // (2 * self._step) * self._step
        return middle if low < middle < high else None


def _search(kinds: Counter[tuple[int, int]], dp_size: int, lengths: _Lengths) -> tuple[int, list[Run]] | None:
    """The shortest length that packs, of those tried until the steps are used up, and its runs."""
    steps, failed, most = 0, lengths.least, _MAX_STEPS + _STEPS_A_TENSOR * kinds.total()
    found: tuple[int, list[Run]] | None = None

    def attempt(segment: int) -> list[Run] | None:
        nonlocal steps
        for order in ORDERS[:1] if len(kinds) > _MANY else ORDERS:
            runs, taken = pack(kinds, dp_size, segment, order)
            steps += taken
            if runs is not None or steps > most:
                return runs
        return None

    for segment in lengths.ascending():
        runs = attempt(segment)
        if runs is not None:
            found = segment, runs
            break
        failed = segment
        if steps > most:
            return None
    for _ in range(2 if len(kinds) > _MANY else _BISECTIONS):
        middle = lengths.between(failed, found[0]) if found is not None and found[0] > lengths.least else None
        if middle is None or steps > most:
            break
        runs = attempt(middle)
        if runs is None:
            failed = middle
        else:
            found = middle, runs
    return found


def _offsets(numels: list[int], units: list[int], runs: list[Run]) -> tuple[int, ...]:
    """The offset of each tensor: tensors of one kind take the places of its runs in order, empty ones offset 0."""
    places: dict[tuple[int, int], list[int]] = {}
    for unit, numel, start, count in runs:
        places.setdefault((unit, numel), []).extend(range(start, start + numel * count, numel))
    following = {kind: iter(starts) for kind, starts in places.items()}
    return tuple(next(following[unit, numel]) if numel else 0 for unit, numel in zip(units, numels, strict=True))


def _excess(size: int, content: int) -> float:
    """What `size` is more than `content`, by `content`; a least common multiple can be too large for a float."""
    try:
        return size / content - 1 if content else 0.0
    except OverflowError:
        return math.inf


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
