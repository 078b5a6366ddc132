"""`Strategy`: where parameters rest, where gradients accumulate, where the optimizer works."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NoReturn

from dbuf import mesh as meshes
from dbuf.errors import PlacementError, explain
from dbuf.mesh import DeviceMesh
from dbuf.placement import (
    Partial,
    Placement,
    Placements,
    Replicate,
    RowAtomic,
    ShardPlacement,
    describe,
    dual_placements,
    is_sharded,
    normalize,
    shard_placement,
)

__all__ = ["Strategy"]

_WHERE = "dbuf.train.Strategy"


@dataclasses.dataclass(frozen=True)
class Strategy:
    """Where parameters rest, gradients accumulate and the optimizer works: three placement tuples.

    With R for `Replicate`, P for `Partial("sum")` and S for a shard:

        strategy, mesh      params   grads    optim    a step of G groups and m microbatches moves
        ddp                 R        P        R        G all-reduces
        zero1               R        P        S        G reduce-scatters, G all-gathers
        zero2               R        S        S        m G reduce-scatters, G all-gathers
        zero3 (fsdp)        S        S        S        m G reduce-scatters, 2 m G all-gathers
        hsdp (outer, inner) R, S     P, S     R, S     those of zero3 over inner, G all-reduces over outer
        hfsdp               R, S     P, S     S, S     those of zero3 over inner, G of each over outer

    Every other legal triple is a strategy too. Where parameters are sharded, a step gathers them as `gathered`
    asks, so a group whose backward reads no weight saves its second gather.

    Attributes:
        params: Where the weights rest that the loss reads; R and S.
        grads: Where gradients accumulate over microbatches; P, R and S.
        optim: Where the main weights and the optimizer's state live; R and S.

    Raises:
        PlacementError: The three are no strategy of one mesh; the message says why.

    Source:
        ZeRO, Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054; HSDP and FSDP of PyTorch; HFSDP of
        Megatron-FSDP.

    Example:
        >>> Strategy.zero2()
        Strategy(params=(Replicate(),), grads=(RowAtomic(),), optim=(RowAtomic(),))
    """

    params: Placements
    grads: Placements
    optim: Placements

    def __post_init__(self) -> None:
        for field in ("params", "grads", "optim"):
            placements = getattr(self, field)
            ndim = len(placements) if isinstance(placements, tuple | list) else 1
            object.__setattr__(self, field, normalize(placements, ndim, f"{_WHERE}: {field}"))
        self._check()

    @classmethod
    def ddp(cls, axes: int = 1) -> Strategy:
        """Everything replicated, gradients summed once a step; on a mesh of any number of axes."""
        return cls((Replicate(),) * axes, (Partial("sum"),) * axes, (Replicate(),) * axes)

    @classmethod
    def zero1(cls, shard: ShardPlacement = RowAtomic(), axes: int = 1) -> Strategy:  # noqa: B008  (a constant)
        """The optimizer's state sharded."""
        return cls((Replicate(),) * axes, (Partial("sum"),) * axes, (shard,) * axes)

    @classmethod
    def zero2(cls, shard: ShardPlacement = RowAtomic(), axes: int = 1) -> Strategy:  # noqa: B008
        """State and gradients sharded."""
        return cls((Replicate(),) * axes, (shard,) * axes, (shard,) * axes)

    @classmethod
    def zero3(cls, shard: ShardPlacement = RowAtomic(), axes: int = 1) -> Strategy:  # noqa: B008
        """State, gradients and parameters sharded: FSDP."""
        return cls((shard,) * axes, (shard,) * axes, (shard,) * axes)

    @classmethod
    def fsdp(cls, shard: ShardPlacement = RowAtomic(), axes: int = 1) -> Strategy:  # noqa: B008
        """The other name of `zero3`."""
        return cls.zero3(shard, axes)

    @classmethod
    def hsdp(cls, shard: ShardPlacement = RowAtomic()) -> Strategy:  # noqa: B008
        """On a mesh (outer, inner): sharded over inner, replicated over outer."""
        return cls((Replicate(), shard), (Partial("sum"), shard), (Replicate(), shard))

    @classmethod
    def hfsdp(cls, shard: ShardPlacement = RowAtomic()) -> Strategy:  # noqa: B008
        """On a mesh (outer, inner): parameters sharded over inner, the optimizer's state over both."""
        return cls((Replicate(), shard), (Partial("sum"), shard), (shard, shard))

    @property
    def ndim(self) -> int:
        """Axes of the meshes that this is a strategy for."""
        return len(self.params)

    def dp_size(self, mesh: DeviceMesh | Sequence[int]) -> int:
        """Segments that a group's layout needs: the ranks along every axis that is ever sharded.

        Args:
            mesh: A mesh, or the sizes of its axes, outermost first.

        Raises:
            PlacementError: It has another number of axes.

        Example:
            >>> Strategy.hsdp().dp_size((64, 8)), Strategy.hfsdp().dp_size((64, 8))
            (8, 512)
        """
        shape = tuple(mesh) if isinstance(mesh, Sequence) else meshes.shape_of(mesh)
        if len(shape) != self.ndim:
            _refuse(
                f"a strategy for {self.ndim} mesh axes meets a mesh of {len(shape)}.",
                got=f"{self} on {shape}",
                need="one entry a mesh axis in each of the three tuples",
                fix=f"dbuf.init_mesh with {self.ndim} axes, or another strategy",
            )
        return math.prod(size for axis, size in enumerate(shape) if self._is_ever_sharded(axis))

    def keeps_weights_apart(self) -> bool:
        """Whether the weights that the loss reads rest elsewhere than the main weights."""
        return self.params != self.optim

    def _is_ever_sharded(self, axis: int) -> bool:
        return any(is_sharded(placements[axis]) for placements in (self.params, self.grads, self.optim))

    def _check(self) -> None:
        tuples = {"params": self.params, "grads": self.grads, "optim": self.optim}
        got = "\n".join(f"{name}: {describe(placements)}" for name, placements in tuples.items())
        if len({len(placements) for placements in tuples.values()}) > 1:
            _refuse("the three are for meshes of different sizes.", got=got, need="tuples of one length", fix=_EXAMPLE)
        kinds = {shard_placement(placements) for placements in tuples.values()} - {None}
        if len(kinds) > 1:
            _refuse(
                "the three are sharded in different ways, and one layout serves all of them.",
                got=got,
                need="the same kind of shard everywhere",
                fix=f"{max(kinds, key=str)!r} in all three",
            )
        for name in ("params", "optim"):
            if any(isinstance(p, Partial) for p in tuples[name]):
                _refuse(
                    f"{name} are values, and contributions are none.",
                    got=got,
                    need=f"Replicate and shards in {name}",
                    fix=f'Replicate() in place of Partial("sum") in {name}',
                )
        for axis, (raw, wanted) in enumerate(zip(dual_placements(self.params), self.grads, strict=True)):
            self._check_gradient(axis, raw, wanted, got)

    def _check_gradient(self, axis: int, raw: Placement, wanted: Placement, got: str) -> None:
        """`raw` is where differentiation leaves the gradient."""
        if isinstance(wanted, Partial) and wanted != raw:
            what = "contributions again" if is_sharded(raw) else "an average"
            _refuse(
                f"on axis {axis} gradients would become {what}.",
                got=got,
                need=f"{describe(raw)} as differentiation leaves it, or what it reduces to",
                fix=f"{describe(raw)} on axis {axis} of grads",
            )


_EXAMPLE = "dbuf.train.Strategy.hsdp() for two axes, Strategy.zero3() for one"


def _refuse(what: str, *, got: str, need: str, fix: str) -> NoReturn:
    raise PlacementError(explain(_WHERE, what, got=got, need=need, fix=fix))
