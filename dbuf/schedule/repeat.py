"""What the backward computes again, instead of keeping it from the forward.

A step that differentiates inside is a single graph, forward then backward, that no partitioner sees. Gathered
weights and the activations of `remat` would live from their first use to their last.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from dbuf.collectives import GATHER_MARK
from dbuf.compat import node_draws_random, node_is_backward, node_is_recomputed, node_mark, node_region
from dbuf.schedule.cheap import cheap_to_repeat
from dbuf.schedule.values import keeps_values

__all__ = ["repeat_in_backward"]


def repeat_in_backward(graph: Graph) -> int:
    """Give the backward its own copy of every forward node that is marked for repetition.

    Marked are gathers inside `gathered`, all of `remat` but its random draws and its results, what is cheap to compute
    again, and views and casts of those.

    Args:
        graph: A flat graph after `sink_gathers`, changed in place.

    Returns:
        The number of nodes copied.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    repeats = _repeatable(graph)
    copy_of: dict[Node, Node] = {}
    for node in list(graph.nodes):
        if not node_is_backward(node):
            continue
        for source in _needed(node, repeats, copy_of, order):
            with graph.inserting_before(node):
                copy = graph.node_copy(source, lambda n: copy_of.get(n, n))
            copy.meta["autograd_backward"] = True
            copy_of[source] = copy
        for source in node.all_input_nodes:
            if source in copy_of:
                node.replace_input_with(source, copy_of[source])
    for source in sorted(copy_of, key=order.__getitem__, reverse=True):
        if not source.users:
            graph.erase_node(source)
    return len(copy_of)


def _repeatable(graph: Graph) -> set[Node]:
    found: set[Node] = set()
    cheap = cheap_to_repeat(graph)
    for node in graph.nodes:
        if node.op != "call_function" or node_is_backward(node):
            continue
        inputs = node.all_input_nodes
        recomputed = node_is_recomputed(node) and not node_draws_random(node) and not _leaves_region(node)
        marked = node_mark(node, GATHER_MARK) or recomputed or node in cheap
        if marked or (inputs and keeps_values(node) and all(source in found for source in inputs)):
            found.add(node)
    return found


def _leaves_region(node: Node) -> bool:
    """Whether the forward reads a node outside the call of `remat` that made it.

    Such a node is kept: recomputing one call would otherwise recompute all those before it, so that at the start
    of the backward the activations of the whole forward were alive.
    """
    return any(not node_is_backward(user) and node_region(user) != node_region(node) for user in node.users)


def _needed(node: Node, repeats: set[Node], done: dict[Node, Node], order: dict[Node, int]) -> list[Node]:
    """What has to be copied before `node`, in order. A stack, not recursion: regions can be thousands of nodes."""
    found: set[Node] = set()
    stack = list(node.all_input_nodes)
    while stack:
        source = stack.pop()
        if source in repeats and source not in found and source not in done:
            found.add(source)
            stack.extend(source.all_input_nodes)
    return sorted(found, key=order.__getitem__)
