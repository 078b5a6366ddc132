"""value_and_grad, grad, gathered, compiled_once, remat.

The loss is a sum, so with whole numbers and reduction="sum" gradients are exact in bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

import dbuf
import reference
from dbuf import DBuffer, PlacementError, TreeError
from table.cells import Cell, fill, make_tensors
from table.row import Refusals, Row, entry


def loss(tree: Any, number: torch.Tensor) -> torch.Tensor:
    """Of some tensors: autograd keeps the first, and the others that it does not read get zeros."""
    tensors = [tensor for tensor in pytree.tree_leaves(tree) if tensor is not None]
    return (tensors[0] * tensors[0]).sum() + (tensors[1] * number).sum() + tensors[3].sum()


def loss_of_buffer(buf: DBuffer, number: torch.Tensor) -> torch.Tensor:
    return loss(dbuf.unpack(dbuf.allgather(buf)), number)


def _gradients(function: Callable[..., Any], c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    """Losses and gradients of sharded, replicated and partly sharded buffers."""
    whole = dbuf.value_and_grad(function, reduction="sum")
    mean = dbuf.value_and_grad(function)
    return {
        "sharded": lambda: _named(whole(x["small"], x["number"])),
        "replicated": lambda: _named(whole(x["small replicated"], x["number"])),
        "inner": lambda: _named(whole(x["small inner"], x["number"])),
        "about mean": lambda: _named(mean(x["random"], x["number"])),
    }


def _named(loss_and_gradient: tuple[Any, Any]) -> dict[str, Any]:
    return {"about loss": loss_and_gradient[0], "gradient": loss_and_gradient[1]}


def expect_gradients(c: Cell) -> dict[str, Any]:
    def of(placements: Any, kind: str, reduction: str) -> list[Any]:
        numbers = [torch.tensor(rank + 1.0) for rank in range(c.ranks)]
        values, grads = reference.value_and_grad(loss, c.expected(placements, kind), numbers, reduction)
        return [_named((v, entry(g, grads))) for v, g in zip(values, grads.locals, strict=True)]

    return {
        "sharded": of(c.sharded, "small", "sum"),
        "replicated": of(c.replicated, "small", "sum"),
        "inner": of(c.inner, "small", "sum"),
        "about mean": of(c.sharded, "random", "mean"),
    }


def _gradients_of(rows: list[Any]) -> list[Any]:
    return [row["gradient"] for row in rows]


def call_value_and_grad(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    def of_used(bufs: dict[str, Any], number: torch.Tensor) -> torch.Tensor:
        return loss_of_buffer(bufs["used"], number)

    def of_reduced(buf: DBuffer, number: torch.Tensor) -> torch.Tensor:
        return loss_of_buffer(dbuf.allreduce(buf), number)

    both = dbuf.value_and_grad(of_used, reduction="sum")
    partial = dbuf.value_and_grad(of_reduced, reduction="sum")
    bufs = {"used": x["small"], "unused": [x["at"][c.at_replicated]]}
    return {
        **_gradients(loss_of_buffer, c, x),
        "used": lambda: both(bufs, x["number"])[1]["used"],
        "unused": lambda: both(bufs, x["number"])[1]["unused"][0],
        "partial": lambda: partial(x["at"][c.at_partial], x["number"])[1],
    }


def expect_value_and_grad(c: Cell) -> dict[str, Any]:
    numbers = [torch.tensor(rank + 1.0) for rank in range(c.ranks)]
    out = expect_gradients(c)
    zeros = fill([torch.zeros(shape, dtype=c.dtype) for shape in c.shapes])
    _, own = reference.value_and_grad(loss, reference.allreduce(c.expected(c.partial)), numbers, "sum")
    return {
        **out,
        "used": _gradients_of(out["sharded"]),
        "unused": reference.shard(zeros, c.mesh_shape, c.partial, c.layout),
        "partial": reference.allreduce(own),
    }


def refuse_value_and_grad(function: str) -> Callable[[Cell, dict[str, Any]], Refusals]:
    def refuse(c: Cell, x: dict[str, Any]) -> Refusals:
        differentiate, number, buf = getattr(dbuf, function), x["number"], x["small"]
        return {
            "a tensor": (
                lambda: differentiate(loss_of_buffer, argnums=1)(buf, number),
                TreeError,
                "may hold floating DBuffers alone.*the argument: Tensor",
            ),
            "no scalar": (
                lambda: differentiate(lambda buf: buf.local * 2)(buf),
                TreeError,
                "the loss is not a floating scalar",
            ),
            "no such reduction": (
                lambda: differentiate(loss_of_buffer, reduction="max"),
                dbuf.DbufError,
                "no such reduction.*'max'",
            ),
        }

    return refuse


def call_grad(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    def with_aux(number: torch.Tensor, buf: DBuffer) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return loss_of_buffer(buf, number), {"twice": number * 2}

    second = dbuf.grad(with_aux, argnums=1, has_aux=True, reduction="sum")
    several = dbuf.grad(with_aux, argnums=(1,), has_aux=True)
    return {
        "gradient and aux": lambda: list(second(x["number"], x["small"])),
        "about mean": lambda: several(x["number"], x["random"])[0][0],
    }


def expect_grad(c: Cell) -> dict[str, Any]:
    out = expect_gradients(c)
    aux = [{"twice": torch.tensor(2.0 * (rank + 1), dtype=c.dtype)} for rank in range(c.ranks)]
    pairs = [list(pair) for pair in zip(_gradients_of(out["sharded"]), aux, strict=True)]
    return {"gradient and aux": pairs, "about mean": _gradients_of(out["about mean"])}


def call_gathered(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    wire = dbuf.value_and_grad(dbuf.gathered(loss, dtype=torch.bfloat16), reduction="sum")
    twice = dbuf.gathered(lambda trees: pytree.tree_map(lambda t: None if t is None else t * 2, trees))
    return {
        **_gradients(dbuf.gathered(loss), c, x),
        "bf16 wire": lambda: wire(x["small"], x["number"].bfloat16())[1],
        "tensors": lambda: twice({"a": x["small"], "b": x["small inner"]}),
    }


def expect_gathered(c: Cell) -> dict[str, Any]:
    out = expect_gradients(c)
    doubled = fill([2 * tensor for tensor in make_tensors(c.shapes, c.dtype, "small", 0)])
    tensors = c.everywhere({"a": doubled, "b": doubled})
    return {**out, "bf16 wire": _gradients_of(out["sharded"]), "tensors": tensors}


def refuse_gathered(c: Cell, x: dict[str, Any]) -> Refusals:
    buf, number = x["at"][c.at_partial], x["number"]
    return {"partial": (lambda: dbuf.gathered(loss)(buf, number), PlacementError, "holds contributions")}


def call_remat(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    inside = dbuf.grad(dbuf.gathered(dbuf.remat(loss)), reduction="sum")
    return {
        **_gradients(dbuf.remat(dbuf.gathered(loss)), c, x),
        "inside": lambda: inside(x["small"], x["number"]),
    }


def expect_remat(c: Cell) -> dict[str, Any]:
    out = expect_gradients(c)
    return {**out, "inside": _gradients_of(out["sharded"])}


def call_compiled_once(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    return _gradients(dbuf.gathered(dbuf.compiled_once(loss)), c, x)


ROWS = {
    "value_and_grad": Row(
        call_value_and_grad,
        expect_value_and_grad,
        refuse_value_and_grad("value_and_grad"),
        ("sharded",),
        how="jit",
    ),
    "grad": Row(call_grad, expect_grad, refuse_value_and_grad("grad"), ("gradient and aux",), how="jit"),
    "gathered": Row(call_gathered, expect_gathered, refuse_gathered, ("sharded",), how="jit"),
    "compiled_once": Row(call_compiled_once, expect_gradients),
    "remat": Row(call_remat, expect_remat, program=("sharded",), how="jit"),
}
