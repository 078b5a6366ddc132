"""Passes over the one graph of a compiled step: what to compute again in the backward, and how late.

A step that differentiates inside is a single graph, forward then backward, that no partitioner sees. Gathered
weights and the activations of `remat` would live from their first use to their last. `repeat_in_backward` copies
what is marked in front of its first use in the backward instead, for any number of backward regions, and
`sink_gathers` puts every gather of `gathered` right before the first computation that reads it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from dbuf.collectives import GATHER_MARK
from dbuf.compat import node_draws_random, node_is_backward, node_is_recomputed, node_mark, node_region

__all__ = ["anchor_padding", "repeat_in_backward", "sink_gathers", "take_before_writing"]


def repeat_in_backward(graph: Graph) -> int:
    """Give the backward its own copy of every forward node that is marked for repetition.

    Marked are gathers inside `gathered`, all of `remat` but its random draws and its results, and views and casts
    of those.

    Args:
        graph: A flat graph, changed in place.

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
    for node in graph.nodes:
        if node.op != "call_function" or node_is_backward(node):
            continue
        inputs = node.all_input_nodes
        recomputed = node_is_recomputed(node) and not node_draws_random(node) and not _leaves_region(node)
        marked = node_mark(node, GATHER_MARK) or recomputed
        if marked or (inputs and _keeps_values(node) and all(source in found for source in inputs)):
            found.add(node)
    return found


def _leaves_region(node: Node) -> bool:
    """Whether the forward reads a node outside the call of `remat` that made it.

    Such a node is kept: recomputing one call would otherwise recompute all those before it, so that at the start
    of the backward the activations of the whole forward were alive.
    """
    return any(not node_is_backward(user) and node_region(user) != node_region(node) for user in node.users)


def _keeps_values(node: Node) -> bool:
    """Whether a node only looks at its input otherwise: a view, one output of several, or a cast."""
    if node.target is operator.getitem:
        return True
    # Inductor has decomposed every cast by now.
    return bool(getattr(node.target, "is_view", False)) or node.target is torch.ops.prims.convert_element_type.default


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


def sink_gathers(graph: Graph) -> int:
    """Move every gather of `gathered`, and the views of it, in front of the first computation that reads it.

    Inductor's pattern passes sort the graph anew and leave nodes that need nothing but inputs, gathers above all,
    as early as they can stand; each weight would then live from the start of the step.

    Args:
        graph: A flat graph, changed in place.

    Returns:
        The number of nodes that are part of a gather.
    """
    gathers: set[Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        views = bool(inputs) and _keeps_values(node) and all(source in gathers for source in inputs)
        if node.op == "call_function" and (node_mark(node, GATHER_MARK) or views):
            gathers.add(node)
    order = {node: i for i, node in enumerate(graph.nodes)}
    reader: dict[Node, Node] = {}
    for node in reversed(list(graph.nodes)):
        if node in gathers and node.users:
            reader[node] = min((reader.get(user, user) for user in node.users), key=order.__getitem__)
    for node in sorted(reader, key=order.__getitem__):
        reader[node].prepend(node)
    return len(gathers)


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


def take_before_writing(graph: Graph) -> int:
    """Read a donated tensor that is itself a result before anything is written over it.

    Inductor drops the clone of a result that is another donated argument (2.13, 2.14), and then reads that argument
    after its own result has been written there: `(params, previous) -> (new, params)` would return `new` twice.

    Args:
        graph: A flat graph that ends with copies into its inputs, changed in place.

    Returns:
        The number of results read early.
    """
    writes = [node for node in graph.nodes if node.target is torch.ops.aten.copy_.default]
    written = {node.args[0] for node in writes}
    early = [(node, node.args[1]) for node in writes if _origin(node.args[1]) in written - {node.args[0]}]
    for node, source in early:
        with graph.inserting_before(writes[0]):
            # By arithmetic, since copies that change nothing are dropped. Multiplying by one keeps every number.
            if source.meta["val"].dtype == torch.bool:
                taken = graph.call_function(torch.ops.aten.logical_or.default, (source, source))
            else:
                taken = graph.call_function(torch.ops.aten.mul.Tensor, (source, 1))
            taken.meta["val"] = source.meta["val"]
        node.args = (node.args[0], taken)
    return len(early)


def _origin(node: Node) -> Node:
    """The node whose numbers a chain of views and copies hands on."""
    while node.op == "call_function" and (_keeps_values(node) or node.target is torch.ops.aten.clone.default):
        node = node.all_input_nodes[0]
    return node


def _call(graph: Graph, op: Any, *args: Any) -> Node:
    node = graph.call_function(op, args)
    node.meta["val"] = op(*[arg.meta["val"] if isinstance(arg, Node) else arg for arg in args])
    node.meta["autograd_backward"] = True
    return node
