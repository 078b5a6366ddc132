"""What a region that is compiled once hands back of what it was given, or hands back twice."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from dbuf.compat import node_is_backward, node_is_region
from dbuf.schedule.values import insert_copy

__all__ = ["take_aliases_outside"]


def take_aliases_outside(graph: Graph) -> int:
    """Have every result of a region that is compiled once be memory of its own.

    The forward of a region returns what its backward reads: its weights and their transposes, and three views of one
    query-key-value product. Inductor takes each result of a region for memory of its own, and writes other buffers
    there once it is read no more (2.13, 2.14): silently wrong numbers. Here a region returns what it made, once, and
    views of that and of what it was given are taken outside. So a gathered weight that the backward needs is a view
    of the gather in the outer graph, and can be gathered again.

    Args:
        graph: A flat graph with calls of regions, changed in place, and so are the regions' own graphs.

    Returns:
        The number of results taken outside.
    """
    calls: dict[int, list[Node]] = {}
    regions: dict[int, GraphModule] = {}
    for node in graph.nodes:
        if node_is_region(node):
            region = _region_of(node)
            regions[id(region)] = region
            calls.setdefault(id(region), []).append(node)
    taken = 0
    for key, region in regions.items():
        take_aliases_outside(region.graph)  # regions in regions
        output = region.graph.output_node()
        results = list(output.args[0])  # type: ignore[arg-type]
        own = list(dict.fromkeys(_root(r) if isinstance(r, Node) else r for r in results if not _is_given(r)))
        _keep_out_of_concatenations(region.graph, own)
        region.recompile()
        if own == results:
            continue
        for call in calls[key]:
            _read_outside(graph, call, region.graph, results, own)
        taken += sum(isinstance(r, Node) and r not in own for r in results)
        output.args = (tuple(own),)
        for name in ("user_visible_output_idxs", "original_output_strides"):
            output.meta.pop(name, None)
        region.graph.eliminate_dead_code()
        region.recompile()
    return taken


def _region_of(call: Node) -> GraphModule:
    module: Any = call.graph.owning_module
    assert isinstance(call.args[0], Node)
    region = getattr(module, str(call.args[0].target))
    assert isinstance(region, GraphModule)
    return region


def _keep_out_of_concatenations(graph: Graph, own: list[Any]) -> None:
    """Have a result that is concatenated as well copied there: Inductor would make it in its place there."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default):
        for part in [part for part in node.all_input_nodes if _root(part) in own]:
            with graph.inserting_before(node):
                copy = insert_copy(graph, part)
            node.replace_input_with(part, copy)


def _read_outside(graph: Graph, call: Node, inner: Graph, results: list[Any], own: list[Any]) -> None:
    """Replace what reads the results of one call by `own` results, arguments, and views of both."""
    readers = list(call.users)
    assert all(reader.target is operator.getitem for reader in readers)
    outer: dict[Node, Any] = dict(zip(inner.find_nodes(op="placeholder"), call.args[2:], strict=True))
    call.meta["val"] = tuple(result.meta["val"] if isinstance(result, Node) else result for result in own)
    end = call
    for i, result in enumerate(own):
        if isinstance(result, Node):
            end = outer[result] = _insert(end, call, operator.getitem, (call, i), {})
    for reader in readers:
        result = results[reader.args[1]]  # type: ignore[index]
        if not isinstance(result, Node):
            reader.args = (call, own.index(result))
            continue
        for node in _missing(result, outer):
            args, kwargs = map_arg((node.args, node.kwargs), outer.__getitem__)
            end = outer[node] = _insert(end, call, node.target, args, kwargs)
        reader.replace_all_uses_with(outer[result])
        graph.erase_node(reader)


def _insert(place: Node, call: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
    """A new node behind `place`, of the same direction as `call`."""
    with call.graph.inserting_after(place):
        node = call.graph.call_function(target, args, kwargs)
    args, kwargs = map_arg((args, kwargs), lambda source: source.meta["val"])
    node.meta = {"val": target(*args, **kwargs), "autograd_backward": node_is_backward(call)}
    return node


def _missing(node: Node, outer: dict[Node, Any]) -> list[Node]:
    """A node and what it is made of, as far as the outer graph has none of it yet, in order."""
    found, stack = set(), [node]
    while stack:
        source = stack.pop()
        if source not in outer and source not in found:
            found.add(source)
            stack.extend(source.all_input_nodes)
    return sorted(found)


def _is_given(result: Any) -> bool:
    return isinstance(result, Node) and _root(result).op == "placeholder"


def _root(node: Node) -> Node:
    """The node whose memory a chain of views looks at."""
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_view(node: Node) -> bool:
    if node.target is operator.getitem:  # one part of a split, but not one result of an operation that has several
        return _is_view(node.all_input_nodes[0])
    return bool(getattr(node.target, "is_view", False))
