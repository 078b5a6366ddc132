"""A row of the table: a public function, how it is called, what is expected of it and what it must refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dbuf.placement import describe
from table.cells import Cell

Refusals = Mapping[str, tuple[Callable[[], Any], type[Exception], str]]


def _no_refusals(c: Cell, x: dict[str, Any]) -> Refusals:
    return {}


@dataclass(frozen=True)
class Row:
    """A public function: its calls on a rank by name, what every rank should get, and what is refused.

    Attributes:
        call: From a cell and its inputs to calls by name.
        expect: From a cell to the same names: a `reference.Buffer`, or a list with a value for each rank.
        refusals: Calls that raise, with the error and a pattern of its message.
        program: Names of the calls that are compiled, too: each costs, and there are hundreds of cells.
        how: What compiles it, with all other such rows in one program: "compile" for `torch.compile`, "jit" for
            `dbuf.jit`, "" for nothing.
        all_at_once: For rows that compile by themselves: from cells and inputs to results by cell.
    """

    call: Callable[[Cell, dict[str, Any]], dict[str, Any]]
    expect: Callable[[Cell], dict[str, Any]]
    refusals: Callable[[Cell, dict[str, Any]], Refusals] = _no_refusals
    program: tuple[str, ...] = ()
    how: str = "compile"
    all_at_once: Callable[[list[Cell], dict[str, Any]], dict[str, Any]] | None = None

    def runs(self, name: str, c: Cell) -> bool:
        """Whether a call belongs to this mode. Moves from one place to another are chosen in `Cell`."""
        return not c.compiled or not self.how or name in self.program or "->" in name or name == f"at {c.at_sharded}"


def evaluate(row: Row, c: Cell, x: dict[str, Any]) -> dict[str, Any]:
    return {name: call() for name, call in row.call(c, x).items() if row.runs(name, c)}


def later(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    return lambda: function(*arguments)


def entry(local: torch.Tensor, buf: Any) -> dict[str, Any]:
    layout = buf.layout  # the offset of a tensor without elements means nothing
    offsets = [
        offset for offset, shape in zip(layout.tensor_to_offset, layout.tensor_shapes, strict=True) if 0 not in shape
    ]
    return {
        "local": local.detach().clone(),
        "placements": describe(buf.placements),
        "layout": f"{layout.tensor_shapes} at {offsets}, {layout.size} cut at {layout.rank_to_offset}",
    }
