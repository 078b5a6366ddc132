"""check, init_mesh, the planners, changed_mesh_axis: what runs before a step."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import torch
import torch.distributed as dist

import dbuf
import reference
from dbuf import LayoutError, PlacementError, Replicate, ShardLayout, TreeError
from table.cells import Cell, choose_owners, plan_layout
from table.row import Refusals, Row, later


def refuse_check(c: Cell, x: dict[str, Any]) -> Refusals:
    if c.ranks == 1:
        return {}
    mine = x["tree"] if dist.get_rank() else {**x["tree"], "list": [torch.ones(8, dtype=c.dtype), None]}
    spread = dbuf.shard(mine, c.mesh, c.replicated)
    return {"ranks differ": (lambda: dbuf.check(spread), TreeError, r"ranks disagree.*\['list'\]\[0\]: \(8,\)")}


def call_check(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    return {"agree": lambda: dbuf.check([x["at"], x["small"]])}


def expect_check(c: Cell) -> dict[str, Any]:
    return {"agree": c.everywhere(None)}


def call_init_mesh(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    def describe_mesh(*arguments: Any) -> list[Any]:
        mesh = dbuf.init_mesh(*arguments)
        return [mesh.mesh_dim_names, tuple(mesh.shape), tuple(mesh.get_coordinate())]

    return {"flat": describe_mesh, "deep": later(describe_mesh, ("a", "b", "c"), (1, -1, 1))}


def expect_init_mesh(c: Cell) -> dict[str, Any]:
    ranks = range(c.ranks)
    return {
        "flat": [[("dp",), (c.ranks,), (rank,)] for rank in ranks],
        "deep": [[("a", "b", "c"), (1, c.ranks, 1), (0, rank, 0)] for rank in ranks],
    }


def refuse_init_mesh(c: Cell, x: dict[str, Any]) -> Refusals:
    return {
        "too many": (lambda: dbuf.init_mesh(("dp",), (5,)), PlacementError, "does not cover the processes"),
        "too few": (lambda: dbuf.init_mesh(("a", "b"), (c.ranks,)), PlacementError, "one size an axis"),
    }


def call_plan_row_atomic(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    if c.name == "row unpadded":
        return {"layout": lambda: _integers(plan_layout(c.name, c.shapes, c.ranks))}
    return {"laws": lambda: _laws(plan_layout(c.name, c.shapes, c.ranks), 2 if c.name == "block" else 1)}


def expect_plan_row_atomic(c: Cell) -> dict[str, Any]:
    if c.name != "row unpadded":
        return {"laws": c.everywhere(dict.fromkeys(("equal", "apart", "whole rows"), True))}
    numels = [math.prod(shape) for shape in c.shapes]
    offsets = [sum(numels[:i]) for i in range(len(numels))]
    legal = {sum(numels)}
    for offset, numel, shape in zip(offsets, numels, c.shapes, strict=True):
        legal |= set(range(offset, offset + numel, math.prod(shape[1:])))
    size = sum(numels)
    cuts = [min(sorted(legal), key=lambda cut: abs(cut * c.ranks - r * size)) for r in range(c.ranks)]
    return {"layout": c.everywhere([tuple(offsets), size, tuple(cuts)])}


def refuse_plan_row_atomic(c: Cell, x: dict[str, Any]) -> Refusals:
    plan = functools.partial(dbuf.plan_row_atomic, c.shapes)
    return {
        "no ranks": (lambda: plan(0), LayoutError, "dp_size is not a positive int"),
        "odd rows": (lambda: dbuf.plan_row_atomic([(3, 2)], 1, block_size=2), LayoutError, "block_size"),
        "no such layout": (lambda: plan(1, shard_layout="tight"), PlacementError, "no such layout.*'tight'"),
    }


def call_plan_compact(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    block_size = 2 if c.name == "block" else 1

    def laws() -> dict[str, bool]:
        plan = dbuf.plan_compact(c.shapes, c.ranks, block_size=block_size)
        return {**_laws(plan.layout, block_size), "short": plan.least <= plan.segment <= plan.padded}

    return {"laws": laws}


def expect_plan_compact(c: Cell) -> dict[str, Any]:
    return {"laws": c.everywhere(dict.fromkeys(("equal", "apart", "whole rows", "short"), True))}


def refuse_plan_compact(c: Cell, x: dict[str, Any]) -> Refusals:
    return {"no ranks": (lambda: dbuf.plan_compact(c.shapes, 0), LayoutError, "dp_size is not a positive int")}


def call_plan_layout(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    def choose() -> list[Any]:
        choice = dbuf.plan_layout(x["tree"], c.ranks, block_size=2 if c.name == "block" else 1)
        padded, _, unpadded, owned = (option.layout for option in choice.options)
        kinds = [option.placement for option in choice.options]
        made = plan_layout(c.name, c.shapes, c.ranks)
        same = {"row padded": padded == made, "block": padded == made, "row unpadded": unpadded == made}
        same["tensor"] = owned.admits(kinds[3])
        return [same[c.name], choice.best.cost == min(option.cost for option in choice.options)]

    return {"the planner's own, and the cheapest": choose}


def expect_plan_layout(c: Cell) -> dict[str, Any]:
    return {"the planner's own, and the cheapest": c.everywhere([True, True])}


def refuse_plan_layout(c: Cell, x: dict[str, Any]) -> Refusals:
    odd = {"w": [(3, 2)]}
    return {
        "no shape": (lambda: dbuf.plan_layout({"w": 1}, 1), LayoutError, r"not every leaf has a shape.*\['w'\]: int"),
        "odd rows": (lambda: dbuf.plan_layout(odd, 1, block_size=2), LayoutError, r"tensor \['w'\]\[0\] of shape"),
    }


def call_plan_tensor_atomic(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    plan = functools.partial(dbuf.plan_tensor_atomic, c.shapes, c.ranks, tensor_owners=choose_owners(c.ranks))
    return {
        "unpadded": lambda: _integers(plan()),
        "padded": lambda: _integers(plan(shard_layout=ShardLayout.PADDED)),
    }


def expect_plan_tensor_atomic(c: Cell) -> dict[str, Any]:
    owners, numels = choose_owners(c.ranks), [math.prod(shape) for shape in c.shapes]
    loads = [sum(n for n, owner in zip(numels, owners, strict=True) if owner == k) for k in range(c.ranks)]
    out = {}
    for name, segments in (("unpadded", loads), ("padded", [max(loads)] * c.ranks)):
        cuts = [sum(segments[:k]) for k in range(c.ranks)]
        before = [
            sum(n for n, o in zip(numels[:t], owners, strict=False) if o == owners[t]) for t in range(len(numels))
        ]
        offsets = [cuts[owner] + start for owner, start in zip(owners, before, strict=True)]
        out[name] = c.everywhere([tuple(offsets), sum(segments), tuple(cuts)])
    return out


def refuse_plan_tensor_atomic(c: Cell, x: dict[str, Any]) -> Refusals:
    plan = functools.partial(dbuf.plan_tensor_atomic, c.shapes, c.ranks)
    return {
        "too few": (lambda: plan(tensor_owners=[0]), LayoutError, "owners and shapes do not pair up"),
        "no segment": (lambda: plan(tensor_owners=[c.ranks] * 6), LayoutError, "6 of 6 owners are not segments"),
    }


def _integers(layout: Any) -> list[Any]:
    return [layout.tensor_to_offset, layout.size, layout.rank_to_offset]


def _laws(layout: Any, block_size: int) -> dict[str, bool]:
    spans = sorted(span for span in reference.spans_of_tensors(layout) if span[0] < span[1])
    bounds = (*layout.rank_to_offset, layout.size)
    whole = True
    for (start, stop), shape in zip(reference.spans_of_tensors(layout), layout.tensor_shapes, strict=True):
        unit = block_size * math.prod(shape[1:])
        whole &= all((cut - start) % unit == 0 for cut in bounds if start < cut < stop)
    return {
        "equal": len({b - a for a, b in itertools.pairwise(bounds)}) == 1,
        "apart": all(a[1] <= b[0] for a, b in itertools.pairwise(spans)) and spans[-1][1] <= layout.size,
        "whole rows": whole,
    }


def call_report(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    def count() -> list[Any]:
        found = dbuf.report(x["at"][c.at_sharded])
        return [found.content, found.size, found.longest, found.nbytes]

    return {"elements and bytes": count}


def expect_report(c: Cell) -> dict[str, Any]:
    cuts = (*c.layout.rank_to_offset, c.layout.size)
    longest = max(stop - start for start, stop in itertools.pairwise(cuts))
    content = sum(math.prod(shape) for shape in c.shapes)
    return {"elements and bytes": c.everywhere([content, c.layout.size, longest, longest * c.dtype.itemsize])}


def refuse_report(c: Cell, x: dict[str, Any]) -> Refusals:
    return {"no layout": (lambda: dbuf.report(x["at"]), LayoutError, "a report is of a layout.*dict")}


def call_changed_mesh_axis(c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    return {
        "the last": lambda: dbuf.changed_mesh_axis(c.inner, c.replicated),
        "none": lambda: dbuf.changed_mesh_axis(c.sharded, c.sharded),
    }


def expect_changed_mesh_axis(c: Cell) -> dict[str, Any]:
    return {"the last": c.everywhere(c.ndim - 1), "none": c.everywhere(None)}


def refuse_changed_mesh_axis(c: Cell, x: dict[str, Any]) -> Refusals:
    call, two = dbuf.changed_mesh_axis, (c.kind, c.kind)
    return {
        "two": (lambda: call(two, (Replicate(), Replicate())), PlacementError, "differ on 2 mesh axes"),
        "lengths": (lambda: call((c.kind,), two), PlacementError, "meshes of different sizes"),
    }


ROWS = {
    "check": Row(call_check, expect_check, refuse_check, how=""),
    "init_mesh": Row(call_init_mesh, expect_init_mesh, refuse_init_mesh, how=""),
    "plan_row_atomic": Row(call_plan_row_atomic, expect_plan_row_atomic, refuse_plan_row_atomic, how=""),
    "plan_compact": Row(call_plan_compact, expect_plan_compact, refuse_plan_compact, how=""),
    "plan_layout": Row(call_plan_layout, expect_plan_layout, refuse_plan_layout, how=""),
    "plan_tensor_atomic": Row(call_plan_tensor_atomic, expect_plan_tensor_atomic, refuse_plan_tensor_atomic, how=""),
    "report": Row(call_report, expect_report, refuse_report, how=""),
    "changed_mesh_axis": Row(call_changed_mesh_axis, expect_changed_mesh_axis, refuse_changed_mesh_axis, how=""),
}
