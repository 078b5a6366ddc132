"""Which rank works on which matrix: the largest cost first, to the rank with the least so far."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from dbuf.errors import LayoutError, explain, require_positive
from dbuf.layout import Shape, check_shapes

__all__ = ["Cost", "OwnerPlan", "newton_schulz_flops", "plan_owners"]

Cost: TypeAlias = str | Callable[[Shape], float]
"""`"numel"`, `"newton_schulz"`, or a function of a tensor's global shape."""

_WHERE = "plan_owners"


class OwnerPlan(NamedTuple):
    """Who owns which tensor, and how well the work is spread.

    Attributes:
        owners: The owner of each tensor, in order.
        costs: The sum of costs of each owner's tensors.
        numels: Elements that each owner holds.
        largest: The largest cost of one tensor: no assignment finishes before it.
    """

    owners: tuple[int, ...]
    costs: tuple[float, ...]
    numels: tuple[int, ...]
    largest: float

    @property
    def balance(self) -> float:
        """Makespan over mean: the cost of the busiest owner by that of an average one; 1 is perfect."""
        return _over_mean(self.costs)

    @property
    def best_balance(self) -> float:
        """What no assignment can be below: one tensor's cost, or all owners alike."""
        mean = sum(self.costs) / len(self.costs)
        return max(1.0, self.largest / mean) if mean else 1.0

    @property
    def memory_skew(self) -> float:
        """The most elements of an owner by the mean."""
        return _over_mean(self.numels)

    def __str__(self) -> str:
        text = (
            f"{len(self.owners)} tensors on {len(self.costs)} owners: makespan {self.balance:.3f} x the mean, "
            f"memory {self.memory_skew:.3f} x the mean"
        )
        if self.best_balance > 1.0:
            text += f"; one tensor costs {self.best_balance:.3f} x the mean, so no assignment does better"
        return text


def plan_owners(shapes: Sequence[Sequence[int]], num_owners: int, *, cost: Cost = "numel") -> OwnerPlan:
    """Give each tensor an owner, so that all owners have about equally much to do.

    The largest first, each to the owner with the least cost so far; of equal tensors the earlier first, of equal owners
    the one with fewer elements, then the lower number. A function of shapes alone: every rank finds the same plan.

    Args:
        shapes: Global shape of each tensor.
        num_owners: Number of ranks that share the work.
        cost: What a tensor costs: `"numel"`, `"newton_schulz"` (see `newton_schulz_flops`), or a function of the shape.

    Returns:
        The plan. At most 4/3 times the best makespan.

    Raises:
        LayoutError: A shape or number is malformed, or a cost is not a finite number of at least 0.

    Source:
        Graham, "Bounds on Multiprocessing Timing Anomalies", 1969.

    Example:
        >>> plan = plan_owners([(4, 4), (2, 2), (3, 3), (2, 4)], 2)
        >>> plan.owners, plan.numels
        ((0, 0, 1, 1), (20, 17))
    """
    require_positive(num_owners, "num_owners", _WHERE, LayoutError)
    checked = check_shapes(shapes, _WHERE)
    costs = _costs(checked, cost)
    owners = [0] * len(checked)
    loads: list[tuple[float, int, int]] = [(0.0, 0, owner) for owner in range(num_owners)]
    for tensor in sorted(range(len(checked)), key=lambda t: -costs[t]):  # stable: ties stay in order
        load, numel, owner = heapq.heappop(loads)
        owners[tensor] = owner
        heapq.heappush(loads, (load + costs[tensor], numel + math.prod(checked[tensor]), owner))
    by_owner = sorted(loads, key=lambda load: load[2])
    return OwnerPlan(
        tuple(owners),
        tuple(load for load, _, _ in by_owner),
        tuple(numel for _, numel, _ in by_owner),
        max(costs, default=0.0),
    )


def newton_schulz_flops(shape: Shape, steps: int = 5) -> float:
    """Floating point operations of Newton-Schulz on a matrix, or on each of a stack of them.

    With `m <= n` the sides, a step is `X Xᵀ` (2 m² n), its square (2 m³) and a product with `X` (2 m² n).

    Example:
        >>> newton_schulz_flops((2, 3), steps=1)
        64.0
    """
    if len(shape) < 2:
        return float(math.prod(shape))
    *stack, rows, columns = shape
    m, n = sorted((rows, columns))
    return float(steps * math.prod(stack) * (4 * m * m * n + 2 * m**3))


_COSTS: dict[str, Callable[[Shape], float]] = {
    "numel": lambda shape: float(math.prod(shape)),
    "newton_schulz": newton_schulz_flops,
}


def _costs(shapes: tuple[Shape, ...], cost: Cost) -> list[float]:
    fn = _COSTS.get(cost) if isinstance(cost, str) else cost
    if fn is None or not callable(fn):
        raise LayoutError(
            explain(
                _WHERE,
                "no such cost.",
                got=repr(cost),
                need="'numel', 'newton_schulz' or a function of a shape",
                fix="cost=lambda shape: shape[0] ** 2 * shape[1]",
            )
        )
    of_shape = {shape: float(fn(shape)) for shape in dict.fromkeys(shapes)}
    bad = [f"{shape}: {value}" for shape, value in of_shape.items() if not (0 <= value < math.inf)]
    if bad:
        raise LayoutError(
            explain(
                _WHERE,
                "a cost is not a finite number of at least 0.",
                got="\n".join(bad),
                need="one number a shape, the same on every rank",
                fix="cost='numel'",
            )
        )
    return [of_shape[shape] for shape in shapes]


def _over_mean(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return max(values) / mean if mean else 1.0
