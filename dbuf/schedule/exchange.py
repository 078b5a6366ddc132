"""Reductions on gloo, which has no reduce-scatter of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from dbuf.collectives import ALL_TO_ALL, REDUCE_SCATTER, WAIT_FOR
from dbuf.compat import group_backend

__all__ = ["exchange_on_gloo"]


def exchange_on_gloo(graph: Graph) -> int:
    """Turn every sum by reduce-scatter over a gloo group into an all-to-all and a local sum.

    gloo reduces everything to everyone, in a copy, and keeps a part. The exchange sends half the bytes or less and
    copies nothing; the sum over ranks, in fp32, is fused into what reads it. A report that is read before this pass
    says what a step means. Groups of other backends keep their reduce-scatter.

    Args:
        graph: A flat graph, changed in place.

    Returns:
        The number of reductions changed.
    """
    changed = 0
    for node in list(graph.nodes):
        waits = list(node.users)
        if node.target is not REDUCE_SCATTER or any(wait.target is not WAIT_FOR for wait in waits):
            continue
        x, reduction, ranks, group = node.args
        if reduction != "sum" or group_backend(group) != "gloo":
            continue
        each = [node.meta["val"].numel()] * ranks
        sent = _call(graph, node, ALL_TO_ALL, x, each, each, group)
        for wait in waits:
            received = _call(graph, wait, WAIT_FOR, sent)
            by_rank = _call(graph, wait, torch.ops.aten.view.default, received, [ranks, each[0]])
            wait.replace_all_uses_with(_call(graph, wait, torch.ops.aten.sum.dim_IntList, by_rank, [0]))
            graph.erase_node(wait)
        graph.erase_node(node)
        changed += 1
    return changed


def _call(graph: Graph, before: Node, op: Any, *args: Any) -> Node:
    with graph.inserting_before(before):
        node = graph.call_function(op, args)
    node.meta = {**before.meta, "val": op(*(arg.meta["val"] if isinstance(arg, Node) else arg for arg in args))}
    return node
