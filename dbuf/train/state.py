"""`TrainState`: everything that a step carries to the next, as one pytree."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch

from dbuf import tree as trees
from dbuf.agreement import check
from dbuf.buffer import cast, is_buffer, require_buffers
from dbuf.errors import TreeError, explain
from dbuf.movement import redistribute
from dbuf.optim import GradientTransformation
from dbuf.optim.base import device_of, state_dtype
from dbuf.refusals import refuse_partial
from dbuf.train.strategy import Strategy

__all__ = ["Strategies", "TrainState", "init", "of_each", "resting_weights"]

Strategies: TypeAlias = Any
"""A `Strategy`, or a prefix tree of them over the tree of parameters, for groups on different meshes."""


class TrainState(NamedTuple):
    """What a training step takes and returns.

    Attributes:
        step: Updates done, a 0-d int64 tensor.
        params: The main weights, where the strategy's optimizer works; float32 or wider.
        opt_state: The optimizer's state.
        compute: The weights that the loss reads, where they rest elsewhere than `params`; None in place of a buffer
            whose main weights serve.
        skipped: Updates left out because a gradient was not finite, a 0-d int64 tensor.
    """

    step: torch.Tensor
    params: Any
    opt_state: Any
    compute: Any
    skipped: torch.Tensor

    @property
    def weights(self) -> Any:
        """The weights that the loss reads, for evaluation: `compute`, and `params` where that has none."""
        return trees.map(
            lambda apart, main: main if apart is None else apart, self.compute, self.params, is_leaf=_is_node
        )


def init(
    params: Any,
    optimizer: GradientTransformation,
    strategy: Strategies,
    *,
    compute_dtype: torch.dtype | None = None,
) -> TrainState:
    """The state before the first step.

    Args:
        params: A pytree of floating DBuffers, replicated or sharded, in a layout of `strategy.dp_size(mesh)` segments
            (or a multiple). The state takes them over: a step that donates it writes into them.
        optimizer: Its state is made for the main weights.
        strategy: One for all buffers, or a prefix tree of them.
        compute_dtype: The dtype that the loss computes in, as in `make_train_step`; by default the main weights'.

    Returns:
        The state. Main weights are float32 or wider.

    Raises:
        TreeError: No buffers, buffers that are not floating, or ranks that disagree about them.
        PlacementError: A buffer is partial, or the strategy is for another mesh.
        LayoutError: A buffer's layout has fewer segments than the strategy needs.

    Communication:
        One small exchange to compare ranks; a gather where weights rest less sharded than the optimizer's.

    Example:
        >>> import dbuf
        >>> from dbuf.train import Strategy
        >>> strategy, mesh = Strategy.zero3(), dbuf.init_mesh()
        >>> params = dbuf.shard({"w": torch.ones(3)}, mesh, strategy.optim, dp_size=strategy.dp_size(mesh))
        >>> init(params, dbuf.optim.sgd(0.1), strategy).step
        tensor(0)
    """
    _check(params, strategy)
    main = redistribute(params, of_each(strategy, "optim"))
    main = trees.map(lambda buf: buf and cast(buf, state_dtype(buf.dtype)), main, is_leaf=is_buffer)
    zero = torch.zeros((), dtype=torch.int64, device=device_of(main))
    compute = resting_weights(main, strategy, compute_dtype)
    # Where nothing had to move or to be cast they are views of the main weights, and a donated state may not overlap.
    compute = trees.map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, compute)
    return TrainState(zero, main, optimizer.init(main), compute, zero.clone())


def resting_weights(main: Any, strategy: Strategies, compute_dtype: torch.dtype | None) -> Any:
    """`main` cast, then moved to where the weights rest; None for buffers that rest where they are."""
    wanted = trees.broadcast_prefix(
        strategy, main, is_prefix_leaf=is_strategy, is_leaf=is_buffer, where="dbuf.train: strategy"
    )
    bufs = trees.leaves(main, is_leaf=is_buffer)
    apart = [i for i, one in enumerate(wanted) if bufs[i] is not None and one.keeps_weights_apart()]
    low = [bufs[i] if compute_dtype is None else cast(bufs[i], compute_dtype) for i in apart]
    moved = dict(zip(apart, redistribute(low, [wanted[i].params for i in apart]) if apart else [], strict=True))
    each = iter([moved.get(i) for i in range(len(bufs))])
    return trees.map(lambda _: next(each), main, is_leaf=is_buffer)


def of_each(strategy: Strategies, field: str) -> Any:
    """The placements of one field, as a placement spec for the movements."""
    return trees.map(lambda one: getattr(one, field), strategy, is_leaf=is_strategy)


def is_strategy(node: object) -> bool:
    """Whether a node of a prefix tree is a strategy."""
    return isinstance(node, Strategy)


def _is_node(node: object) -> bool:
    return node is None or is_buffer(node)


def _check(params: Any, strategy: Strategies) -> None:
    where = "dbuf.train.init"
    bufs = require_buffers(params, where)
    dtypes = {str(buf.dtype) for buf in bufs if not buf.dtype.is_floating_point}
    if dtypes or not bufs:
        raise TreeError(
            explain(
                where,
                "parameters are floating DBuffers.",
                got=f"buffers of {', '.join(sorted(dtypes))}" if dtypes else "no buffer",
                need="a pytree of floating buffers, one a group",
                fix="dbuf.shard(tensors, mesh, strategy.optim, dp_size=strategy.dp_size(mesh))",
            )
        )
    wanted = trees.broadcast_prefix(strategy, params, is_prefix_leaf=is_strategy, is_leaf=is_buffer, where=where)
    for buf, one in zip(trees.leaves(params, is_leaf=is_buffer), wanted, strict=True):
        if buf is not None:
            refuse_partial(buf.spec, where)
            one.dp_size(buf.mesh)  # refuses a mesh of other axes
            for placements in (one.params, one.grads, one.optim):
                buf.spec.with_placements(placements, where)
    check(params, where)
