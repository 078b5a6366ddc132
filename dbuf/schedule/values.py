"""Nodes and their values: which hand one on without computing with it, and new ones that know theirs."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

__all__ = ["insert_call", "insert_copy", "keeps_values", "origin"]


def keeps_values(node: Node) -> bool:
    """Whether a node only looks at its input otherwise: a view, one output of several, or a cast."""
    if node.target is operator.getitem:
        return True
    # Inductor has decomposed every cast by now.
    return bool(getattr(node.target, "is_view", False)) or node.target is torch.ops.prims.convert_element_type.default


def origin(node: Node) -> Node:
    """The node whose numbers a chain of views and copies hands on."""
    while node.op == "call_function" and (keeps_values(node) or node.target is torch.ops.aten.clone.default):
        node = node.all_input_nodes[0]
    return node


def insert_call(graph: Graph, meta: Mapping[str, Any], op: Any, *args: Any, **kwargs: Any) -> Node:
    """Call `op` where the graph inserts nodes now, with the value that its inputs' values give."""
    node = graph.call_function(op, args, kwargs)
    values: Any = map_arg(args, lambda arg: arg.meta["val"])
    node.meta = {**meta, "val": op(*values, **kwargs)}
    node.meta.pop("eager_input_vals", None)  # of the node whose place it takes; Inductor lays out by them
    return node


def insert_copy(graph: Graph, node: Node) -> Node:
    """Copy a node where the graph inserts nodes now: by arithmetic, since copies that change nothing are dropped.

    Multiplying real numbers by one keeps every one of them; of complex ones it would not.
    """
    aten, dtype = torch.ops.aten, node.meta["val"].dtype
    if dtype == torch.bool:
        return insert_call(graph, node.meta, aten.logical_or.default, node, node)
    if not dtype.is_complex:
        return insert_call(graph, node.meta, aten.mul.Tensor, node, 1)
    parts = insert_call(graph, node.meta, aten.view_as_real.default, node)
    return insert_call(graph, node.meta, aten.view_as_complex.default, insert_copy(graph, parts))
