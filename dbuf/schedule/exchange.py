"""Reductions on gloo, which has no reduce-scatter of its own."""

from __future__ import annotations

import torch
from torch.fx import Graph

from dbuf.collectives import ALL_TO_ALL, REDUCE_SCATTER, WAIT_FOR
from dbuf.compat import group_backend
from dbuf.schedule.values import insert_call

__all__ = ["exchange_on_gloo"]


def exchange_on_gloo(graph: Graph) -> int:
    """Turn every sum by reduce-scatter over a gloo group into an all-to-all and a local sum.

    gloo reduces everything to everyone, in a copy, and keeps a part. The exchange sends half the bytes or less and
    copies nothing; the sum over ranks, in fp32, is fused into what reads it. A report that is read before this pass
    says what a step means. Groups of other backends keep their reduce-scatter, and so do bf16 and fp16: what reads the
    sum would read it before it is rounded, or has overflowed.

    Args:
        graph: A flat graph, changed in place.

    Returns:
        The number of reductions changed.
    """
    changed, aten = 0, torch.ops.aten
    for node in list(graph.nodes):
        waits = list(node.users)
        if node.target is not REDUCE_SCATTER or any(wait.target is not WAIT_FOR for wait in waits):
            continue
        x, reduction, ranks, group = node.args
        result = node.meta["val"]
        if reduction != "sum" or result.ndim != 1 or not _sums_alike(result.dtype) or group_backend(group) != "gloo":
            continue
        each = [result.numel()] * ranks
        with graph.inserting_before(node):
            sent = insert_call(graph, node.meta, ALL_TO_ALL, x, each, each, group)
        for wait in waits:
            with graph.inserting_before(wait):
                received = insert_call(graph, wait.meta, WAIT_FOR, sent)
                by_rank = insert_call(graph, wait.meta, aten.view.default, received, [ranks, each[0]])
                # A sum of integers would be int64 otherwise.
                total = insert_call(graph, wait.meta, aten.sum.dim_IntList, by_rank, [0], dtype=result.dtype)
                if len(wait.users) > 1:  # else Inductor sums again in each, and keeps what all ranks sent until then
                    total = insert_call(graph, wait.meta, aten.as_strided.default, total, [each[0]], [1])
            wait.replace_all_uses_with(total)
            graph.erase_node(wait)
        graph.erase_node(node)
        changed += 1
    return changed


def _sums_alike(dtype: torch.dtype) -> bool:
    """Whether a sum that Inductor fuses into its readers has the values that a reduction in this dtype has."""
    return dtype != torch.bool and (dtype.itemsize >= 4 if dtype.is_floating_point else True)
