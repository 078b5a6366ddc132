"""norms, global_norm, vdot, all_finite, psum, pmean."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import dbuf
import reference
from dbuf import PlacementError, TreeError
from table.cells import Cell
from table.row import Refusals, Row, later


def call_norms(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    names = ("small", "small replicated", "small inner", "dirty", "random")
    return {f"about {name}": later(dbuf.norms, x[name]) for name in names}


def expect_norms(c: Cell) -> dict[str, Any]:
    small = c.everywhere(reference.norms(c.expected(c.replicated, "small")))
    random = c.everywhere(reference.norms(c.expected(c.sharded, "random")))
    names = ("small", "small replicated", "small inner", "dirty")
    return {f"about {name}": small for name in names} | {"about random": random}


def call_global_norm(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    return {
        "about one": lambda: dbuf.global_norm(x["small"]),
        "about replicas": lambda: dbuf.global_norm([x["small replicated"], {"b": x["small inner"]}]),
        "about padding": lambda: dbuf.global_norm(x["dirty"]),
        "about random": lambda: dbuf.global_norm((x["random"], x["small replicated"])),
    }


def expect_global_norm(c: Cell) -> dict[str, Any]:
    small, random = c.expected(c.sharded, "small"), c.expected(c.sharded, "random")
    return {
        "about one": c.everywhere(reference.global_norm(small)),
        "about replicas": c.everywhere(reference.global_norm(small, small)),
        "about padding": c.everywhere(reference.global_norm(small)),
        "about random": c.everywhere(reference.global_norm(random, small)),
    }


def call_vdot(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    return {
        "small": lambda: dbuf.vdot(x["small"], x["dirty"]),
        "replicated": lambda: dbuf.vdot([x["small replicated"]], [x["small replicated"]]),
        "about random": lambda: dbuf.vdot(x["random"], x["random"]),
    }


def expect_vdot(c: Cell) -> dict[str, Any]:
    small, random = c.expected(c.sharded, "small"), c.expected(c.sharded, "random")
    value = c.everywhere(reference.vdot(small, small))
    return {"small": value, "replicated": value, "about random": c.everywhere(reference.vdot(random, random))}


def refuse_norm(function: str) -> Callable[[Cell, dict[str, Any]], Refusals]:
    def refuse(c: Cell, x: dict[str, Any]) -> Refusals:
        norm = getattr(dbuf, function)
        arguments = 2 if function == "vdot" else 1
        out = {
            name: (functools.partial(norm, *[x["at"][name]] * arguments), PlacementError, "holds contributions")
            for name in c.partial_names
        }
        if function == "vdot":
            other = functools.partial(norm, x["small"], x["small replicated"])
            out["other specs"] = (other, PlacementError, "the two trees are laid out differently")
        if function == "global_norm":
            out["a tensor"] = (functools.partial(norm, [x["number"]]), TreeError, "not every leaf is a DBuffer")
        return out

    return refuse


def call_all_finite(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    return {
        "finite": lambda: dbuf.all_finite([x["small"], x["small replicated"], x["at"][c.at_partial]]),
        "padding does not count": lambda: dbuf.all_finite(x["dirty"]),
        "one rank has it": lambda: dbuf.all_finite({"a": x["small"], "b": x["at"][c.at_sharded]}),
        "replicated": lambda: dbuf.all_finite(x["at"][c.at_replicated]),
    }


def expect_all_finite(c: Cell) -> dict[str, Any]:
    small, bad = c.expected(c.sharded, "small"), c.expected(c.sharded)
    return {
        "finite": c.everywhere(reference.all_finite(small, c.expected(c.partial))),
        "padding does not count": c.everywhere(reference.all_finite(small)),
        "one rank has it": c.everywhere(reference.all_finite(small, bad)),
        "replicated": c.everywhere(reference.all_finite(bad)),
    }


def call_sum(function: str) -> Callable[[Cell, dict[str, Any]], dict[str, Any]]:
    def call(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
        reduce = getattr(dbuf, function)
        out = {f"numbers over {axis}": later(reduce, x["numbers"], c.mesh, axis) for axis in range(c.ndim)}
        out["numbers"] = lambda: reduce(x["numbers"], c.mesh)
        out["about number"] = lambda: reduce(x["number"] * 0.3, c.mesh)
        return out

    return call


def expect_sum(function: str) -> Callable[[Cell], dict[str, Any]]:
    def expect(c: Cell) -> dict[str, Any]:
        reduce, every = getattr(reference, function), range(c.ndim)
        numbers = [torch.tensor([[1.0, -2.0], [0.0, 12.0]], dtype=c.dtype) * (rank + 1) for rank in range(c.ranks)]
        number = [torch.tensor(0.3 * (rank + 1), dtype=c.dtype) for rank in range(c.ranks)]
        out = {f"numbers over {axis}": reduce(numbers, c.mesh_shape, [axis]) for axis in every}
        out["numbers"] = reduce(numbers, c.mesh_shape, every)
        out["about number"] = reduce(number, c.mesh_shape, every)
        return out

    return expect


def refuse_sum(function: str) -> Callable[[Cell, dict[str, Any]], Refusals]:
    def refuse(c: Cell, x: dict[str, Any]) -> Refusals:
        call = functools.partial(getattr(dbuf, function), x["number"], c.mesh, "tp")
        return {"no such axis": (call, PlacementError, r"no such mesh axis.*\['tp'\]")}

    return refuse


ROWS = {
    "norms": Row(call_norms, expect_norms, refuse_norm("norms"), ("about dirty",)),
    "global_norm": Row(call_global_norm, expect_global_norm, refuse_norm("global_norm"), ("about padding",)),
    "vdot": Row(call_vdot, expect_vdot, refuse_norm("vdot"), ("small",)),
    "all_finite": Row(call_all_finite, expect_all_finite, program=("one rank has it",)),
    "psum": Row(call_sum("psum"), expect_sum("psum"), refuse_sum("psum"), ("numbers",)),
    "pmean": Row(call_sum("pmean"), expect_sum("pmean"), refuse_sum("pmean"), ("numbers",)),
}
