"""The one door to the functional collectives: differentiable moves of 1-D tensors.

`move` executes the steps of a route (see `dbuf.plan.route`) and differentiates as their exact transpose, under
`.backward()`, `torch.func` and forward mode, in eager and in a compiled graph. torch's own formulas for these
collectives do not work under `torch.func` (pytorch#170834, #168393), so one `autograd.Function` holds the rule
instead, behind a function that Dynamo puts into its graph whole: AOTAutograd then traces through it, and Inductor
sees the native collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from dbuf.compat import allow_in_graph, annotate, kept_in_backward, merging_trace_length
from dbuf.plan.route import WAIT, ZEROS, Steps, transpose

__all__ = [
    "ALL_GATHER",
    "ALL_REDUCE",
    "ALL_TO_ALL",
    "GATHER_MARK",
    "REDUCE_SCATTER",
    "WAIT_FOR",
    "is_collective",
    "move",
]

GATHER_MARK = "dbuf_gather_again"
_ops: Any = torch.ops._c10d_functional
# What these are in a graph, for passes that change one.
ALL_GATHER, REDUCE_SCATTER = _ops.all_gather_into_tensor.default, _ops.reduce_scatter_tensor.default
ALL_REDUCE, ALL_TO_ALL = _ops.all_reduce.default, _ops.all_to_all_single.default
WAIT_FOR = _ops.wait_tensor.default


@allow_in_graph
def move(
    x: torch.Tensor,
    steps: Steps,
    wire: torch.dtype | None = None,
    back: torch.dtype | None = None,
    again: bool = False,
) -> torch.Tensor:
    """Run `steps` on a 1-D tensor.

    Args:
        x: Shape `(numel_in,)`.
        steps: From `plan_route`, with group names in place of axes.
        wire: The dtype to cast to first; the result has it. None keeps the dtype of `x`.
        back: The dtype in which the gradient travels and is reduced. None keeps the gradient's own.
        again: Mark the compiled nodes for repetition in the backward, instead of keeping their result.

    Returns:
        A new 1-D tensor, or `x` itself when there is nothing to do.

    Communication:
        The collectives among `steps`, in order.

    Gradient:
        `move` over `transpose(steps)`.
    """
    if not steps:
        return x if wire is None else x.to(wire)
    return cast(torch.Tensor, _Move.apply(x, steps, wire, back, again))  # type: ignore[no-untyped-call]


class _Move(torch.autograd.Function):
    """A linear map and its transpose."""

    @staticmethod
    def forward(
        x: torch.Tensor, steps: Steps, wire: torch.dtype | None, back: torch.dtype | None, again: bool
    ) -> torch.Tensor:
        if not again:
            return _run(x if wire is None else x.to(wire), steps)
        with annotate({GATHER_MARK: True}):
            return _run(x if wire is None else x.to(wire), steps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, ctx.steps, ctx.wire, ctx.back, _ = inputs
        ctx.dtype = x.dtype

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[Any, ...]:
        # On a rank that owns nothing a gradient may depend on nothing, and its collectives would move forward.
        with kept_in_backward():
            x_bar = move(cotangent, transpose(ctx.steps), ctx.back, ctx.wire).to(ctx.dtype)
        return x_bar, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: Any) -> torch.Tensor:
        return move(tangent, ctx.steps, ctx.wire, ctx.back)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, int]:
        # Without this rule vmap hands the collectives memory that nothing initialised, and no error.
        rows = [move(row, *rest) for row in x.movedim(in_dims[0], 0).unbind(0)]
        # Stacking reads the rows, so what has started cannot be left to a later wait.
        return torch.stack([move(row, (WAIT,)) for row in rows] if _has_started(rest[0]) else rows), 0


def _has_started(steps: Steps) -> bool:
    """Whether steps end with a collective that nobody has waited for."""
    return steps[-1][0] not in _LOCAL


def _run(x: torch.Tensor, steps: Steps) -> torch.Tensor:
    for step in steps:
        x = _EXECUTE[step[0]](x if step[0] in _LOCAL else _apart(x), *step[1:])
    return x


def _apart(x: torch.Tensor) -> torch.Tensor:
    """`x` itself; in a graph whose equal nodes are merged, by a view that no other node equals.

    Collectives with equal inputs are equal, and inputs may be so on some ranks alone: all that a rank owns nothing of
    looks the same. Merged there and not elsewhere, they would leave the ranks waiting for each other forever. What
    the view names, and no pass simplifies, is how long the graph was.
    """
    length = merging_trace_length()
    if length is None or not isinstance(x.shape[0], int):
        return x
    return x[-_BEYOND - length :]


def _rearrange(x: torch.Tensor, numel_in: int, pieces: tuple[tuple[int, int], ...]) -> torch.Tensor:
    assert x.shape == (numel_in,), f"a route planned for {numel_in} elements met {tuple(x.shape)}"
    if all(start == ZEROS for start, _ in pieces):
        # Zeros that depend on `x`: a compiler would move a constant, and the collective after it, out of the backward
        # on the ranks that own nothing, and the ranks would wait for each other in different places.
        return x[:0].to(torch.float32).sum().to(x.dtype).repeat(sum(numel for _, numel in pieces))
    runs = [x.new_zeros(numel) if start == ZEROS else x[start : start + numel] for start, numel in pieces]
    # A lone slice is copied too: a view would keep the padded wire buffer alive.
    return torch.cat(runs) if len(runs) > 1 else runs[0].clone()


def _all_gather(x: torch.Tensor, n: int, group: str) -> torch.Tensor:
    return _on_bytes(x, lambda y: _ops.all_gather_into_tensor(y.contiguous(), n, group))


def _reduce_scatter(x: torch.Tensor, n: int, group: str) -> torch.Tensor:
    return cast(torch.Tensor, _ops.reduce_scatter_tensor(x.contiguous(), "sum", n, group))


def _all_reduce(x: torch.Tensor, n: int, group: str) -> torch.Tensor:
    return cast(torch.Tensor, _ops.all_reduce(x.contiguous(), "sum", group))


def _all_to_all(x: torch.Tensor, received: tuple[int, ...], sent: tuple[int, ...], group: str) -> torch.Tensor:
    return _on_bytes(x, lambda y: _ops.all_to_all_single(y.contiguous(), list(received), list(sent), group))


def _broadcast(x: torch.Tensor, source: int, group: str) -> torch.Tensor:
    return _on_bytes(x, lambda y: _ops.broadcast(y.contiguous(), source, group))


def _on_bytes(x: torch.Tensor, op: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Gloo does not know float8, but moving it is moving bytes."""
    if x.dtype.itemsize != 1 or x.dtype in (torch.uint8, torch.int8):
        return op(x)
    return cast(torch.Tensor, _ops.wait_tensor(op(x.view(torch.uint8))).view(x.dtype))


def _wait(x: torch.Tensor) -> torch.Tensor:
    return cast(torch.Tensor, _ops.wait_tensor(x))


def _scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


_LOCAL = ("rearrange", "scale", "wait")
_BEYOND = 2**48  # more elements than a tensor has: a slice that starts so far before the end is the whole

_EXECUTE: dict[str, Callable[..., torch.Tensor]] = {
    "rearrange": _rearrange,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "wait": _wait,
    "scale": _scale,
}


def is_collective(target: object) -> bool:
    """Whether the target of a graph node starts a collective (a wait does not)."""
    packet = getattr(target, "overloadpacket", None)
    return packet in (
        _ops.all_gather_into_tensor,
        _ops.reduce_scatter_tensor,
        _ops.all_reduce,
        _ops.all_to_all_single,
        _ops.broadcast,
    )
