"""A module on ranks is the module in one process: losses, gradients, parameters, statistics; and it is left alone."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import modules
from dbuf import Replicate, RowAtomic, testing
from modules import CASES

STEPS = 3
MESHES: dict[str, tuple[tuple[int, ...], Any]] = {
    "2": ((2,), (RowAtomic(),)),
    "3": ((3,), (RowAtomic(),)),
    "2 replicated": ((2,), (Replicate(),)),
    "2x2 hybrid": ((2, 2), (Replicate(), RowAtomic())),
}


def check(results: list[dict[str, Any]], case: modules.Case) -> None:
    expected = modules.alone(case, STEPS)
    for got in results:
        for key in ("losses", "grads", "state"):
            testing.assert_close(got[key], expected[key], rtol=1e-5)


def _all_cases(shape: tuple[int, ...], placements: Any) -> dict[str, Any]:
    """Three ranks would have unequal batches: they run what gives each of them all of it."""
    names = [name for name, case in CASES.items() if 8 % torch.Size(shape).numel() == 0 or case.same_batch]
    return {name: modules.train(CASES[name], shape, placements, STEPS) for name in names}


@functools.cache
def run_all(mesh: str) -> list[dict[str, Any]]:
    shape, placements = MESHES[mesh]
    return testing.run(_all_cases, shape, placements, world_size=torch.Size(shape).numel())


@pytest.mark.parametrize("mesh", [pytest.param(m, marks=pytest.mark.slow) if m == "2x2 hybrid" else m for m in MESHES])
def test_eager(mesh: str) -> None:
    """Every way to group, tie, freeze and recompute, with SGD on every other group and AdamW on the rest."""
    results = run_all(mesh)
    for name in results[0]:
        check([result[name] for result in results], CASES[name])


def test_gathers_of_a_step() -> None:
    """Two a group, and one for the embedding; a borrowed tensor is gathered by its borrower, a lent one is free."""
    got = run_all("2")[0]
    count = {name: result["gathers"] for name, result in got.items()}
    assert count["one group"] == 2
    assert count["blocks"] == 2 * 3
    assert count["statistics"] == 2 * 5 - 1
    assert count["remat"] == 2 * 5  # recomputing the embedding reads it again
    assert count["tied in the root"] == 2 * 3
    assert count["tied groups"] == (2 * 3) + 1 + 2  # root and blocks; the embedding's for itself and for the head
    assert got["tied groups"]["groups"] == ["root", "embed", "blocks.0", "blocks.1"]
    assert got["frozen"]["trained"] == ["root", "blocks.1", "head"]
    assert got["frozen"]["groups"] == [
        "root",
        "embed (frozen)",
        "blocks.0 (frozen)",
        "blocks.1",
        "blocks.1 (frozen)",
        "head",
    ]


@pytest.mark.slow
def test_compiled() -> None:
    """Tied, frozen, nested, recomputed, with running statistics: one program, no break, the numbers of one process."""
    case = CASES["everything"]
    results = testing.run(modules.train, case, *MESHES["2"], STEPS, True, world_size=2)
    check(results, case)
    report = results[0]["report"]
    assert report.compiles == 1 and report.graph_breaks == 0
    names = ["root", "embed", "blocks.0", "blocks.0.qkv", "blocks.0.mlp (frozen)"]
    assert results[0]["groups"] == names and results[0]["trained"] == names[:-1]
    # Five buffers, and the embedding's once more for the head. The embedding is not gathered again; the frozen group
    # has no gradient.
    assert report.collectives == {"all_gather": 2 * 6 - 1, "reduce_scatter": 6 - 1}
