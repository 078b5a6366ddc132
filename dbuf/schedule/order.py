"""The order in which a compiled program issues its operations: collectives start early and are waited for late.

Pure integers. Inductor decides the order of everything last, by sizes that a rank sees; this decides it once more,
without ever exchanging two collectives, so that every rank issues them in the order of the graph.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from dbuf.compat import ScheduledOp

__all__ = ["Order", "order_ops"]


@dataclasses.dataclass(frozen=True)
class Order:
    """What `order_ops` decided.

    Attributes:
        positions: The operations in their new order.
        gathers_early: Gathers that start before another operation than their own wait.
        reductions_late: Reductions that compute runs behind.
        gathered_alive: The most gathered buffers that exist at once.
    """

    positions: tuple[int, ...]
    gathers_early: int
    reductions_late: int
    gathered_alive: int


def order_ops(
    ops: Sequence[ScheduledOp], *, groups_in_flight: int = 2, gathers: bool = True, reductions: bool = True
) -> Order:
    """Place starts and waits; compute keeps its order, but for what has to wait for a reduction.

    A gather starts as soon as fewer than `groups_in_flight` gathered buffers exist, and is waited for right before
    its first reader. A reduction starts as soon as only light work is left to do for its input, and is waited for
    when the next one has started; what reads it comes after that. Of collectives that have to be alone, each is
    waited for before the next one starts; if nobody reads it, once its share of the heavy compute has run behind it.

    Args:
        ops: In an order that works.
        groups_in_flight: The most gathered buffers to exist at once, the one in use included.
        gathers: Whether gathers start early; otherwise each starts where it is waited for.
        reductions: Whether reductions are waited for late; otherwise where the given order reads them.
    """
    run = _Run(ops, groups_in_flight, gathers, reductions)
    run.start_what_can()
    for i, op in enumerate(ops):
        if op.kind == "compute":
            run.visit(i)
    for i in range(len(ops)):
        run.force(i)
    return run.result()


class _Run:
    """One walk over a program."""

    def __init__(self, ops: Sequence[ScheduledOp], limit: int, gathers: bool, reductions: bool) -> None:
        self.ops, self.limit, self.gathers, self.reductions = ops, limit, gathers, reductions
        self.chain = [i for i, op in enumerate(ops) if op.kind in ("gather", "reduction")]
        starts = set(self.chain)  # a wait may also read what its transfer was started from
        self.wait_of = {r: i for i, op in enumerate(ops) if op.kind == "wait" for r in op.reads if r in starts}
        self.needs = [self._all_needs(i) for i in range(len(ops))]
        self.before = self._wait_for_the_one_before()
        self.readers = self._readers_of_gathers()
        self.lazy = self._lazy()
        self.done = [False] * len(ops)
        self.out: list[int] = []
        self.alive: set[int] = set()
        self.most_alive = 0
        self.next_start = 0  # in the chain
        self.in_flight: list[int] = []  # reductions that nobody has waited for
        self.late: list[int] = []  # compute that waits for one of them
        self.share = sum(op.heavy for op in ops) // max(len(self.chain), 1)  # of one collective
        self.heavy_since_start = 0

    def _all_needs(self, i: int) -> tuple[int, ...]:
        """What has to be done before an operation; who follows the start of a transfer follows its end as well."""
        op = self.ops[i]
        if op.kind != "compute":
            return op.needs
        return tuple(dict.fromkeys([*op.needs, *(self.wait_of[n] for n in op.needs if n in self.wait_of)]))

    def _wait_for_the_one_before(self) -> dict[int, int]:
        """Have each collective that has to be alone need the wait for the last one; returns those waits."""
        alone = [i for i in self.chain if self.ops[i].alone]
        before = {i: self.wait_of[last] for last, i in itertools.pairwise(alone) if last in self.wait_of}
        for i, wait in before.items():
            self.needs[i] = (*self.needs[i], wait)
        return before

    def _readers_of_gathers(self) -> dict[int, set[int]]:
        readers: dict[int, set[int]] = {i: set() for i in self.chain if self.ops[i].kind == "gather"}
        for i, op in enumerate(self.ops):
            for source in op.reads:
                waited_for = self.ops[source].reads if self.ops[source].kind == "wait" else (source,)
                for start in readers.keys() & set(waited_for):
                    readers[start].add(i)
        return readers

    def _lazy(self) -> set[int]:
        """Light compute that needs nothing but gathers, or nothing at all: constants, parts of weights."""
        lazy = {wait for start, wait in self.wait_of.items() if self.ops[start].kind == "gather"}
        lazy |= set(self.readers)
        for i, op in enumerate(self.ops):
            if op.kind == "compute" and not op.heavy and lazy.issuperset(self.needs[i]):
                lazy.add(i)
        return lazy

    def visit(self, i: int) -> None:
        """A compute operation's turn has come. What needs no other, but gathers, is left until it is read."""
        if self.done[i] or i in self.lazy:
            return
        if self.reductions and self._needs_late(i):
            self.late.append(i)
            return
        for n in self.needs[i]:
            self.force(n)
        self.start_what_can()  # behind this operation, if what it waited for has made room
        self.force(i)
        self.start_what_can()

    def _needs_late(self, i: int) -> bool:
        waits = {self.wait_of.get(start) for start in self.in_flight}
        late = set(self.late)
        return any(n in waits or n in late for n in self.needs[i] if not self.done[n])

    def force(self, i: int) -> None:
        """Issue an operation, after all that it needs."""
        stack = [i]
        while stack:
            top = stack[-1]
            missing = [n for n in self.needs[top] if not self.done[n]]
            if self.done[top] or not missing:
                stack.pop()
                if not self.done[top]:
                    self._issue(top)
            else:
                stack.extend(sorted(missing, reverse=True))

    def _issue(self, i: int) -> None:
        self.done[i] = True
        self.out.append(i)
        kind = self.ops[i].kind
        self.heavy_since_start += self.ops[i].heavy
        if kind in ("gather", "reduction"):
            self.heavy_since_start = 0
        if kind == "gather":
            self.alive.add(i)
            self.most_alive = max(self.most_alive, len(self.alive))
        elif kind == "reduction":
            self.in_flight.append(i)
        elif kind == "wait":
            self.in_flight = [start for start in self.in_flight if self.wait_of.get(start) != i]
        for start in [g for g in self.alive if all(self.done[r] for r in self.readers[g])]:
            self.alive.remove(start)

    def start_what_can(self) -> None:
        """Start collectives in their order, as far as inputs and memory allow."""
        while self.next_start < len(self.chain):
            i = self.chain[self.next_start]
            if not self.done[i]:
                if not self._may_start(i):
                    return
                self.force(i)
                if self.reductions:
                    self._finish_reductions(but=i)
            self.next_start += 1

    def _may_start(self, i: int) -> bool:
        if i in self.before and not self.done[self.before[i]] and self.heavy_since_start < self.share:
            return False
        if self.ops[i].kind == "reduction":
            return self._is_ready(i, heavy=False)
        return self.gathers and len(self.alive) < self.limit and self._is_ready(i, heavy=True)

    def _is_ready(self, i: int, heavy: bool) -> bool:
        """Whether what a start still needs is compute alone, and none of it heavy unless `heavy`."""
        stack = [n for n in self.needs[i] if n != self.before.get(i)]
        while stack:
            n = stack.pop()
            if not self.done[n]:
                if self.ops[n].kind != "compute" or (self.ops[n].heavy and not heavy):
                    return False
                stack.extend(self.needs[n])
        return True

    def _finish_reductions(self, but: int) -> None:
        """When a collective has started: wait for reductions before the last, and catch up with what reads them."""
        for start in self.in_flight[:-1] if self.ops[but].kind == "reduction" else []:
            if start in self.wait_of:
                self.force(self.wait_of[start])
        late, self.late = self.late, []
        for i in late:
            if self._needs_late(i):
                self.late.append(i)
            else:
                self.force(i)

    def result(self) -> Order:
        place = {i: at for at, i in enumerate(self.out)}
        early = late = 0
        for start, wait in self.wait_of.items():
            behind = any(self.ops[i].kind == "compute" for i in self.out[place[start] + 1 : place[wait]])
            early += behind and self.ops[start].kind == "gather"
            late += behind and self.ops[start].kind == "reduction"
        return Order(tuple(self.out), early, late, self.most_alive)
