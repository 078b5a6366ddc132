"""Reading what a donated argument holds before a result is written there."""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from dbuf.collectives import ALL_REDUCE
from dbuf.compat import node_may_be_in_place
from dbuf.schedule.values import origin

__all__ = ["take_before_writing"]

_CLONE = torch.ops.aten.clone.default


def take_before_writing(graph: Graph) -> int:
    """Read a donated tensor before anything is written over it, where Inductor would not.

    Inductor does some operations in place on a donated tensor (2.13, 2.14), which is right if their result is what is
    written there, and else loses it: `(2 * params, allreduce(params))` would return `2 * params` twice. And it drops
    the clone of a result that is another donated argument, and then reads that argument after its own result has been
    written there: `(params, previous) -> (new, params)` would return `new` twice. And it writes a view of a computation
    element by element while it still reads the donated tensor elsewhere: `params.view(4, 4).flip(0).view(-1)`.

    Args:
        graph: A flat graph that ends with copies into its inputs, changed in place.

    Returns:
        The number of tensors read early.
    """
    writes = [node for node in graph.nodes if node.target is torch.ops.aten.copy_.default]
    written = {node.args[0] for node in writes}
    early = [(node, node.args[1]) for node in writes if origin(node.args[1]) in written - {node.args[0]}]
    early += [(node, node.args[1]) for node in writes if _is_view(node.args[1])]
    out = graph.output_node()
    early += [(out, copy) for copy in out.all_input_nodes if copy.target is _CLONE and origin(copy) in written]
    results = {node.args[0]: origin(node.args[1]) for node in writes}
    for node in [node for node in graph.nodes if _may_be_in_place(node) and node.args[0] in results]:
        if results[node.args[0]] not in (node, *node.users):  # of a collective, what waits for it
            early.append((node, node.args[0]))
    for node, source in dict.fromkeys(early):
        with graph.inserting_before(node if _may_be_in_place(node) else writes[0]):
            # By arithmetic, since copies that change nothing are dropped. Multiplying by one keeps every number.
            if source.meta["val"].dtype == torch.bool:
                taken = graph.call_function(torch.ops.aten.logical_or.default, (source, source))
            else:
                taken = graph.call_function(torch.ops.aten.mul.Tensor, (source, 1))
            taken.meta["val"] = source.meta["val"]
        node.replace_input_with(source, taken)
    return len(early)


def _is_view(node: Node) -> bool:
    """Whether a node is a view of what is computed, also through copies."""
    while node.target is _CLONE:
        (node,) = node.all_input_nodes
    return node.target is operator.getitem or bool(getattr(node.target, "is_view", False))


def _may_be_in_place(node: Node) -> bool:
    return node.target is ALL_REDUCE or node_may_be_in_place(node)
