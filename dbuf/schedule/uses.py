"""What a group hands on is stored, so that its weights can go and no later group computes it again."""

from __future__ import annotations

import operator
from bisect import bisect_right

import torch
from torch.fx import Graph, Node

from dbuf.collectives import is_collective
from dbuf.compat import node_is_backward, node_is_inlined
from dbuf.schedule.gathers import parts_of_gathers
from dbuf.schedule.values import keeps_values

__all__ = ["store_results"]


def store_results(graph: Graph) -> int:
    """Have element-wise results stored that are read after the next gathered group has arrived.

    Inductor computes element-wise operations again wherever they are read. A norm's scale or a bias at the end of a
    block, or an embedding, would then be read by the blocks after it and in the backward, and its whole gathered
    group live until there. The stream of residuals would be summed again from the results of all blocks before, in
    kernels of several groups together, so that a reduction waited for the work of the next group.

    Stored is what is made of a gathered weight by element-wise operations alone, and what depends on one in any way
    and is read by a later group in the same direction. A mask or a table of angles depends on none. After
    `sink_gathers`.

    Args:
        graph: A flat graph, changed in place.

    Returns:
        The number of results that are stored.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    parts = parts_of_gathers(graph)
    arrivals = [order[node] for node in graph.nodes if node in parts and _arrives(node)]
    if not arrivals:
        return 0
    of_weights: dict[Node, int] = {}  # computed from weights where it is read -> the arrival until which they may live
    depends: set[Node] = set()
    stored = 0
    for node in list(graph.nodes):
        next_arrival = arrivals[bisect_right(arrivals, order[node])] if order[node] < arrivals[-1] else len(order)
        if node in parts:
            sources = [of_weights[source] for source in node.all_input_nodes if source in of_weights]
            of_weights[node] = min(sources, default=next_arrival)
            continue
        sources = [of_weights[source] for source in node.all_input_nodes if source in of_weights]
        if sources or not depends.isdisjoint(node.all_input_nodes):
            depends.add(node)
        if node not in depends or not (node_is_inlined(node) or keeps_values(node)):
            continue
        read = _uses(node, order)
        late = sources and max(read.values(), default=0) > min(sources)
        same = [at for user, at in read.items() if node_is_backward(user) == node_is_backward(node)]
        if not _is_view(node) and _is_dense(node) and (late or max(same, default=0) > next_arrival):
            depends.add(_store(graph, node))
            stored += 1
        elif sources:
            of_weights[node] = min(sources)
    return stored


def _arrives(node: Node) -> bool:
    """Whether a part of a gather ends a transfer: the wait for it."""
    return any(is_collective(source.target) for source in node.all_input_nodes)


def _is_view(node: Node) -> bool:
    return keeps_values(node) and node.target is not torch.ops.prims.convert_element_type.default


def _uses(node: Node, order: dict[Node, int]) -> dict[Node, int]:
    """What reads a node, also through views, and where it stands."""
    found: dict[Node, int] = {}
    stack = list(node.users)
    while stack:
        user = stack.pop()
        found[user] = order.get(user, 0)
        if _is_view(user):
            stack.extend(user.users)
    return found


def _is_dense(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_contiguous()


def _store(graph: Graph, node: Node) -> Node:
    """Taking a view by strides needs a buffer, so Inductor makes one; the view itself costs nothing."""
    value = node.meta["val"]
    users = list(node.users)
    with graph.inserting_before(node.next):
        sizes = [_size(graph, node, dim) for dim in range(value.ndim)]
        strides: list[int | Node] = [1]
        for size in reversed(sizes[1:]):
            strides.insert(0, _times(graph, strides[0], size))
        strided = graph.call_function(torch.ops.aten.as_strided.default, (node, sizes, strides[: value.ndim]))
    strided.meta = {**node.meta}
    for user in users:
        user.replace_input_with(node, strided)
    return strided


def _size(graph: Graph, node: Node, dim: int) -> int | Node:
    size = node.meta["val"].shape[dim]
    if isinstance(size, int):
        return size
    found = graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
    found.meta["val"] = size
    return found


def _times(graph: Graph, a: int | Node, b: int | Node) -> int | Node:
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    found = graph.call_function(operator.mul, (a, b))
    found.meta["val"] = operator.mul(*(x.meta["val"] if isinstance(x, Node) else x for x in (a, b)))
    return found
