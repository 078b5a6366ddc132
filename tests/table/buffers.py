"""shard, unpack, pack, select, merge, shapes, cast: between tensors and buffers, and from buffer to buffer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

import dbuf
import reference
from dbuf import LayoutError, Partial, PlacementError, ShardLayout, TreeError
from table.cells import Cell, keep
from table.row import Refusals, Row, later


def call_shard(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    tree, own, layout = x["tree"], x["own tree"], c.layout_argument
    out = {
        "sharded": lambda: dbuf.shard(tree, c.mesh, c.sharded, layout=layout),
        "inner": lambda: dbuf.shard(tree, c.mesh, c.inner, layout=layout),
        "planned": lambda: dbuf.shard(tree, c.mesh, c.sharded, layout=c.layout),
        "replicated": lambda: dbuf.shard(tree, c.mesh, c.replicated, layout=c.layout),
        "partial": lambda: dbuf.shard(own, c.mesh, c.partial, layout=c.layout),
        "broadcast": lambda: dbuf.shard(own, c.mesh, c.sharded, layout=c.layout, broadcast_from=c.ranks - 1),
    }
    if c.name != "tensor":
        out["finer"] = lambda: dbuf.shard(tree, c.mesh, c.sharded, layout=layout, dp_size=2 * c.ranks, align=8)
        out["coarser"] = lambda: dbuf.shard(tree, c.mesh, c.inner, layout=layout, dp_size=c.mesh_shape[-1])
    return out


def expect_shard(c: Cell) -> dict[str, Any]:
    make = functools.partial(reference.shard, c.tree("any"), c.mesh_shape)
    own = [c.tree("any", rank) for rank in range(c.ranks)]
    sharded = make(c.sharded, c.layout)
    out = {"sharded": sharded, "inner": make(c.inner, c.layout), "planned": sharded}
    out["replicated"] = make(c.replicated, c.layout)
    out["partial"] = reference.shard(own, c.mesh_shape, c.partial, c.layout)
    out["broadcast"] = reference.shard(own[-1], c.mesh_shape, c.sharded, c.layout)
    if c.name != "tensor":
        plan = functools.partial(
            dbuf.plan_row_atomic,
            c.shapes,
            block_size=2 if c.name == "block" else 1,
            shard_layout=c.layout_argument,
        )
        out["finer"] = make(c.sharded, plan(2 * c.ranks, align=8))
        out["coarser"] = make(c.inner, plan(c.mesh_shape[-1]))
    return out


def refuse_shard(c: Cell, x: dict[str, Any]) -> Refusals:
    def shard(tree: Any, placements: Any = c.sharded, **more: Any) -> Callable[[], Any]:
        return lambda: dbuf.shard(tree, c.mesh, placements, **({"layout": c.layout} | more))

    tree = x["tree"]
    mixed = {**tree, "w": tree["w"].double()}
    out = {
        "mixed dtypes": (shard(mixed), TreeError, r"share one dtype.*\['w'\]: torch.float64"),
        "a number": (shard({**tree, "w": 1.0}), TreeError, r"not every leaf is a plain tensor.*\['w'\]: float"),
        "other shapes": (shard({"w": tree["w"]}), LayoutError, "planned for other tensors"),
        "too many axes": (shard(tree, (*c.sharded, c.kind)), PlacementError, "for a mesh of"),
        "no mean": (shard(tree, (Partial("max"),) * c.ndim), PlacementError, "the reduction 'max'"),
    }
    if c.name == "tensor":
        out["no owners"] = (shard(tree, layout=ShardLayout.PADDED), LayoutError, "does not say who owns")
    if c.name == "block":
        odd = {"w": torch.ones(3, 2)}
        out["odd rows"] = (shard(odd, layout=ShardLayout.PADDED), LayoutError, "block_size")
    if c.ndim > 1 and c.name != "tensor":
        coarse = shard(tree, layout=c.layout_argument, dp_size=c.mesh_shape[-1])
        out["finer than planned"] = (coarse, LayoutError, "cannot shard 4 ways a layout that was planned for 2")
    return out


def call_unpack(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    return {f"at {name}": later(dbuf.unpack, x["at"][name]) for name in c.whole_names}


def expect_unpack(c: Cell) -> dict[str, Any]:
    return {f"at {name}": reference.unpack(c.expected(c.stops[name])) for name in c.whole_names}


def refuse_unpack(c: Cell, x: dict[str, Any]) -> Refusals:
    return {
        name: (lambda buf=x["at"][name]: dbuf.unpack(buf), PlacementError, "holds contributions, not values")
        for name in c.partial_names
    }


def call_pack(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    rows, at = x["rows"], x["at"]
    return {
        "rows": lambda: dbuf.pack(rows, at[c.at_sharded]),
        "contributions": lambda: dbuf.pack(x["own tree"], at[c.at_partial]),
        "other dtype": lambda: dbuf.pack(pytree.tree_map(_to(c.other_dtype), rows), at[c.at_sharded]),
    }


def expect_pack(c: Cell) -> dict[str, Any]:
    rows = reference.unpack(c.expected(c.sharded))
    own = [c.tree("any", rank) for rank in range(c.ranks)]
    like = c.expected(c.sharded)
    return {
        "rows": reference.pack(rows, like),
        "contributions": reference.pack(own, c.expected(c.partial)),
        "other dtype": reference.pack(pytree.tree_map(_to(c.other_dtype), rows), like),
    }


def refuse_pack(c: Cell, x: dict[str, Any]) -> Refusals:
    rows, like = x["rows"], x["at"][c.at_sharded]
    wrong = {**rows, "wide": torch.ones(9, 9, dtype=c.dtype)}
    return {
        "wrong shape": (lambda: dbuf.pack(wrong, like), TreeError, r"\['wide'\]: \(9, 9\), should be"),
        "wrong tree": (lambda: dbuf.pack(rows["deep"], like), TreeError, "do not match the buffer"),
        "mixed dtypes": (
            lambda: dbuf.pack({**rows, "w": rows["w"].double()}, like),
            TreeError,
            "share one dtype",
        ),
    }


def _to(dtype: torch.dtype) -> Callable[[Any], Any]:
    return lambda leaf: None if leaf is None else leaf.to(dtype)


def call_select(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    out = {f"rule {name}": later(dbuf.select, x["at"][name], keep) for name in c.every_kind}
    out["paths"] = later(dbuf.select, x["at"][c.at_sharded], c.kept_paths)
    out["nothing"] = later(dbuf.select, x["at"][c.at_sharded], ())
    return out


def expect_select(c: Cell) -> dict[str, Any]:
    out = {f"rule {name}": reference.select(c.expected(c.stops[name]), c.kept) for name in c.every_kind}
    out["paths"] = reference.select(c.expected(c.sharded), c.kept)
    out["nothing"] = reference.select(c.expected(c.sharded), [False] * len(c.kept))
    return out


def refuse_select(c: Cell, x: dict[str, Any]) -> Refusals:
    buf = x["at"][c.at_sharded]
    return {"no such path": (lambda: dbuf.select(buf, ["['v']"]), TreeError, r"no tensor has that path.*\['v'\]")}


def call_merge(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    return {"negated": later(dbuf.merge, x["at"][c.at_sharded], x["part"])}


def expect_merge(c: Cell) -> dict[str, Any]:
    buf = c.expected(c.sharded)
    part = reference.select(buf, c.kept)
    negated = reference.Buffer(part.mesh_shape, part.placements, part.layout, part.tree, tuple(-x for x in part.locals))
    return {"negated": reference.merge(buf, c.kept, negated)}


def refuse_merge(c: Cell, x: dict[str, Any]) -> Refusals:
    buf, part = x["at"][c.at_sharded], x["part"]
    whole = x["at"][c.at_replicated]
    return {
        "part of another": (lambda: dbuf.merge(whole, part), PlacementError, "not a selection of this buffer"),
        "other dtype": (lambda: dbuf.merge(buf, dbuf.cast(part, c.other_dtype)), TreeError, "the dtypes differ"),
    }


def call_shapes(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    return {f"at {name}": later(dbuf.shapes, x["at"][name]) for name in c.every_kind}


def expect_shapes(c: Cell) -> dict[str, Any]:
    return {f"at {name}": c.everywhere(reference.shapes(c.expected(c.stops[name]))) for name in c.every_kind}


def call_cast(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    bufs = {"a": x["at"][c.at_sharded], "b": [x["at"][c.at_replicated], x["at"][c.at_partial]]}
    return {
        "one": lambda: dbuf.cast(bufs["a"], c.other_dtype),
        "tree": lambda: dbuf.cast(bufs, c.other_dtype)["b"][0],
        "partial": lambda: dbuf.cast(bufs, c.other_dtype)["b"][1],
        "same": lambda: dbuf.cast(x["random"], c.dtype),
    }


def expect_cast(c: Cell) -> dict[str, Any]:
    return {
        "one": reference.cast(c.expected(c.sharded), c.other_dtype),
        "tree": reference.cast(c.expected(c.replicated), c.other_dtype),
        "partial": reference.cast(c.expected(c.partial), c.other_dtype),
        "same": c.expected(c.sharded, "random"),
    }


ROWS = {
    "shard": Row(call_shard, expect_shard, refuse_shard, ("sharded",)),
    "unpack": Row(call_unpack, expect_unpack, refuse_unpack),
    "pack": Row(call_pack, expect_pack, refuse_pack, ("rows",)),
    "select": Row(call_select, expect_select, refuse_select, ("paths",)),
    "merge": Row(call_merge, expect_merge, refuse_merge, ("negated",)),
    "shapes": Row(call_shapes, expect_shapes),
    "cast": Row(call_cast, expect_cast, program=("one",)),
}
