"""Differentiation over buffers.

The rule: the gradient of a sharded buffer is a sharded buffer with the same layout, of a replicated one
`Partial("sum")`, of a partial one replicated.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from dbuf import tree as trees
from dbuf.buffer import DBuffer, buffers, is_buffer
from dbuf.compat import inside_func_transform
from dbuf.errors import DbufError, PlacementError, TreeError, explain
from dbuf.mesh import DeviceMesh, MeshSum

__all__ = ["grad", "require_one_mesh", "value_and_grad", "widest_mesh"]

Function = Callable[..., Any]
_inside = contextvars.ContextVar("inside a function that is being differentiated", default=False)


def value_and_grad(
    fn: Function,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    reduction: str = "mean",
    mean_over: Sequence[str] | str | None = None,
) -> Function:
    """A function that returns this rank's loss and the gradients as buffers in the dual placements.

    Args:
        fn: `fn(*args) -> loss`, or `(loss, aux)` with `has_aux`; the loss is this rank's own, a 0-d tensor.
        argnums: Which arguments to differentiate; each a pytree of floating DBuffers.
        has_aux: Whether `fn` returns something besides the loss.
        reduction: `"mean"` divides by the number of ranks, as DDP and FSDP do; `"sum"` does not.
        mean_over: Mesh axes to average over; needed when buffers of one tree live on meshes of different sizes.
            By default all axes of the buffers' mesh.

    Returns:
        `fn(*args, **kwargs) -> (loss, grads)`, or `((loss, aux), grads)`. The loss is detached and this rank's
        own: `dbuf.pmean` it for a report. `grads` has the structure of the argument, or is a tuple of them when
        `argnums` is a sequence. A buffer that `fn` does not use gets zeros.

    Raises:
        TreeError: A differentiated argument holds a plain floating tensor, whose gradient nobody would
            synchronise, or no buffer at all; the loss is not a floating scalar; buffers of several mesh sizes
            without `mean_over`.
        DbufError: The loss reads no buffer; called inside a `torch.func` transform, or inside another `value_and_grad`,
            where what is differentiated twice would be lost. Under `torch.no_grad()` the inner one is a constant.

    Communication:
        The transposes of the movements inside `fn`; nothing of its own.

    Example:
        >>> import dbuf
        >>> w = dbuf.shard({"w": torch.tensor([1.0, 2.0])}, dbuf.init_mesh(), dbuf.RowAtomic())
        >>> loss, grads = value_and_grad(dbuf.gathered(lambda p: (p["w"] ** 2).sum()))(w)
        >>> loss, grads.local
        (tensor(5.), tensor([2., 4.]))
    """
    if reduction not in ("mean", "sum"):
        raise DbufError(
            explain(
                "dbuf.value_and_grad",
                "no such reduction.",
                got=repr(reduction),
                need='"mean" or "sum"',
                fix='reduction="mean"',
            )
        )
    positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    @functools.wraps(fn, updated=())  # Dynamo knows no `__dict__` of a functools.partial
    def with_grads(*args: Any, **kwargs: Any) -> Any:
        _check_argnums(positions, len(args))
        chosen = [args[i] for i in positions]
        _check_differentiable(chosen)
        inputs = [buf for arg in chosen for buf in buffers(arg)]
        variables = [buf.local.detach().requires_grad_() for buf in inputs]
        with torch.enable_grad(), _differentiating():
            out = fn(*_replace(args, positions, variables), **kwargs)
            loss, aux = out if has_aux else (out, None)
            _check_loss(loss)
            _check_reads(loss)
            ranks = _num_ranks(inputs, mean_over) if reduction == "mean" else 1
            # Scaling the seed scales every gradient before any of them is reduced. 1 / 3 is no bf16 number, so a
            # loss in low precision is seeded with one, and its gradients are scaled where they are more precise.
            low = loss.dtype in (torch.bfloat16, torch.float16)
            seed = torch.full_like(loss, 1.0 if low else 1.0 / ranks)
            grads = torch.autograd.grad(loss, variables, grad_outputs=seed, allow_unused=True)
        duals = [
            DBuffer(torch.zeros_like(buf.local) if g is None else g * (1.0 / ranks) if low else g, buf.spec.dual())
            for buf, g in zip(inputs, grads, strict=True)
        ]
        result = _regroup(chosen, duals)
        value = (loss.detach(), trees.map(_detach, aux)) if has_aux else loss.detach()
        return value, (result[0] if isinstance(argnums, int) else tuple(result))

    return with_grads


def grad(
    fn: Function,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    reduction: str = "mean",
    mean_over: Sequence[str] | str | None = None,
) -> Function:
    """`value_and_grad` without the value: returns `grads`, or `(grads, aux)` with `has_aux`.

    Example:
        >>> import dbuf
        >>> w = dbuf.shard({"w": torch.tensor([1.0, 2.0])}, dbuf.init_mesh(), dbuf.RowAtomic())
        >>> grad(dbuf.gathered(lambda p: (p["w"] ** 2).sum()))(w).local
        tensor([2., 4.])
    """
    both = value_and_grad(fn, argnums, has_aux, reduction, mean_over)

    @functools.wraps(fn, updated=())
    def only_grads(*args: Any, **kwargs: Any) -> Any:
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return only_grads


def _check_argnums(positions: tuple[int, ...], count: int) -> None:
    if len(set(positions)) == len(positions) and all([0 <= i < count for i in positions]):
        return
    raise DbufError(
        explain(
            "dbuf.value_and_grad",
            "no such arguments to differentiate.",
            got=f"argnums={positions} of {count} positional arguments",
            need="positions of arguments, each once",
            fix="argnums=(0, 1), and pass those arguments by position",
        )
    )


def _replace(args: tuple[Any, ...], positions: tuple[int, ...], variables: list[torch.Tensor]) -> list[Any]:
    """The arguments with the locals of the buffers at `positions` replaced by `variables`, in order."""
    out = list(args)
    it = iter(variables)
    for i in positions:
        out[i] = trees.map(lambda b: DBuffer(next(it), b.spec) if is_buffer(b) else b, args[i], is_leaf=is_buffer)
    return out


def _regroup(chosen: list[Any], duals: list[DBuffer]) -> list[Any]:
    it = iter(duals)
    return [trees.map(lambda b: next(it) if is_buffer(b) else b, arg, is_leaf=is_buffer) for arg in chosen]


def _detach(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _num_ranks(inputs: list[DBuffer], mean_over: Sequence[str] | str | None) -> int:
    if mean_over is not None:
        axes = (mean_over,) if isinstance(mean_over, str) else tuple(mean_over)
        return MeshSum(widest_mesh(inputs), axes, "dbuf.value_and_grad").num_ranks()
    sizes = {_ranks_of(buf) for buf in inputs}
    if len(sizes) > 1:
        raise TreeError(
            explain(
                "dbuf.value_and_grad",
                "the buffers live on meshes of different sizes, so 'the number of ranks' has no meaning.",
                got=f"meshes of {sorted(sizes)} ranks",
                need="mean_over, the axes over which the loss is averaged",
                fix='dbuf.value_and_grad(fn, mean_over=("dp",))',
            )
        )
    return math.prod(sizes)


def widest_mesh(bufs: list[DBuffer]) -> DeviceMesh:
    """The mesh, among those of the buffers, of the most ranks."""
    widest = bufs[0]
    for buf in bufs:  # Dynamo does not know `max` with a key
        widest = buf if _ranks_of(buf) > _ranks_of(widest) else widest
    return widest.spec.mesh


def require_one_mesh(where: str, bufs: list[DBuffer], fix: str) -> None:
    """Refuse buffers on meshes that are no slices of the widest one, nor it.

    Raises:
        PlacementError: Names two of them.
    """
    widest = widest_mesh(bufs)
    for buf in bufs:
        lacking = set(buf.mesh.mesh_dim_names or ()) - set(widest.mesh_dim_names or ())
        if lacking or (buf.mesh.size() == widest.size() and buf.mesh != widest):
            raise PlacementError(
                explain(
                    where,
                    "the buffers live on meshes of which none holds the others.",
                    got=f"{buf.mesh} and {widest}",
                    need="one mesh, and slices of it such as mesh['inner']",
                    fix=fix,
                )
            )


def _ranks_of(buf: DBuffer) -> int:
    return buf.spec.num_ranks()


@contextlib.contextmanager
def _differentiating() -> Iterator[None]:
    if torch.compiler.is_compiling():
        yield
        return
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


def _check_differentiable(chosen: list[Any]) -> None:
    where = "dbuf.value_and_grad"
    if torch.compiler.is_compiling():
        return
    if inside_func_transform():
        raise DbufError(
            explain(
                where,
                "called inside a torch.func transform.",
                got="an outer torch.func.grad, vjp or vmap",
                need="the outermost differentiation of a step: it runs torch.autograd inside",
                fix="torch.func.grad over the dbuf movements themselves, or dbuf.grad alone",
            )
        )
    if _inside.get() and torch.is_grad_enabled():
        raise DbufError(
            explain(
                where,
                "called inside another dbuf.value_and_grad.",
                got="an outer one, which sees no derivative of the inner gradients",
                need="one differentiation a step, or an inner one that is a constant",
                fix="torch.func.grad over the dbuf movements for second derivatives; torch.no_grad() around a constant",
            )
        )
    named = [item for arg in chosen for item in trees.flatten_with_paths(arg, is_leaf=is_buffer)[0]]
    bad = [f"{p or 'the argument'}: {_kind(leaf)}" for p, leaf in named if not _is_differentiable(leaf)]
    if bad or not named:
        raise TreeError(
            explain(
                where,
                "a differentiated argument may hold floating DBuffers alone.",
                got="\n".join(bad) or "no buffer",
                need="DBuffers: the gradient of a plain tensor would not be synchronised over ranks",
                fix="dbuf.shard(tensors, mesh, Replicate()), or pass it as another argument",
            )
        )


def _kind(leaf: Any) -> str:
    return f"DBuffer of {leaf.dtype}" if is_buffer(leaf) else type(leaf).__name__


def _is_differentiable(leaf: Any) -> bool:
    if is_buffer(leaf):
        return bool(leaf.local.dtype.is_floating_point)
    return not isinstance(leaf, torch.Tensor) or not leaf.dtype.is_floating_point


def _check_reads(loss: torch.Tensor) -> None:
    if not torch.compiler.is_compiling() and not loss.requires_grad:
        raise DbufError(
            explain(
                "dbuf.value_and_grad",
                "the loss reads none of the buffers.",
                got="a loss that requires no gradient",
                need="a loss of the differentiated arguments, on every rank: the others wait in its collectives",
                fix="the forward of an empty batch as well; no detach, no torch.no_grad() around it",
            )
        )


def _check_loss(loss: Any) -> None:
    if isinstance(loss, torch.Tensor) and loss.ndim == 0 and loss.dtype.is_floating_point:
        return
    got = f"{loss.dtype} of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    raise TreeError(
        explain(
            "dbuf.value_and_grad",
            "the loss is not a floating scalar.",
            got=got,
            need="a 0-d floating tensor",
            fix="loss.mean(), or has_aux=True for fn that returns (loss, aux)",
        )
    )
