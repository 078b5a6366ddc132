"""Gathers on gloo, which copies all that it gathers once more than needed."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from dbuf.collectives import ALL_GATHER, ALL_TO_ALL, WAIT_FOR
from dbuf.compat import GATHER_START, annotated, group_backend, group_rank, node_is_higher_order, node_is_region
from dbuf.schedule.values import insert_call, keeps_values

__all__ = ["JOIN", "gather_in_pieces_on_gloo"]

Piece = tuple[Node, int, int]  # a 1-D tensor, and from where to where

_aten = torch.ops.aten

# Inductor fuses its own `cat` with anything: also what one group needs of it with what the next group does.
_LIBRARY = torch.library.Library("dbuf", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("join(Tensor[] parts) -> Tensor")  # type: ignore[no-untyped-call]
_LIBRARY.impl("join", torch.cat, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
JOIN = torch.ops.dbuf.join.default


def gather_in_pieces_on_gloo(graph: Graph) -> int:
    """Turn every all-gather over a gloo group into an all-to-all in which each rank sends the others its segment.

    gloo gathers into memory of its own and copies all of it. The exchange receives in place what a rank lacks. A
    tensor that lies in one segment is then a view of this rank's own, or of what has arrived; only what crosses a
    border is put together. A report that is read before this pass says what a step means. Other backends keep theirs,
    and so does what travels in bf16 or fp16: Inductor would read this rank's own segment before it is rounded. All
    ranks say the same: they decide by what is alike on all of them, and not by how a segment came about.

    Args:
        graph: A flat graph, changed in place.

    Returns:
        The number of gathers changed.
    """
    changed, kept = 0, _read_late(graph)
    for node in list(graph.nodes):
        waits = list(node.users)
        if node.target is not ALL_GATHER or any(wait.target is not WAIT_FOR for wait in waits):
            continue
        x, ranks, group = node.args
        own = x.meta["val"]
        fits = own.ndim == 1 and isinstance(own.numel(), int) and own.numel()
        narrow = own.dtype.is_floating_point and own.dtype.itemsize < 4
        if not fits or narrow or group_backend(group) != "gloo":
            continue
        rank, numel = group_rank(group), own.numel()
        each = [numel * (other != rank) for other in range(ranks)]
        meta = annotated(node.meta, GATHER_START)
        with graph.inserting_before(node):
            sent = x if ranks == 2 else insert_call(graph, node.meta, JOIN, [x] * (ranks - 1))
            start = insert_call(graph, meta, ALL_TO_ALL, sent, each, each, group)
        for wait in waits:
            with graph.inserting_before(wait):
                arrived = insert_call(graph, wait.meta, WAIT_FOR, start)
            pieces = [(arrived, 0, rank * numel), (x, 0, numel), (arrived, rank * numel, (ranks - 1) * numel)]
            _read_pieces(graph, wait, [piece for piece in pieces if piece[1] < piece[2]], kept)
        graph.erase_node(node)
        changed += 1
    return changed


def _read_late(graph: Graph) -> set[Node]:
    """Nodes that are returned, or read once an argument has been written, as they are or through views.

    This rank's own segment may be an argument's memory: these need a copy of it.
    """
    kept: set[Node] = set()
    written = False
    late = set()
    for node in graph.nodes:
        written |= node.target is _aten.copy_.default
        if written or node.op == "output":
            late.add(node)
    for node in reversed(list(graph.nodes)):
        if any(user in late or (user in kept and keeps_values(user)) for user in node.users):
            kept.add(node)
    return kept


def _read_pieces(graph: Graph, whole: Node, pieces: list[Piece], kept: set[Node]) -> None:
    """Have what reads `whole` read the pieces that it consists of; `whole` goes."""
    for user in [] if _is_read_as_memory(whole) else list(whole.users):
        args: Any = user.args[1:]
        if user.target is _aten.slice.Tensor and _are_bounds(args):
            _replace(graph, user, _cut(pieces, args[1], args[2]), copy=user in kept)
        elif user.target is _aten.split_with_sizes.default and all(isinstance(size, int) for size in args[0]):
            ends = list(itertools.accumulate(args[0]))
            for part in [part for part in user.users if part.target is operator.getitem]:
                i: Any = part.args[1]
                _replace(graph, part, _cut(pieces, ends[i] - args[0][i], ends[i]), copy=part in kept)
            if not user.users:
                graph.erase_node(user)
    if whole.users:
        _replace(graph, whole, pieces, copy=True)
    else:
        graph.erase_node(whole)


def _is_read_as_memory(node: Node) -> bool:
    """Whether anything reads a node, or a view of it, by an offset that counts from where its memory begins."""
    return any(
        (user.target is _aten.as_strided.default and len(user.args) > 3)
        or user.target is _aten.as_strided_scatter.default
        or (node_is_higher_order(user) and not node_is_region(user))  # such as a mutation's
        or (keeps_values(user) and _is_read_as_memory(user))
        for user in node.users
    )


def _are_bounds(args: Any) -> bool:
    """Whether these are the arguments of a plain part: along the first dimension, from one number to another."""
    return len(args) == 3 and args[0] == 0 and all(isinstance(x, int) for x in args) and 0 <= args[1] <= args[2]


def _cut(pieces: list[Piece], begin: int, end: int) -> list[Piece]:
    """What of the pieces lies from `begin` to `end`, counted in all of them together."""
    found, at = [], 0
    for node, first, last in pieces:
        low, high = max(begin, at), min(end, at + last - first)
        if low < high:
            found.append((node, first + low - at, first + high - at))
        at += last - first
    return found or [(pieces[0][0], 0, 0)]


def _replace(graph: Graph, node: Node, pieces: list[Piece], copy: bool) -> None:
    """Put the pieces, one after the other, in the place of a node; a lone one as a view, or else as a copy."""
    with graph.inserting_before(node):
        parts = []
        for source, begin, end in pieces:
            is_all = (begin, end) == (0, source.meta["val"].numel())
            cut = source if is_all else insert_call(graph, node.meta, _aten.slice.Tensor, source, 0, begin, end)
            parts.append(cut)
        whole = parts[0] if len(parts) == 1 and not copy else insert_call(graph, node.meta, JOIN, parts)
    node.replace_all_uses_with(whole)
    graph.erase_node(node)
