"""What `jit` does to let collectives run behind compute, and how to switch parts of it off."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch.fx import Graph

from dbuf.compat import ScheduledOp
from dbuf.errors import DbufError, require_positive
from dbuf.schedule.exchange import exchange_on_gloo
from dbuf.schedule.gathers import prefetch_gathers
from dbuf.schedule.order import order_ops
from dbuf.schedule.pieces import gather_in_pieces_on_gloo

__all__ = ["Overlap"]


@dataclasses.dataclass(frozen=True)
class Overlap:
    """How a compiled step overlaps its collectives with compute; over gloo, which can crash with two, one at a time.

    Attributes:
        gathers: Start gathers of `gathered` early, as far as `groups_in_flight` allows.
        reductions: Wait for reductions late: when the next one has started.
        groups_in_flight: Gathered groups alive at once, the one in use included.
        exchange: On gloo, gather and reduce by an all-to-all: gathers without a copy, reductions with a local sum,
            and half the bytes; not what travels in bf16 or fp16. From three ranks on a sum may then differ from eager's
            in its last bit.
        report: Called with a line about what was done, such as `print`, at every compilation.
    """

    gathers: bool = True
    reductions: bool = True
    groups_in_flight: int = 2
    exchange: bool = True
    report: Callable[[str], object] | None = None

    def __post_init__(self) -> None:
        require_positive(self.groups_in_flight, "groups_in_flight", "dbuf.schedule.Overlap", DbufError)

    def prefetch(self, graph: Graph) -> None:
        """Put the gathers of a graph, after all other passes, into the order in which they are to start."""
        moved = prefetch_gathers(graph, self.groups_in_flight) if self.gathers else 0
        self._say(f"graph: {moved} gathers start before the one before them is used")

    def translate(self, graph: Graph) -> None:
        """Put collectives that a backend is slow at in other terms, after a report has been read."""
        gathers = gather_in_pieces_on_gloo(graph) if self.exchange else 0
        reductions = exchange_on_gloo(graph) if self.exchange else 0
        self._say(f"graph: {gathers} gathers are an exchange, {reductions} reductions an exchange and a local sum")

    def place(self, ops: list[ScheduledOp]) -> list[int]:
        """The order in which a program of Inductor's issues its operations."""
        order = order_ops(ops, groups_in_flight=self.groups_in_flight, gathers=self.gathers, reductions=self.reductions)
        self._say(
            f"program: {order.gathers_early} gathers and {order.reductions_late} reductions run behind compute, "
            f"{order.gathered_alive} gathered buffers alive"
        )
        return list(order.positions)

    def _say(self, line: str) -> None:
        if self.report is not None:
            self.report(f"dbuf.jit overlap, {line}")
