"""Nodes that hand a value on without computing with it."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

__all__ = ["keeps_values", "origin"]


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
