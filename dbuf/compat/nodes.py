"""Of nodes of a graph: what torch noted on them, and what their operations do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.fx.traceback import annotate

__all__ = [
    "GATHER_START",
    "annotate",
    "annotated",
    "node_draws_random",
    "node_is_backward",
    "node_is_higher_order",
    "node_is_inlined",
    "node_is_recomputed",
    "node_is_region",
    "node_mark",
    "node_may_be_in_place",
    "node_region",
    "numel_hint",
]


GATHER_START = "dbuf_gather_start"  # on what starts a gather and is no all-gather


def annotated(meta: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The `meta` of a graph node with what `annotate({key: True})` would have put on it."""
    return {**meta, "custom": {**meta.get("custom", {}), key: True}}


def node_is_backward(node: torch.fx.Node) -> bool:
    """Whether a graph node was made while `torch.autograd.grad` was traced (2.13, 2.14)."""
    return bool(node.meta.get("autograd_backward", False))


def node_mark(node: torch.fx.Node, key: str) -> Any:
    """What `annotate` put on a graph node, or None."""
    return node.meta.get("custom", {}).get(key)


def node_is_region(node: torch.fx.Node) -> bool:
    """Whether a graph node calls a graph of its own that stands for several equal ones (2.13, 2.14)."""
    return node.target is torch.ops.higher_order.invoke_subgraph


def node_is_higher_order(node: torch.fx.Node) -> bool:
    """Whether a graph node is more than an operation: a region, or one that writes its arguments (2.13, 2.14)."""
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def node_may_be_in_place(node: torch.fx.Node) -> bool:
    """Whether Inductor may do a graph node in the memory of its input, if that is written later (2.13, 2.14)."""
    aten = torch.ops.aten
    names = [
        *("index_put", "_unsafe_index_put", "_philox_uniform", "_philox_normal"),
        *("slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter"),
    ]
    return any(node.target is getattr(aten, name).default for name in names if hasattr(aten, name))


def node_region(node: torch.fx.Node) -> int | None:
    """Which call of `torch.utils.checkpoint` a graph node was made in (2.13, 2.14), or None."""
    return cast(int | None, node.meta.get("ac_graph_id"))


def node_is_recomputed(node: torch.fx.Node) -> bool:
    """Whether `torch.utils.checkpoint` tagged a graph node for recomputation in the backward."""
    from torch.utils.checkpoint import CheckpointPolicy

    tag = node.meta.get("recompute")
    return tag in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def node_draws_random(node: torch.fx.Node) -> bool:
    """Whether a graph node takes random numbers from a generator: doing it again would give others.

    Inductor's own `inductor_random` does not: it is a function of a seed. Attention only does with dropout.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    if "dropout_p" not in names:
        return True
    position = names.index("dropout_p")
    return bool((node.args[position] if len(node.args) > position else node.kwargs.get("dropout_p", 0.0)) != 0.0)


def node_is_inlined(node: torch.fx.Node) -> bool:
    """Whether Inductor computes a graph node where it is read, element by element (2.13, 2.14)."""
    aten = torch.ops.aten
    gathers = (aten.embedding.default, aten.index.Tensor, aten.gather.default, aten.index_select.default)
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in (
        *gathers,
        torch.ops.prims.convert_element_type.default,
    )


def numel_hint(tensor: torch.Tensor) -> int:
    """Elements of a tensor of a graph; where a size varies, those of now, and it stays free (2.13, 2.14)."""
    numel: Any = tensor.numel()
    return int(numel.node.hint) if isinstance(numel, torch.SymInt) else int(numel)
