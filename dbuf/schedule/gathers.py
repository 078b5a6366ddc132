"""Where the gathers of `gathered` stand in the graph."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from dbuf.collectives import GATHER_MARK, is_collective
from dbuf.compat import node_mark
from dbuf.schedule.values import keeps_values

__all__ = ["parts_of_gathers", "prefetch_gathers", "sink_gathers"]


def sink_gathers(graph: Graph) -> int:
    """Move every gather of `gathered`, and the views of it, in front of the first computation that reads it.

    Inductor's pattern passes sort the graph anew and leave nodes that need nothing but inputs, gathers above all,
    as early as they can stand; each weight would then live from the start of the step. Nothing moves behind the first
    write into an input: a gather reads what is donated before the result is written there.

    Args:
        graph: A flat graph, changed in place.

    Returns:
        The number of nodes that are part of a gather.
    """
    gathers = parts_of_gathers(graph)
    order = {node: i for i, node in enumerate(graph.nodes)}
    writes = [node for node in graph.nodes if node.target is torch.ops.aten.copy_.default][:1]
    reader: dict[Node, Node] = {}
    for node in reversed(list(graph.nodes)):
        if node in gathers and node.users:
            reader[node] = min([reader.get(user, user) for user in node.users] + writes, key=order.__getitem__)
    for node in sorted(reader, key=order.__getitem__):
        reader[node].prepend(node)
    return len(gathers)


def prefetch_gathers(graph: Graph, groups_in_flight: int) -> int:
    """Start every gather of `gathered` once an earlier one has arrived: with two in flight, the one before it.

    After `sink_gathers`. What a gather does before its transfer (padding, casting, gathering over another axis) moves
    with it. Which gather follows which is the order of their readers, alike on all ranks.

    Args:
        graph: A flat graph, changed in place.
        groups_in_flight: Gathered groups alive at once, the one in use included; 1 moves nothing.

    Returns:
        The number of gathers that start earlier now.
    """
    parts = parts_of_gathers(graph)
    starts = [node for node in graph.nodes if node in parts and _starts_last_transfer(node, parts)]
    moved = 0
    for start, earlier in zip(starts[groups_in_flight - 1 :], starts, strict=False):
        arrived = next((user for user in earlier.users if user in parts), None)
        if groups_in_flight < 2 or arrived is None or arrived > start:
            continue
        moving = _needed_after(arrived, start)
        if any(is_collective(node.target) and node not in parts for node in moving):
            continue  # its weights are a result of this program, and not there yet
        for node in reversed(moving):
            arrived.append(node)
        moved += 1
    return moved


def _needed_after(place: Node, node: Node) -> list[Node]:
    """A node and all that it needs and that stands after `place`, in order: constants and other local work, too."""
    found, stack = {node}, [node]
    while stack:
        new = [source for source in stack.pop().all_input_nodes if source > place and source not in found]
        found.update(new)
        stack.extend(new)
    return sorted(found)


def _starts_last_transfer(node: Node, parts: set[Node]) -> bool:
    """Whether a part of a gather starts its only transfer, or the last of those over several axes."""
    if not is_collective(node.target):
        return False
    stack = list(node.users)
    while stack:
        user = stack.pop()
        if user in parts:
            if is_collective(user.target):
                return False
            stack.extend(user.users)
    return True


def parts_of_gathers(graph: Graph) -> set[Node]:
    """Every node of a gather of `gathered`: its collectives, what prepares them, and views of the result."""
    parts: set[Node] = set()
    for node in graph.nodes:
        inputs = node.all_input_nodes
        views = bool(inputs) and keeps_values(node) and all(source in parts for source in inputs)
        if node.op == "call_function" and (node_mark(node, GATHER_MARK) or views):
            parts.add(node)
    return parts
