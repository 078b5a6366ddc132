"""What a compiled step does, read from its graph: collectives, bytes, gathered weights alive."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph, Node

from dbuf.collectives import is_collective
from dbuf.compat import node_is_backward, numel_hint

__all__ = ["Collective", "Report", "read_graph"]

_KINDS = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a step.

    Attributes:
        kind: `"all_gather"`, `"reduce_scatter"`, `"all_reduce"`, `"all_to_all"` or `"broadcast"`.
        axis: The mesh axis, or the axes joined by an underscore.
        numel: Elements of the larger side: the whole of a gather, the input of a reduction.
        dtype: On the wire.
        backward: Whether it belongs to a backward.
    """

    kind: str
    axis: str
    numel: int
    dtype: torch.dtype
    backward: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the larger side."""
        return self.numel * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Report:
    """What a step does.

    Attributes:
        sequence: Its collectives in the graph's order.
        ops: How often each operation stands in the graph, by name, such as `"aten.mm"`.
        gathered_nbytes_alive: The most bytes of gathered buffers alive at once, in the graph's order.
        gathered_alive: The most gathered buffers alive at once.
        compiles: Programs that the function has compiled so far.
        graph_breaks: Always 0: a step that breaks is an error.
    """

    sequence: tuple[Collective, ...]
    ops: Mapping[str, int]
    gathered_nbytes_alive: int
    gathered_alive: int
    compiles: int = 0
    graph_breaks: int = 0

    @property
    def collectives(self) -> dict[str, int]:
        """Collectives of buffers by kind; those of one element are in `scalars`."""
        return dict(Counter(c.kind for c in self.sequence if c.numel != 1))

    @property
    def scalars(self) -> dict[str, int]:
        """Collectives of one element by kind: losses, norms, flags."""
        return dict(Counter(c.kind for c in self.sequence if c.numel == 1))

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes by kind, each collective counted by its larger side."""
        total: Counter[str] = Counter()
        for c in self.sequence:
            total[c.kind] += c.nbytes
        return dict(total)

    def __str__(self) -> str:
        rows = Counter((c.kind, c.axis, str(c.dtype).removeprefix("torch."), c.backward) for c in self.sequence)
        lines = [f"{'collective':16} {'axis':10} {'dtype':9} {'pass':9} {'count':>5}"]
        for (kind, axis, dtype, backward), count in sorted(rows.items()):
            lines.append(f"{kind:16} {axis:10} {dtype:9} {'backward' if backward else 'forward':9} {count:5}")
        alive = f"gathered at once: {self.gathered_alive} buffers, {self.gathered_nbytes_alive:,} bytes"
        return "\n".join([*lines, f"{alive}; compiles {self.compiles}, graph breaks {self.graph_breaks}"])


def read_graph(graph: Graph, axis_of_group: Mapping[str, str]) -> Report:
    """Read a step's flat graph, forward and backward together.

    Args:
        graph: After all passes that copy or drop nodes.
        axis_of_group: The mesh axis of each process group by the group's name; another group keeps its name.
    """
    ops = Counter(_name(node) for node in graph.nodes if node.op == "call_function")
    sequence = tuple(_read(node, axis_of_group) for node in graph.nodes if is_collective(node.target))
    count, nbytes = _gathered_alive(graph)
    return Report(sequence, dict(ops), nbytes, count)


def _name(node: Node) -> str:
    target: Any = node.target
    return str(getattr(target, "overloadpacket", getattr(target, "__name__", target)))


def _read(node: Node, axis_of_group: Mapping[str, str]) -> Collective:
    kind = _KINDS[_name(node).rsplit(".", 1)[-1]]
    value = node.meta["val"]
    larger = max(numel_hint(value), numel_hint(node.all_input_nodes[0].meta["val"]))
    group = str(node.args[-1])
    return Collective(kind, axis_of_group.get(group, group), larger, value.dtype, node_is_backward(node))


def _gathered_alive(graph: Graph) -> tuple[int, int]:
    """The most gathered buffers alive at once, and the most bytes, in the graph's order."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    changes: list[tuple[int, int, int]] = []
    for node in graph.nodes:
        if is_collective(node.target) and _name(node).endswith("all_gather_into_tensor"):
            nbytes = numel_hint(node.meta["val"]) * node.meta["val"].dtype.itemsize
            changes += [(order[node], 1, nbytes), (_last_use(node, order) + 1, -1, -nbytes)]
    alive = nbytes = most = most_nbytes = 0
    for _, step, size in sorted(changes, key=lambda change: (change[0], change[1])):
        alive, nbytes = alive + step, nbytes + size
        most, most_nbytes = max(most, alive), max(most_nbytes, nbytes)
    return most, most_nbytes


def _last_use(node: Node, order: dict[Node, int]) -> int:
    """The position of the last node that reads a gathered buffer, also through waits and views."""
    last, stack = order[node], list(node.users)
    while stack:
        user = stack.pop()
        last = max(last, order[user])
        if _name(user).endswith("wait_tensor") or _is_view(user):
            stack.extend(user.users)
    return last


def _is_view(node: Node) -> bool:
    target: Any = node.target
    return getattr(target, "__name__", "") == "getitem" or bool(getattr(target, "is_view", False))
