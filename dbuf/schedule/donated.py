"""Reading what a donated argument holds before a result is written there."""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from dbuf.collectives import ALL_REDUCE, WAIT_FOR
from dbuf.compat import node_may_be_in_place
from dbuf.schedule.values import insert_copy, origin

__all__ = ["take_before_writing"]

_CLONE, _COPY = torch.ops.aten.clone.default, torch.ops.aten.copy_.default


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
    writes = [node for node in graph.nodes if node.target is _COPY]
    written = {node.args[0] for node in writes}
    early = [(node, node.args[1]) for node in writes if origin(node.args[1]) in written - {node.args[0]}]
    early += [(node, node.args[1]) for node in writes if _is_view(node.args[1])]
    out = graph.output_node()
    early += [(out, copy) for copy in out.all_input_nodes if copy.target is _CLONE and origin(copy) in written]
    for node in filter(_may_be_in_place, graph.nodes):
        target = origin(node.args[0])
        if target in written and not (node.args[0] is target and _ends_in(target, node)):
            early.append((node, node.args[0]))
    for node, source in dict.fromkeys(early):
        with graph.inserting_before(node if _may_be_in_place(node) else writes[0]):
            copy = insert_copy(graph, source)
        node.replace_input_with(source, copy)
    return len(early)


def _ends_in(target: Node, node: Node) -> bool:
    """Whether all that becomes of a node is written into `target` as it is, or is made of it in place."""
    return all(
        (user.target is _COPY and user.args[0] is target)
        or (user.target in (_CLONE, WAIT_FOR) and _ends_in(target, user))
        or (_may_be_in_place(user) and user.args[0] is node and node not in user.args[1:] and _ends_in(target, user))
        for user in node.users
    )


def _is_view(node: Node) -> bool:
    """Whether a node is a view of what is computed, also through copies."""
    while node.target is _CLONE:
        (node,) = node.all_input_nodes
    return node.target is operator.getitem or bool(getattr(node.target, "is_view", False))


def _may_be_in_place(node: Node) -> bool:
    return node.target is ALL_REDUCE or node_may_be_in_place(node)
