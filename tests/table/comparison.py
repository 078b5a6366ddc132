"""What a rank found against what it should have found, and the changes that must be noticed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

import reference
from dbuf.testing import assert_bitwise, assert_close
from table.cells import Cell
from table.row import Row, entry


def expectation(row: Row, c: Cell) -> list[dict[str, Any]]:
    """By rank, what the row's results are in a cell."""
    named = row.expect(c)
    out = []
    for rank in range(c.ranks):
        of_rank = {}
        for name, value in named.items():
            if not row.runs(name, c):
                continue
            if isinstance(value, reference.Buffer):
                of_rank[name] = entry(value.locals[rank], value)
            else:
                of_rank[name] = value[rank]
        out.append(of_rank)
    return out


def compare(got: Any, expected: Any, where: str, about: bool = False) -> None:
    """Bit by bit, except what stands below a name that says "about"."""
    if isinstance(expected, dict) and isinstance(got, dict):
        assert list(got) == list(expected), where
        for name, value in expected.items():
            compare(got[name], value, f"{where}, {name!r}", about or str(name).startswith("about"))
        return
    try:
        (assert_close if about else assert_bitwise)(got, expected)
    except AssertionError as error:
        raise AssertionError(f"{where}: {error}") from None


def compare_refusal(raised: tuple[str, str], expected: tuple[str, str], where: str) -> None:
    assert raised[0] == expected[0], f"{where}: {raised[0]} instead of {expected[0]}\n{raised[1]}"
    assert re.search(expected[1], raised[1], re.DOTALL), f"{where}: no {expected[1]!r} in\n{raised[1]}"


def mutants(tree: Any) -> Iterator[Any]:
    leaves, spec = pytree.tree_flatten(tree)
    for i, leaf in enumerate(leaves):
        changed = _changed(leaf)
        if changed is not None:
            yield pytree.tree_unflatten([*leaves[:i], changed, *leaves[i + 1 :]], spec)


def _changed(leaf: Any) -> Any:
    """Another value of the same type, or None where there is none: a tensor without elements."""
    if isinstance(leaf, torch.Tensor):
        if not leaf.numel():
            return None
        other = leaf.clone()
        other.view(-1)[0] = not leaf.view(-1)[0] if leaf.dtype is torch.bool else 1000.0
        return other
    if isinstance(leaf, bool):
        return not leaf
    if isinstance(leaf, str):
        return leaf + "!"
    return 7 if leaf is None else leaf + 1
