"""Owners of matrices: balance on real models, ties by order, the same on every rank, and what cannot be balanced."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from dbuf.errors import LayoutError
from dbuf.plan import newton_schulz_flops, plan_owners

MODELS = json.loads((Path(__file__).parents[1] / "cases" / "models.json").read_text())
NOT_MATRICES = ("embed", "head")  # they get AdamW

# Makespan / mean by Newton-Schulz work at 64, 256 and 1024 ranks; experts count as matrices. Where a number is above
# one by much, one matrix is above the mean, or there are fewer matrices than ranks.
BALANCE = {
    "llama3-8b": (1.057, 2.114, 8.455),
    "deepseek-v3": (1.001, 1.002, 1.003),
}


def matrices(model: str) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = []
    for unit in MODELS[model]["units"]:
        if unit["name"] in NOT_MATRICES:
            continue
        for _, shape in unit["tensors"] * unit["count"]:
            shapes += [tuple(shape[1:])] * shape[0] if len(shape) == 3 else [tuple(shape)] * (len(shape) == 2)
    return shapes


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("ranks", [64, 256, 1024])
def test_balance_on_real_models_is_within_grahams_bound(model: str, ranks: int) -> None:
    shapes = matrices(model)
    plan = plan_owners(shapes, ranks, cost="newton_schulz")
    # Longest first is within 4/3 - 1/(3 n) of the best, and the best is no less than each of these.
    costs = sorted(map(newton_schulz_flops, shapes), reverse=True)
    two = costs[ranks - 1] + costs[ranks] if len(costs) > ranks else 0.0
    at_least = max(plan.best_balance, two / (sum(costs) / ranks))
    assert at_least <= plan.balance <= (4 / 3 - 1 / (3 * ranks)) * max(at_least, 1.0) + 1e-9
    assert math.isclose(sum(plan.costs), sum(costs)) and sum(plan.numels) == sum(map(math.prod, shapes))


@pytest.mark.parametrize("model", BALANCE)
def test_balance_on_real_models_in_numbers(model: str) -> None:
    found = [plan_owners(matrices(model), ranks, cost="newton_schulz").balance for ranks in (64, 256, 1024)]
    assert all(balance <= bound for balance, bound in zip(found, BALANCE[model], strict=True))


def test_deepseek_v3_on_1024_ranks() -> None:
    plan = plan_owners(matrices("deepseek-v3"), 1024, cost="newton_schulz")
    assert plan.balance <= 1.02 and plan.memory_skew <= 1.08


def test_ties_go_by_order_to_the_lowest_rank() -> None:
    assert plan_owners([(2, 2)] * 5, 3).owners == (0, 1, 2, 0, 1)
    assert plan_owners([(1, 4), (4, 1), (2, 2)], 2).owners == (0, 1, 0)
    # Of equal work the owner with fewer elements: norms cost nothing here, and are spread all the same.
    assert plan_owners([(8,)] * 4, 2, cost=lambda shape: 0.0).owners == (0, 1, 0, 1)


def test_a_matrix_above_the_mean_is_said() -> None:
    plan = plan_owners([(8, 8), (2, 2), (2, 2)], 2)
    assert plan.balance == plan.best_balance == 64 / 36
    assert "one tensor costs 1.778 x the mean, so no assignment does better" in str(plan)
    assert "does better" not in str(plan_owners([(2, 2)] * 4, 2))


def test_nothing_at_all() -> None:
    plan = plan_owners([], 3)
    assert plan.owners == () and plan.balance == plan.memory_skew == plan.best_balance == 1.0


def test_newton_schulz_counts_its_products() -> None:
    m, n = 3, 5
    products = 2 * m * n * m + 2 * m * m * m + 2 * m * m * n  # X Xᵀ, its square, their sum by X
    assert newton_schulz_flops((m, n), 1) == newton_schulz_flops((n, m), 1) == products
    assert newton_schulz_flops((4, m, n), 2) == 8 * products
    assert newton_schulz_flops((7,)) == 7


@pytest.mark.parametrize(
    "shapes, owners, cost, message",
    [
        ([(2, 2)], 0, "numel", "num_owners is not a positive int"),
        ([(2, -2)], 2, "numel", "bad shape"),
        ([(2, 2)], 2, "flops", "no such cost"),
        ([(2, 2)], 2, lambda shape: -1.0, r"\(2, 2\): -1.0"),
        ([(2, 2)], 2, lambda shape: math.nan, "not a finite number"),
    ],
)
def test_refusals(shapes: object, owners: int, cost: object, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        plan_owners(shapes, owners, cost=cost)  # type: ignore[arg-type]
