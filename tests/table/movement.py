"""allgather, reduce_scatter, allreduce, view, redistribute."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import torch

import dbuf
import reference
from dbuf import DBuffer, LayoutError, Partial, PlacementError, RowAtomic, ShardLayout, TensorAtomic, TreeError
from dbuf.placement import describe
from table.cells import PURE, Cell, is_legal, is_made_of
from table.row import Refusals, Row, later


def call_move(function: str) -> Callable[[Cell, dict[str, Any]], dict[str, Any]]:
    def call(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
        move = getattr(dbuf, function)
        return {name: later(move, x["at"][source], target) for name, source, target in c.moves[function]}

    return call


def expect_move(function: str) -> Callable[[Cell], dict[str, Any]]:
    def expect(c: Cell) -> dict[str, Any]:
        return {
            name: reference.redistribute(c.expected(c.stops[source]), target)
            for name, source, target in c.moves[function]
        }

    return expect


def call_allgather(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    sharded, whole = x["at"][c.at_sharded], x["at"][c.at_replicated]
    tree, specs = {"a": sharded, "b": [whole]}, {"a": c.replicated, "b": c.replicated}
    return {
        **call_move("allgather")(c, x),
        "default": lambda: dbuf.allgather(sharded),
        "other wire": lambda: dbuf.allgather(sharded, dtype=c.other_dtype, grad_dtype=torch.float32),
        "tree": lambda: dbuf.allgather(tree, specs)["a"],
        "identity": lambda: dbuf.allgather(tree, specs)["b"][0],
    }


def expect_allgather(c: Cell) -> dict[str, Any]:
    sharded = c.expected(c.sharded)
    return {
        **expect_move("allgather")(c),
        "default": reference.allgather(sharded),
        "other wire": reference.allgather(sharded, c.other_dtype),
        "tree": reference.allgather(sharded),
        "identity": c.expected(c.replicated),
    }


def call_reduce_scatter(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    partial = x["at"][c.at_partial]
    return {
        **call_move("reduce_scatter")(c, x),
        "other wire": lambda: dbuf.reduce_scatter(partial, c.sharded, dtype=c.other_dtype),
        "about random": lambda: dbuf.reduce_scatter(x["random partial"], c.sharded),
        "about random average": lambda: dbuf.reduce_scatter(x["random average"], c.sharded),
    }


def expect_reduce_scatter(c: Cell) -> dict[str, Any]:
    average = (Partial("avg"),) * c.ndim
    return {
        **expect_move("reduce_scatter")(c),
        "other wire": reference.reduce_scatter(c.expected(c.partial), c.sharded, c.other_dtype),
        "about random": reference.reduce_scatter(c.expected(c.partial, "random"), c.sharded),
        "about random average": reference.reduce_scatter(c.expected(average, "random"), c.sharded),
    }


def call_allreduce(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    return {
        **call_move("allreduce")(c, x),
        "default": lambda: dbuf.allreduce(x["at"][c.at_partial]),
        "about random": lambda: dbuf.allreduce(x["random partial"]),
        "about random average": lambda: dbuf.allreduce([x["random average"]])[0],
    }


def expect_allreduce(c: Cell) -> dict[str, Any]:
    average = (Partial("avg"),) * c.ndim
    return {
        **expect_move("allreduce")(c),
        "default": reference.allreduce(c.expected(c.partial)),
        "about random": reference.allreduce(c.expected(c.partial, "random")),
        "about random average": reference.allreduce(c.expected(average, "random")),
    }


def call_redistribute(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    out = call_move("redistribute")(c, x)
    for name, source, target, layout in c.relayouts:
        out[name] = later(_relayout, x["at"][source], target, layout, name.startswith("about"))
    if c.name == "block":
        out["to rows -> to blocks"] = later(_to_rows_and_back, c, x["at"][c.at_sharded])
    return out


def _relayout(buf: DBuffer, placements: Any, layout: Any, only_the_sum: bool) -> DBuffer:
    moved = dbuf.redistribute(buf, placements, layout=layout)
    return dbuf.allreduce(moved) if only_the_sum else moved


def _to_rows_and_back(c: Cell, buf: DBuffer) -> DBuffer:
    rows = dbuf.redistribute(buf, (RowAtomic(),) * c.ndim, layout=c.relayouts[0][3])
    return dbuf.redistribute(rows, c.sharded, layout=ShardLayout.PADDED)


def expect_redistribute(c: Cell) -> dict[str, Any]:
    out = expect_move("redistribute")(c)
    for name, source, target, layout in c.relayouts:
        moved = reference.redistribute(c.expected(c.stops[source]), target, layout)
        out[name] = reference.allreduce(moved) if name.startswith("about") else moved
    if c.name == "block":
        out["to rows -> to blocks"] = c.expected(c.sharded)
    return out


def refuse_move(function: str) -> Callable[[Cell, dict[str, Any]], Refusals]:
    """Every legal change that holds anything but rows of this name is refused."""

    def refuse(c: Cell, x: dict[str, Any]) -> Refusals:
        move, out = getattr(dbuf, function), {}
        for (name, a), (other, b) in itertools.product(c.stops.items(), repeat=2):
            if c.ndim > 1 and (Partial("avg") in a or Partial("avg") in b):
                continue
            if is_legal(a, b) and not is_made_of(a, b, PURE[function]):
                call = functools.partial(move, x["at"][name], b)
                out[f"{name} -> {other}"] = (call, PlacementError, rf"dbuf.{function}: .*cannot go {re.escape(name)}")
        tensors = functools.partial(move, {"w": x["number"]}, c.replicated)
        out["no buffer"] = (tensors, TreeError, r"not every leaf is a DBuffer.*\['w'\]: Tensor")
        return out

    return refuse


def refuse_redistribute(c: Cell, x: dict[str, Any]) -> Refusals:
    at, average = x["at"], (Partial("avg"),) * c.ndim
    sharded, partial = at[c.at_sharded], at[c.at_partial]
    other = dbuf.plan_row_atomic([(3, 2)], c.ranks)

    def call(buf: DBuffer, placements: Any, layout: Any = None) -> Callable[[], Any]:
        return lambda: dbuf.redistribute({"a": [buf]}, placements, layout=layout)

    change = "a partial value cannot change its reduction"
    out = {
        "sum to avg": (call(partial, average), PlacementError, rf"bufs\['a'\]\[0\] {change}"),
        "avg to sum": (call(at[describe(average)], c.partial), PlacementError, change),
        "other tensors": (call(sharded, c.sharded, other), LayoutError, "planned for other tensors"),
        "no owners": (call(sharded, (TensorAtomic(),) * c.ndim, "padded"), LayoutError, "does not say who owns"),
        "not a prefix": (call(sharded, {"b": c.sharded}), TreeError, "not a prefix"),
        "torch's shard": (
            call(sharded, (torch.distributed.tensor.Shard(0),) * c.ndim),
            PlacementError,
            "torch's Shard",
        ),
    }
    if not c.layout.admits(TensorAtomic()):
        wants = (TensorAtomic(),) * c.ndim
        out["does not fit"] = (call(sharded, wants), LayoutError, r"the layout does not fit TensorAtomic\(\)")
    return out


def _move(function: str, call: Any = None, expect: Any = None, program: tuple[str, ...] = ()) -> Row:
    return Row(call or call_move(function), expect or expect_move(function), refuse_move(function), program)


ROWS = {
    "allgather": _move("allgather", call_allgather, expect_allgather, ("other wire",)),
    "reduce_scatter": _move("reduce_scatter", call_reduce_scatter, expect_reduce_scatter, ("about random",)),
    "allreduce": _move("allreduce", call_allreduce, expect_allreduce),
    "view": _move("view"),
    "redistribute": Row(call_redistribute, expect_redistribute, refuse_redistribute),
}
