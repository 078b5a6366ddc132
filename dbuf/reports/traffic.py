"""The collectives of a training step, from layouts alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from dbuf.layout import GlobalLayout
from dbuf.placement import Partial, Placements, Replicate, is_sharded
from dbuf.plan.route import plan_route
from dbuf.train.strategy import Strategy

__all__ = ["Transfer", "ranks_along_shards", "step_transfers"]


class Transfer(NamedTuple):
    """A collective of a step.

    Attributes:
        kind: As in `dbuf.inspection.Collective`.
        ranks: Ranks that take part.
        nbytes: Bytes of its larger side.
        times: How often a step does it.
    """

    kind: str
    ranks: int
    nbytes: int
    times: int

    @property
    def received(self) -> int:
        """Bytes that a rank receives: of all other ranks their part; twice for an all-reduce."""
        return (2 if self.kind == "all_reduce" else 1) * (self.ranks - 1) * self.nbytes // self.ranks


def ranks_along_shards(placements: Placements, mesh_shape: tuple[int, ...]) -> int:
    """The product of the sharded axes' sizes.

    Example:
        >>> from dbuf import RowAtomic
        >>> ranks_along_shards((Replicate(), RowAtomic()), (4, 8))
        8
    """
    return math.prod(size for size, placement in zip(mesh_shape, placements, strict=True) if is_sharded(placement))


def step_transfers(
    layout: GlobalLayout,
    mesh_shape: tuple[int, ...],
    strategy: Strategy,
    microbatches: int,
    compute_dtype: torch.dtype,
    grad_dtype: torch.dtype,
) -> Iterator[Transfer]:
    """What one group moves in a step of `dbuf.train`: gathers, reductions, and new weights to where they rest.

    Its weights are gathered for the forward and again for the backward.
    """
    whole, raw = tuple(Replicate() for _ in mesh_shape), tuple(Partial("sum") for _ in mesh_shape)
    moves = (
        (strategy.params, whole, compute_dtype, 2 * microbatches),
        (raw, strategy.grads, grad_dtype, microbatches),
        (strategy.grads, strategy.optim, grad_dtype, 1),
        (strategy.optim, strategy.params, compute_dtype, 1),
    )
    for source, target, dtype, times in moves:
        for kind, ranks, numel in _route(layout, source, target, mesh_shape):
            yield Transfer(kind, ranks, numel * dtype.itemsize, times)


def _route(
    layout: GlobalLayout, source: Placements, target: Placements, mesh_shape: tuple[int, ...]
) -> Iterator[tuple[str, int, int]]:
    """Kind, ranks and elements of the larger side of each collective between two placements."""
    origin = (0,) * len(mesh_shape)
    numel = layout.local_range(source, mesh_shape, origin)[1]
    for hop in plan_route(source, layout, target, layout, mesh_shape, origin):
        for step in hop.steps:
            if step[0] == "rearrange":
                numel = sum(length for _, length in step[2])
            elif step[0] == "all_gather":
                numel *= step[1]
                yield "all_gather", step[1], numel
            elif step[0] == "reduce_scatter":
                yield "reduce_scatter", step[1], numel
                numel //= step[1]
            elif step[0] == "all_reduce":
                yield "all_reduce", step[1], numel
