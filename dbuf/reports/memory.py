"""Memory a rank and bytes a step of a strategy, from shapes alone: what `python -m dbuf plan` prints."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch

from dbuf.errors import DbufError, explain, require_positive
from dbuf.layout import GlobalLayout, Shape
from dbuf.optim.quantized import is_large_matrix
from dbuf.placement import Placements, ShardLayout
from dbuf.reports.groups import plan_group
from dbuf.reports.traffic import ranks_along_shards, step_transfers
from dbuf.train.strategy import Strategy

__all__ = ["OPTIMIZERS", "MemoryPlan", "plan_memory"]

_WHERE = "dbuf plan"
_BLOCK = 256  # elements that share a scale in `adamw8bit`


def _eight_bit(shape: Shape) -> float:
    """Two codes and two scales a block for large matrices, two floats otherwise."""
    if not is_large_matrix("", shape):
        return 8.0
    row = math.prod(shape[1:])
    return 2.0 + 2 * 4 * -(-row // _BLOCK) / row


OPTIMIZERS: Mapping[str, float | Callable[[Shape], float]] = {
    "sgd": 0.0,
    "momentum": 4.0,
    "lion": 4.0,
    "muon": 4.0,
    "adamw": 8.0,
    "adamw8bit": _eight_bit,
}
"""Bytes of state by the name of the optimizer: of each element of a buffer, padding too; or, as a function of the shape
of a tensor, of each element of that, where the state packs a selection of tensors."""


class _Group(Protocol):
    """What a plan needs of a unit: `dbuf.models.Unit` is one."""

    @property
    def count(self) -> int: ...
    @property
    def shapes(self) -> tuple[Shape, ...]: ...


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """What a strategy holds and sends, in bytes; of each the most that any rank has.

    Without activations, and without the full-size gradient of a group on its way to its reduction.

    Attributes:
        weights: Main weights, where the optimizer works.
        compute_weights: Weights that the loss reads, where they rest elsewhere than the main ones.
        gradients: Gradients when the backward has ended, in the main weights' dtype.
        optimizer: The optimizer's state.
        gathered: Gathered weights alive at once, of the largest groups; 0 where weights are whole at rest.
        collectives: Collectives of a step by kind, without those of one element.
        nbytes: Bytes of a step by kind, each collective counted by its larger side, as `dbuf.inspect` does.
        received: Bytes that a rank receives in a step: `(n - 1) / n` of a gather or a reduce-scatter over `n` ranks,
            twice that of an all-reduce.
    """

    weights: int
    compute_weights: int
    gradients: int
    optimizer: int
    gathered: int
    collectives: dict[str, int]
    nbytes: dict[str, int]
    received: int

    @property
    def total(self) -> int:
        """Bytes held at once, without activations."""
        return self.weights + self.compute_weights + self.gradients + self.optimizer + self.gathered

    def as_dict(self) -> dict[str, Any]:
        """All numbers and their sum, for JSON."""
        return dataclasses.asdict(self) | {"total": self.total}


def plan_memory(
    groups: Sequence[_Group],
    mesh_shape: tuple[int, ...],
    strategy: Strategy,
    *,
    optimizer: str = "adamw",
    microbatches: int = 1,
    compute_dtype: torch.dtype = torch.float32,
    grad_dtype: torch.dtype | None = None,
    groups_in_flight: int = 2,
    shard_layout: ShardLayout | str = ShardLayout.PADDED,
    align: int = 1,
    row_dims: int = 1,
) -> MemoryPlan:
    """Plan a step of `dbuf.train`, compiled, with float32 main weights.

    Args:
        groups: Each has `shapes`, and the `count` of groups that are alike.
        mesh_shape: Ranks along each axis, outermost first.
        strategy: For a mesh of so many axes.
        optimizer: A name of `OPTIMIZERS`.
        microbatches: As in `make_train_step`.
        compute_dtype: Of the weights in the loss, and of their gathers.
        grad_dtype: Of reductions; by default float32 or wider.
        groups_in_flight: Gathered groups alive at once, as `Overlap` bounds them.
        shard_layout: See `plan_group`.
        align: See `plan_row_atomic`.
        row_dims: See `plan_row_atomic`.

    Returns:
        The plan. Every group is taken to read its weights in its backward, so that they are gathered twice.

    Raises:
        DbufError: An unknown optimizer, a number that is not positive, or a strategy for another mesh.
        LayoutError: A block does not divide a tensor's rows.

    Example:
        >>> from dbuf.models import read_model
        >>> plan = plan_memory(read_model("llama3-8b").units, (64,), Strategy.zero3(), compute_dtype=torch.bfloat16)
        >>> plan.collectives, f"{plan.weights / 2**20:.0f} MiB", f"{plan.total / 2**30:.2f} GiB"
        ({'all_gather': 68, 'reduce_scatter': 34}, '479 MiB', '3.83 GiB')
    """
    _check(mesh_shape, optimizer)
    require_positive(microbatches, "microbatches", _WHERE, DbufError)
    require_positive(groups_in_flight, "groups_in_flight", _WHERE, DbufError)
    dp_size = strategy.dp_size(mesh_shape)
    main, options = torch.float32, dict[str, Any](shard_layout=shard_layout, align=align, row_dims=row_dims)
    layouts = [(group, plan_group(group.shapes, dp_size, strategy.optim, **options)) for group in groups]
    collectives: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    received = 0
    for group, layout in layouts:
        for transfer in step_transfers(layout, mesh_shape, strategy, microbatches, compute_dtype, grad_dtype or main):
            count = transfer.times * group.count
            collectives[transfer.kind] += count
            nbytes[transfer.kind] += count * transfer.nbytes
            received += count * transfer.received
    apart = strategy.keeps_weights_apart()
    return MemoryPlan(
        weights=_held(layouts, strategy.optim, mesh_shape) * main.itemsize,
        compute_weights=_held(layouts, strategy.params, mesh_shape) * compute_dtype.itemsize if apart else 0,
        gradients=_held(layouts, strategy.grads, mesh_shape) * main.itemsize,
        optimizer=_held(layouts, strategy.optim, mesh_shape, OPTIMIZERS[optimizer]),
        gathered=_gathered(layouts, strategy, mesh_shape, groups_in_flight) * compute_dtype.itemsize,
        collectives=dict(collectives),
        nbytes=dict(nbytes),
        received=received,
    )


def _held(
    layouts: Sequence[tuple[_Group, GlobalLayout]],
    placements: Placements,
    mesh_shape: tuple[int, ...],
    weight: float | Callable[[Shape], float] = 1.0,
) -> int:
    """The most that any rank holds of all groups, in elements, or by the weight of an element."""
    parts = ranks_along_shards(placements, mesh_shape)
    total = [0.0] * parts
    for group, layout in layouts:
        weigh = [weight(shape) for shape in layout.tensor_shapes] if callable(weight) else []
        cuts = (*layout.rank_to_offset[:: layout.dp_size // parts], layout.size)
        for part, (start, stop) in enumerate(pairwise(cuts)):
            if callable(weight):
                held = sum(weigh[t] * numel for t, _, numel, _ in layout.pieces(start, stop - start))
            else:
                held = weight * (stop - start)
            total[part] += group.count * held
    return round(max(total))


def _gathered(
    layouts: Sequence[tuple[_Group, GlobalLayout]], strategy: Strategy, mesh_shape: tuple[int, ...], at_once: int
) -> int:
    """Elements of the largest gathered groups that are alive at once."""
    if ranks_along_shards(strategy.params, mesh_shape) == 1:
        return 0
    largest = sorted(((layout.size, group.count) for group, layout in layouts), reverse=True)
    return sum([size for size, count in largest for _ in range(min(count, at_once))][:at_once])


def _check(mesh_shape: tuple[int, ...], optimizer: str) -> None:
    for size in mesh_shape:
        require_positive(size, "mesh", _WHERE, DbufError)
    if optimizer not in OPTIMIZERS:
        raise DbufError(
            explain(
                _WHERE,
                "no such optimizer.",
                got=repr(optimizer),
                need=", ".join(OPTIMIZERS),
                fix='optimizer="adamw", which holds two floats an element',
            )
        )
