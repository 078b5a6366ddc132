"""When the zeros that pad a gradient are written."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from dbuf.compat import node_is_backward
from dbuf.schedule.values import insert_call

__all__ = ["anchor_padding"]


def anchor_padding(graph: Graph) -> int:
    """Make the zeros that pad a gradient depend on what they are concatenated with.

    Zeros depend on nothing, so Inductor writes those of all groups in the first kernel of the step, into gradients
    of full size that would then be alive from there to their reduce-scatters (ISEEKYAN/Megatron-LM#158).

    Args:
        graph: A flat graph, changed in place.

    Returns:
        The number of concatenations changed.
    """
    changed = 0
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.cat.default or not node_is_backward(node):
            continue
        parts = list(node.args[0])
        others = [part for part in parts if not _is_zeros(part) and part.meta["val"].numel()]
        if not others or len(others) == len(parts):
            continue
        with graph.inserting_before(node):
            zero = _zero_from(graph, others[0])
            padded = [
                _call(graph, torch.ops.aten.expand.default, zero, [p.meta["val"].numel()]) if _is_zeros(p) else p
                for p in parts
            ]
        node.args = (padded, *node.args[1:])
        changed += 1
    return changed


def _is_zeros(node: Node) -> bool:
    return node.target is torch.ops.aten.full.default and bool(node.args[1] == 0) and node.meta["val"].ndim == 1


def _zero_from(graph: Graph, node: Node) -> Node:
    """A zero that depends on a tensor: whether its first element both differs from itself and does not."""
    first = _call(graph, torch.ops.aten.slice.Tensor, node, 0, 0, 1)
    pair = [_call(graph, op, first, first) for op in (torch.ops.aten.ne.Tensor, torch.ops.aten.eq.Tensor)]
    never = _call(graph, torch.ops.aten.bitwise_and.Tensor, *pair)
    return _call(graph, torch.ops.prims.convert_element_type.default, never, node.meta["val"].dtype)


def _call(graph: Graph, op: Any, *args: Any) -> Node:
    return insert_call(graph, {"autograd_backward": True}, op, *args)
