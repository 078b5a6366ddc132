"""Every public function of dbuf x {eager, compiled} x layouts x meshes of 1, 2, 3 and 4 ranks x {fp32, bf16}.

A row of the table is a function: how it is called in a cell, what `reference.py` expects of every rank, and what it
must refuse there (`tests/table/`). All cells of a mesh run in one go on its ranks, and one compiled program covers all
of them: a compile costs seconds. Results are compared here, bit by bit; those whose name starts with "about" are sums
of random numbers and are compared within the tolerance of `dbuf.testing.assert_close`.
"""

from __future__ import annotations

import functools
import inspect
import math
import types
from typing import Any

import pytest

import dbuf
import dbuf.testing
from table.cells import MESHES, MODES, cells
from table.comparison import compare, compare_refusal, expectation, mutants
from table.left_out import LEFT_OUT, reason_to_leave_out
from table.rank import run_cells
from table.rows import ROWS

# Compiled, compiled on two axes, half of the other compiled ones, eager.
NUM_LEFT_OUT = 4 * (8 * 8) + 24 * 8 + 4 * (24 * 4) + 5 * (6 * 4 + 8 + 3 + 2 + 1 + 3) + 8 * 8 + 40 + 5 * 8
NUM_RUN = 1539
NUM_REFUSED = {  # calls that must be refused, by mode and mesh
    ("eager", (1,)): 642,
    ("eager", (2,)): 666,
    ("eager", (3,)): 666,
    ("eager", (4,)): 668,
    ("eager", (2, 2)): 1858,
    ("compiled", (1,)): 306,
    ("compiled", (2,)): 314,
    ("compiled", (3,)): 314,
    ("compiled", (4,)): 315,
}
QUICK = {("eager", (2,))}


@functools.cache
def results(mode: str, mesh_shape: tuple[int, ...]) -> list[Any]:
    """What `run_cells` returned on each rank."""
    return dbuf.testing.run(run_cells, mode, mesh_shape, world_size=math.prod(mesh_shape), timeout_s=600)


COLUMNS = [
    pytest.param(
        mode,
        mesh_shape,
        marks=[] if (mode, mesh_shape) in QUICK else [pytest.mark.slow],
        id=f"{mode}-{'x'.join(map(str, mesh_shape))}",
    )
    for mode, mesh_shape in NUM_REFUSED
]


@pytest.mark.parametrize("mode, mesh_shape", COLUMNS)
@pytest.mark.parametrize("function", ROWS)
def test_cells(function: str, mode: str, mesh_shape: tuple[int, ...]) -> None:
    for c in cells(mode, mesh_shape):
        if reason_to_leave_out(function, c):
            continue
        expected_of_rank = expectation(ROWS[function], c)
        for rank, (found, refusals) in enumerate(results(mode, mesh_shape)):
            where = f"{function}, {mode}, {c.key}, rank {rank} of {mesh_shape}"
            assert expected_of_rank[rank], f"{where}: nothing is compared"
            compare(found[function][c.key], expected_of_rank[rank], where)
            for label, (raised, expected) in refusals[function][c.key].items():
                compare_refusal(raised, expected, f"{where}, {label!r}")


@pytest.mark.parametrize("mode, mesh_shape", COLUMNS)
def test_refused_calls_are_counted(mode: str, mesh_shape: tuple[int, ...]) -> None:
    for _, refusals in results(mode, mesh_shape):
        found = [len(of_cell) for of_row in refusals.values() for of_cell in of_row.values()]
        assert sum(found) == NUM_REFUSED[mode, mesh_shape]


def test_every_public_function_has_a_row() -> None:
    assert set(ROWS) == _public(dbuf)
    namespace = dict(vars(dbuf), __all__=[*dbuf.__all__, "new"], new=lambda bufs: bufs)
    assert set(ROWS) != _public(types.SimpleNamespace(**namespace))


def _public(module: Any) -> set[str]:
    return {name for name in module.__all__ if inspect.isfunction(getattr(module, name))}


def test_cells_left_out_are_counted_and_have_a_reason() -> None:
    every = [(f, c) for f in ROWS for mode in MODES for mesh in MESHES for c in cells(mode, mesh)]
    reasons = [reason_to_leave_out(f, c) for f, c in every]
    assert len([reason for reason in reasons if reason]) == NUM_LEFT_OUT
    assert reasons.count(None) == NUM_RUN
    assert all(reason in reasons for _, reason, _ in LEFT_OUT)


# The row of `inspect` has compiled cells alone.
CAN_FAIL = [pytest.param(f, marks=[pytest.mark.slow] if f == "inspect" else []) for f in ROWS]


@pytest.mark.parametrize("function", CAN_FAIL)
def test_every_row_can_fail(function: str) -> None:
    """Each leaf of what is expected, changed on its own, is noticed; so is a call that is not refused, or otherwise."""
    mode = "compiled" if function == "inspect" else "eager"
    c = next(c for c in cells(mode, (2,)) if reason_to_leave_out(function, c) is None)
    expected = expectation(ROWS[function], c)[0]
    changed = list(mutants(expected))
    assert changed
    for mutant in changed:
        with pytest.raises(AssertionError):
            compare(expected, mutant, function)
    _, refusals = results(mode, (2,))[0]
    for raised, wanted in refusals[function][c.key].values():
        for other in (("nothing", ""), (raised[0], "another message"), ("KeyError", raised[1])):
            with pytest.raises(AssertionError):
                compare_refusal(other, wanted, function)
