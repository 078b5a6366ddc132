"""What is so cheap to compute that the backward does it again rather than keep it."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from dbuf.collectives import GATHER_MARK, is_collective
from dbuf.compat import node_is_backward, node_is_recomputed, node_mark
from dbuf.schedule.values import keeps_values

__all__ = ["cheap_to_repeat"]

_aten = torch.ops.aten
_CHEAP = (_aten.mul.Tensor, _aten.add.Tensor, _aten.sub.Tensor, _aten.neg.default)
_NEAR = 3  # groups whose second gathers can be under way while the forward still runs


def cheap_to_repeat(graph: Graph) -> set[Node]:
    """Forward nodes that are a few multiplications away from what the backward keeps anyway.

    Above all the results of norms: their backward keeps the input, from which a scale and a shift lead to what the
    product after the norm has read. torch's partitioner would find them; one joint graph has none. Nothing is repeated
    for the last groups before the backward: it is kept for a moment only, and Inductor would fuse both copies, and wait
    for the second gather in the forward. Nor is what another group reads, or has computed a part of: a backward would
    need the weights of two groups. Nor is what `remat` repeats, or keeps, by its own rule.

    Args:
        graph: A flat graph, forward and backward, after `sink_gathers`; nothing is changed.

    Returns:
        The nodes, and those between them and what is kept.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    gathers = [i for node, i in order.items() if node_mark(node, GATHER_MARK) and is_collective(node.target)]
    again = _gathered_again(graph)
    found: set[Node] = set()
    for node in graph.nodes:
        if node.target not in _CHEAP or node_is_backward(node) or node_is_recomputed(node):
            continue
        own = bisect(gathers, order[node])
        group_of = {user: bisect(gathers, order[user]) for user in _readers(node)}
        forward = [group for user, group in group_of.items() if not node_is_backward(user)]
        backward = [group for user, group in group_of.items() if node_is_backward(user)]
        if backward and all(group == own for group in forward) and (not gathers or own + _NEAR <= min(backward)):
            found |= _steps_from_kept(node, gathers, order, again) or set()
    return found


def _gathered_again(graph: Graph) -> set[Node]:
    """Gathered weights that the backward reads in any case, with what stands between them and their collective."""
    found: set[Node] = set()
    for node in graph.nodes:
        if not (node_mark(node, GATHER_MARK) and is_collective(node.target)):
            continue
        seen, stack, is_read = {node}, [node], False
        while stack:
            for user in stack.pop().users:
                if node_is_backward(user):
                    is_read = True
                elif user not in seen and (node_mark(user, GATHER_MARK) or keeps_values(user)):
                    seen.add(user)
                    stack.append(user)
        found |= seen if is_read else set()
    return found


def _steps_from_kept(node: Node, gathers: list[int], order: dict[Node, int], again: set[Node]) -> set[Node] | None:
    """The cheap nodes from what is kept to a node, itself included; None if something would have to be kept for it.

    They are of the node's own group: between them and the node no weights are gathered. Nor are any gathered for them:
    what is cheap depends on shapes, which need not be the same on all ranks, and the collectives must be.
    """
    own = bisect(gathers, order[node])
    steps, stack, shape = set(), [node], _shape(node)
    while stack:
        step = stack.pop()
        steps.add(step)
        if _joins(step, shape):
            return None
        for source in step.all_input_nodes:
            if source in steps or source.op == "placeholder":
                continue
            if node_mark(source, GATHER_MARK):
                if source not in again:
                    return None
                continue
            step_on = source.target in _CHEAP or keeps_values(source)
            inside = bisect(gathers, order[source]) == own and not node_is_recomputed(source)
            if step_on and inside and not _joins(source, shape):
                stack.append(source)
            elif not (_is_small(source, shape) or any(map(node_is_backward, _readers(source)))):
                return None
    return steps


def _joins(node: Node, shape: tuple[int, ...]) -> bool:
    """Whether a node adds two large tensors: a residual, which is kept for the backward of what follows.

    Ranks may have batches of other sizes and must all say the same, so weights never count, nor does how much smaller
    a tensor is.
    """
    sources = [source for source in node.all_input_nodes if not node_mark(source, GATHER_MARK)]
    large = {source for source in sources if not _is_small(source, shape)}
    return node.target is not _aten.mul.Tensor and len(large) > 1


def _readers(node: Node) -> Iterator[Node]:
    """What computes with a node, also through views."""
    stack = list(node.users)
    while stack:
        user = stack.pop()
        if keeps_values(user):
            stack.extend(user.users)
        else:
            yield user


def _is_small(node: Node, shape: tuple[int, ...]) -> bool:
    """Whether a tensor has fewer dimensions than `shape`, or one number where `shape` has a last dimension of many.

    Never by the dimensions before it: a batch of one looks like a broadcast, and only this rank may have one.
    """
    own = _shape(node)
    return len(own) < len(shape) or (len(own) == len(shape) and own[-1:] == (1,) != shape[-1:])


def _shape(node: Node) -> tuple[int, ...]:
    value = node.meta.get("val")
    sizes = value.shape if isinstance(value, torch.Tensor) else ()
    return tuple([size if isinstance(size, int) else size.node.hint for size in sizes])
