"""The first entry of a list that is large enough, in logarithmic time."""

from __future__ import annotations

__all__ = ["FirstAtLeast"]


class FirstAtLeast:
    """A list of ints of at least 0 that finds the first entry of at least a given size in `O(log n)` steps.

    A tree of maxima: node `i` has the children `2 i` and `2 i + 1`, the leaves are the entries.
    """

    def __init__(self, values: list[int]) -> None:
        self._size = 1 << max(len(values) - 1, 0).bit_length()
        self._nodes = [0] * self._size + values + [0] * (self._size - len(values))
        for node in range(self._size - 1, 0, -1):
            self._nodes[node] = max(self._nodes[2 * node], self._nodes[2 * node + 1])

    def set(self, index: int, value: int) -> None:
        """Replace one entry."""
        nodes, node = self._nodes, self._size + index
        nodes[node] = value
        while node > 1:
            node >>= 1
            largest = max(nodes[2 * node], nodes[2 * node + 1])
            if nodes[node] == largest:
                break
            nodes[node] = largest

    def find(self, start: int, need: int) -> int | None:
        """Return the first index from `start` on whose entry is at least `need` (at least 1), or None."""
        nodes, node = self._nodes, self._size + start
        if start >= self._size:
            return None
        while nodes[node] < need:  # go up until a subtree to the right can hold the answer
            while node & 1:
                node >>= 1
            if node == 0:
                return None
            node += 1
        while node < self._size:
            node *= 2
            node += nodes[node] < need
        return node - self._size
