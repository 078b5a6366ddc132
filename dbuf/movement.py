"""The public movements: each is a view of the transition table in `dbuf.plan.route`.

Every function takes a pytree of DBuffers and placement specs, plans each buffer's route in integers, and then runs
the routes: all are started before any is waited for, but for eager ones on gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch

from dbuf import tree as trees
from dbuf.buffer import DBuffer, is_buffer, require_buffers
from dbuf.collectives import move
from dbuf.errors import DbufError, PlacementError, explain
from dbuf.layout import GlobalLayout
from dbuf.mesh import runs_together
from dbuf.placement import Placement, Placements, ShardLayout, describe, is_placement
from dbuf.plan.route import split
from dbuf.refusals import refuse_no_dtype
from dbuf.spec import BufferSpec

__all__ = ["allgather", "allreduce", "gather_for", "redistribute", "reduce_scatter", "view"]

_R = TypeVar("_R")


def allgather(
    bufs: Any,
    placements: Any = None,
    *,
    dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
) -> Any:
    """Give every rank along the changed axes the whole buffer.

    `shard -> Replicate`; other axes unchanged.

        rank 0: [a a .]            rank 0: [a a . b b .]
        rank 1: [b b .]      =>    rank 1: [a a . b b .]      (. = padding)

    Args:
        bufs: A pytree of DBuffers.
        placements: Placement specs; by default every sharded axis becomes `Replicate`.
        dtype: Cast to this before the wire; the result has it.
        grad_dtype: The dtype in which the gradient is reduced. By default fp32 for a bf16 or fp16 wire, otherwise
            the wire's own.

    Returns:
        The same tree of new buffers; one with nothing to change is itself.

    Raises:
        PlacementError: The change holds anything but gathers.

    Communication:
        One all-gather per changed axis, outer first; each rank receives `(n - 1) * local_numel * itemsize` bytes.
        None if `n == 1`. Uneven segments are padded on the wire to the largest and copied out after.

    Gradient:
        One reduce-scatter (sum): the dual of Replicate is Partial.

    Source:
        ZeRO stage 3 (Rajbhandari et al., 2020); `DBuffer` of Megatron-FSDP.

    Example:
        >>> import dbuf
        >>> buf = dbuf.shard({"w": torch.ones(2, 2)}, dbuf.init_mesh(), dbuf.RowAtomic())
        >>> allgather(buf).placements
        (Replicate(),)
    """
    default = BufferSpec.gathered_placements
    return _move_all("allgather", bufs, placements, default, dtype=dtype, grad_dtype=grad_dtype)


def gather_for(bufs: Any, where: str, *, dtype: torch.dtype | None, grad_dtype: torch.dtype | None, again: bool) -> Any:
    """`allgather` of all that is sharded, for the function `where`; `again` marks nodes to repeat in the backward."""
    default = BufferSpec.gathered_placements
    return _move_all("allgather", bufs, None, default, where=where, dtype=dtype, grad_dtype=grad_dtype, again=again)


def reduce_scatter(bufs: Any, placements: Any, *, dtype: torch.dtype | None = None) -> Any:
    """Sum contributions and leave each rank with its part of the result.

    `Partial -> shard`; other axes unchanged. `Partial("avg")` divides by the ranks of the axis.

        rank 0: [a a b b]            rank 0: [A A]
        rank 1: [a a b b]      =>    rank 1: [B B]      (A = the sum of a over ranks)

    Args:
        bufs: A pytree of DBuffers.
        placements: Placement specs of the result.
        dtype: Cast to this before the wire; the sum runs in it and the result has it.

    Returns:
        The same tree of new buffers.

    Raises:
        PlacementError: The change holds anything but reduce-scatters.

    Communication:
        One reduce-scatter per changed axis, inner first; each rank sends `(n - 1) / n * local_numel * itemsize`
        bytes. None if `n == 1`. For uneven segments the parts are padded to the largest.

    Gradient:
        One all-gather.

    Source:
        ZeRO stage 2 (Rajbhandari et al., 2020).
    """
    return _move_all("reduce_scatter", bufs, placements, None, dtype=dtype)


def allreduce(bufs: Any, placements: Any = None) -> Any:
    """Sum contributions and give every rank the result.

    `Partial -> Replicate`; other axes unchanged. `Partial("avg")` divides by the ranks of the axis.

        rank 0: [a b]            rank 0: [A B]
        rank 1: [a b]      =>    rank 1: [A B]      (A = the sum of a over ranks)

    Args:
        bufs: A pytree of DBuffers.
        placements: Placement specs; by default every partial axis becomes `Replicate`.

    Returns:
        The same tree of new buffers; one with nothing to change is itself.

    Raises:
        PlacementError: The change holds anything but all-reduces.

    Communication:
        One all-reduce per changed axis, `2 * (n - 1) / n * local_numel * itemsize` bytes a rank. None if `n == 1`.

    Gradient:
        One all-reduce (sum): Partial and Replicate are each other's duals.
    """
    return _move_all("allreduce", bufs, placements, BufferSpec.reduced_placements)


def view(bufs: Any, placements: Any) -> Any:
    """Look at this rank's part of a replicated buffer.

    `Replicate -> shard`; other axes unchanged.

        rank 0: [a a b b]            rank 0: [a a]
        rank 1: [a a b b]      =>    rank 1: [b b]

    Args:
        bufs: A pytree of DBuffers.
        placements: Placement specs of the result.

    Returns:
        The same tree of buffers whose local tensors are slices of the old ones: they alias them.

    Raises:
        PlacementError: The change holds anything but views.

    Communication:
        None.

    Gradient:
        Zeros outside the slice, without communication: the dual of Replicate is Partial.
    """
    return _move_all("view", bufs, placements, None)


def redistribute(bufs: Any, placements: Any, *, layout: Any = None) -> Any:
    """Go from any placements to any others, and to another layout.

    Walks the transition table: reductions and views inner to outer, then gathers outer to inner. To another layout
    or to a kind of shard that this layout does not fit: one all-to-all among the ranks that hold one copy between
    them.

        rank 0: [a a b]            rank 0: [a a a]
        rank 1: [. b .]      =>    rank 1: [b b .]      (RowAtomic -> TensorAtomic)

    Args:
        bufs: A pytree of DBuffers.
        placements: Placement specs of the result.
        layout: Where the tensors shall lie: a planned layout, or a `ShardLayout` to plan one with as many segments
            as now; one for all buffers, or a prefix tree of them. None keeps each buffer's own.

    Returns:
        The same tree of new buffers.

    Raises:
        PlacementError: A partial axis would change its reduction.
        LayoutError: A layout does not fit the tensors, the placements or the mesh.

    Communication:
        That of the rows it takes; for a layout, one all-to-all with static splits in which each rank sends at most
        what it holds.

    Gradient:
        The exact transpose, row by row in reverse.
    """
    return _move_all("redistribute", bufs, placements, None, layout=layout)


def _move_all(
    function: str,
    bufs: Any,
    placements: Any,
    default: Callable[[BufferSpec], Placements] | None,
    *,
    layout: Any = None,
    dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
    again: bool = False,
    where: str = "",
) -> Any:
    where = where or f"dbuf.{function}"
    given = require_buffers(bufs, where)
    refuse_no_dtype(dtype, where)
    refuse_no_dtype(grad_dtype, where)
    if placements is None and default is not None:
        wanted: list[Any] = [default(buf.spec) for buf in given]
    else:
        wanted = _broadcast(placements, bufs, where, _is_placement_spec)
    layouts = [None] * len(given) if layout is None else _broadcast(layout, bufs, where, _is_layout)
    planned = []
    for i, buf in enumerate(given):
        place = _Place(where, bufs, i)
        target = _target(buf, wanted[i], layouts[i], place)
        steps = _route(buf, target, function, place)
        if not buf.local.is_floating_point() and any([step[0] == "scale" for step in steps]):
            _refuse_average_of_integers(buf, where)
        planned.append((buf, target, steps))
    moved = iter(_run(planned, function, dtype, grad_dtype, again))
    return trees.map(lambda buf: buf if buf is None else next(moved), bufs, is_leaf=is_buffer)


def _broadcast(prefix: Any, bufs: Any, where: str, is_prefix_leaf: Callable[[Any], bool]) -> list[Any]:
    """What a prefix tree says of each buffer."""
    wanted = trees.broadcast_prefix(prefix, bufs, is_prefix_leaf=is_prefix_leaf, is_leaf=is_buffer, where=where)
    return [spec for spec, leaf in zip(wanted, trees.leaves(bufs, is_leaf=is_buffer), strict=True) if leaf is not None]


def _run(
    planned: list[tuple[DBuffer, BufferSpec, Any]],
    function: str,
    dtype: torch.dtype | None,
    grad_dtype: torch.dtype | None,
    again: bool,
) -> list[DBuffer]:
    """Run the routes; where there are several, start all before waiting for any.

    Outside a trace gloo gets one after the other.
    """
    together = len(planned) > 1 and (torch.compiler.is_compiling() or runs_together(planned[0][0].mesh))
    started: list[tuple[DBuffer, Any]] = []
    for buf, target, steps in planned:
        wire, back = _wire(buf, function, dtype, grad_dtype)
        if not steps and wire is None:
            started.append((buf if target == buf.spec else DBuffer(buf.local, target), ()))
        elif function == "view":
            started.append((DBuffer(_slice(buf.local, steps), target), ()))
        else:
            head, tail = split(steps) if together else (steps, ())
            started.append((DBuffer(move(buf.local, head, wire, back, again), target), tail))
    return [DBuffer(move(buf.local, tail, None, None, again), buf.spec) if tail else buf for buf, tail in started]


def _slice(x: torch.Tensor, steps: Any) -> torch.Tensor:
    """A chain of views as slices that alias: each step copies one run, and here it need not."""
    for _, _, pieces in steps:
        start, numel = pieces[0] if pieces else (0, 0)
        x = x[start : start + numel]
    return x


def _wire(
    buf: DBuffer, function: str, dtype: torch.dtype | None, grad_dtype: torch.dtype | None
) -> tuple[torch.dtype | None, torch.dtype | None]:
    """The dtype to cast to before the wire, if any, and that of the gradient's way back.

    What a gather is not told it takes from the buffer. Gradients of a low-precision wire are summed in fp32 unless
    somebody says otherwise.
    """
    if function == "allgather":
        of_buffer, of_gradient = buf.spec.wire
        dtype = of_buffer if dtype is None else dtype
        grad_dtype = of_gradient if grad_dtype is None else grad_dtype
    wire = None if dtype is None or dtype == buf.local.dtype else dtype
    if grad_dtype is None and (buf.local.dtype if wire is None else wire) in (torch.bfloat16, torch.float16):
        grad_dtype = torch.float32
    return wire, grad_dtype


class _Place:
    """Where an error happened: the function, and the path of the buffer, found only when there is an error."""

    def __init__(self, where: str, bufs: Any, index: int) -> None:
        self.where = where
        self.bufs = bufs
        self.index = index

    def call(self, fn: Callable[[str], _R]) -> _R:
        """`fn(where)`; if it fails in eager, again with the path in its message."""
        if torch.compiler.is_compiling():
            return fn(self.where)
        try:
            return fn(self.where)
        except DbufError as error:
            named = trees.flatten_with_paths(self.bufs, is_leaf=is_buffer)[0]
            path = [path for path, buf in named if buf is not None][self.index]
            if not path:
                raise
            raise type(error)(str(error).replace(f"{self.where}:", f"{self.where}: bufs{path}", 1)) from None


def _target(
    buf: DBuffer, placements: Placement | Placements, layout: ShardLayout | GlobalLayout | None, place: _Place
) -> BufferSpec:
    if layout is None:
        return place.call(lambda where: buf.spec.with_placements(placements, where))
    return place.call(lambda where: buf.spec.with_layout(placements, layout, where))


def _route(buf: DBuffer, target: BufferSpec, function: str, place: _Place) -> Any:
    return place.call(lambda where: buf.spec.route(target, function, where))


def _is_placement_spec(node: object) -> bool:
    """A placement, or a tuple made only of them."""
    if isinstance(node, tuple):
        return len(node) > 0 and all([is_placement(p) for p in node])
    return is_placement(node)


def _is_layout(node: object) -> bool:
    return isinstance(node, GlobalLayout | str)


def _refuse_average_of_integers(buf: DBuffer, where: str) -> NoReturn:
    raise PlacementError(
        explain(
            where,
            "an average of integers is not an integer.",
            got=f"{buf.dtype} at {describe(buf.placements)}",
            need='a floating dtype, or Partial("sum")',
            fix="dbuf.cast(bufs, torch.float32)",
        )
    )
