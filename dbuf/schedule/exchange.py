"""Reductions on gloo, which has no reduce-scatter of its own, and sums in a copy."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from dbuf.collectives import ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, WAIT_FOR
from dbuf.compat import group_backend, group_rank, group_size
from dbuf.schedule.values import insert_call, is_narrow

__all__ = ["exchange_on_gloo"]

_aten = torch.ops.aten


def exchange_on_gloo(graph: Graph) -> int:
    """Turn every sum by reduce-scatter over a gloo group into an all-to-all and a local sum.

    gloo reduces everything to everyone, in a copy, and keeps a part. The exchange sends half the bytes or less; the
    sum over ranks, in fp32, is fused into what reads it. Of two ranks each sends the other what it lacks and adds its
    own where it lies, and an all-reduce is that with all of it: as many bytes as gloo sends. A report that is read
    before this pass says what a step means. Groups of other backends keep their reductions.

    Args:
        graph: A flat graph, changed in place.

    Returns:
        The number of reductions changed.
    """
    changed = 0
    for node in list(graph.nodes):
        if node.target not in (REDUCE_SCATTER, ALL_REDUCE):
            continue
        x, reduction, group = node.args[0], node.args[1], node.args[-1]
        waits, result = list(node.users), node.meta["val"]
        fits = reduction == "sum" and result.ndim == 1 and isinstance(result.numel(), int)
        if not fits or any(wait.target is not WAIT_FOR for wait in waits) or group_backend(group) != "gloo":
            continue
        is_part, is_scalar = node.target is REDUCE_SCATTER, result.numel() == 1
        if group_size(group) == 2 and not is_narrow(result) and (is_part or not is_scalar):
            _exchange_by_two(graph, node, x, waits)
        elif is_part:
            _exchange_by_all(graph, node, x, waits)
        else:
            continue
        graph.erase_node(node)
        changed += 1
    return changed


def _exchange_by_two(graph: Graph, node: Node, x: Node, waits: list[Node]) -> None:
    """Each of two ranks sends what the other lacks. Narrow sums would add this rank's own before it is rounded."""
    rank, numel = group_rank(str(node.args[-1])), node.meta["val"].numel()
    each = [numel * (other != rank) for other in range(2)]

    def part(of: int, near: Node) -> Node:
        if node.target is ALL_REDUCE:
            return x
        return insert_call(graph, near.meta, _aten.slice.Tensor, x, 0, of * numel, (of + 1) * numel)

    with graph.inserting_before(node):
        start = insert_call(graph, node.meta, ALL_TO_ALL, part(1 - rank, node), each, each, node.args[-1])
    for wait in waits:
        with graph.inserting_before(wait):
            arrived = insert_call(graph, wait.meta, WAIT_FOR, start)
            total = insert_call(graph, wait.meta, _aten.add.Tensor, arrived, part(rank, wait))
            _replace(graph, wait, total)


def _exchange_by_all(graph: Graph, node: Node, x: Node, waits: list[Node]) -> None:
    """Each rank sends each what that one keeps, itself as well."""
    _, _, ranks, group = node.args
    result = node.meta["val"]
    each = [result.numel()] * int(str(ranks))
    with graph.inserting_before(node):
        start = insert_call(graph, node.meta, ALL_TO_ALL, x, each, each, group)
    for wait in waits:
        with graph.inserting_before(wait):
            received = insert_call(graph, wait.meta, WAIT_FOR, start)
            by_rank = insert_call(graph, wait.meta, _aten.view.default, received, [len(each), each[0]])
            # A sum of integers would be int64 otherwise.
            total = insert_call(graph, wait.meta, _aten.sum.dim_IntList, by_rank, [0], dtype=result.dtype)
            _replace(graph, wait, total)


def _replace(graph: Graph, wait: Node, total: Node) -> None:
    if len(wait.users) > 1:  # else Inductor sums again in each, and keeps what was sent until then
        numel = total.meta["val"].numel()
        total = insert_call(graph, wait.meta, _aten.as_strided.default, total, [numel], [1])
    wait.replace_all_uses_with(total)
    graph.erase_node(wait)
