"""Every strategy trains as one process does: losses, norms and parameters, and moves what its row says."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest

import training
from dbuf import testing

STEPS = 10
WORLDS = ((1,), (2,), (3,), (4,), (2, 2), (1, 2), (2, 1))
LINES = [(name, shape, m) for name in training.STRATEGIES for shape in WORLDS for m in (1, 3)]


def _meshed(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """HSDP and HFSDP want two axes: one of size 1 in front."""
    return (1, *shape) if name in ("hsdp", "hfsdp") and len(shape) == 1 else shape


# Compiling all of them takes longer than the rest of the suite: here is each strategy, with one or the other number of
# microbatches, and `test_parity.py` has ZeRO-3 at all worlds; `make exhaustive` runs the others, and all with kernels.
COMPILED = {
    ("ddp", (2,), 3),
    ("zero1", (2,), 1),
    ("zero2", (1, 2), 3),
    ("zero3", (3,), 3),
    ("hsdp", (2, 2), 3),
    ("hfsdp", (2, 2), 1),
}


def _many(cases: list[tuple[str, tuple[int, ...], int]], **options: Any) -> list[dict[str, Any]]:
    return [training.train(shape, name, m, STEPS, **options) for name, shape, m in cases]


def _compare(got: dict[str, Any], microbatches: int, clip: float | None = None) -> None:
    expected = training.alone(microbatches > 1, STEPS, clip)
    for part in ("losses", "norms", "params"):
        testing.assert_close(got[part], expected[part])


@pytest.mark.parametrize("ranks", [1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_eager(ranks: int) -> None:
    cases = [(n, _meshed(n, shape), m) for n, shape, m in LINES if math.prod(shape) == ranks]
    for of_rank in testing.run(_many, cases, world_size=ranks):
        for (_, _, m), got in zip(cases, of_rank, strict=True):
            _compare(got, m)


def _marks(case: tuple[str, tuple[int, ...], int]) -> list[Any]:
    return [pytest.mark.slow] if case in COMPILED else [pytest.mark.slow, pytest.mark.exhaustive]


@pytest.mark.parametrize(
    ("name", "shape", "m"),
    [
        pytest.param(*case, marks=_marks(case), id=f"{case[0]}-{'x'.join(map(str, case[1]))}-{case[2]}")
        for case in LINES
    ],
)
def test_compiled(name: str, shape: tuple[int, ...], m: int) -> None:
    shape = _meshed(name, shape)
    run = functools.partial(training.train, compiled=True)
    for got in testing.run(run, shape, name, m, STEPS, world_size=math.prod(shape)):
        _compare(got, m)
        report = got["report"]
        assert (report.graph_breaks, report.compiles) == (0, 1)
        assert report.collectives == expected_collectives(name, shape, m)


def expected_collectives(name: str, shape: tuple[int, ...], m: int) -> dict[str, int]:
    """The design's table for G groups, of which the embedding saves its second gather; by axis, size 1 nothing."""
    groups = len(training.GROUPS)
    outer = sum(size > 1 for size in shape[:-1])
    inner = int(shape[-1] > 1)
    axes = outer + inner
    repeated = 2 * m * groups - m  # gathers forward and backward; the embedding's backward reads no weight
    table = {
        "ddp": (0, 0, groups * axes),
        "zero1": (groups * axes, groups * axes, 0),
        "zero2": (groups * axes, m * groups * axes, 0),
        "zero3": (repeated * axes, m * groups * axes, 0),
        "hsdp": (repeated * inner, m * groups * inner, groups * outer),
        "hfsdp": (repeated * inner + groups * outer, m * groups * inner + groups * outer, 0),
    }
    counts = dict(zip(("all_gather", "reduce_scatter", "all_reduce"), table[name], strict=True))
    return {kind: count for kind, count in counts.items() if count}
