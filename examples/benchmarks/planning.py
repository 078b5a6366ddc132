"""How long planning takes, and how much padding is left: real models, and growth in tensors and in ranks.

    python examples/benchmarks/planning.py

Prints processor seconds of a plan, which are this machine's, and padding, which is not. No ranks are started.
"""

from __future__ import annotations

import functools
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dbuf

MODELS = json.loads((Path(__file__).parents[2] / "tests" / "cases" / "models.json").read_text())
RANKS = (8, 256, 16_384)
TENSORS = (10, 100, 1_000, 10_000, 100_000)
ROWS = (1, 64, 128, 512, 1536, 2048, 4096, 7168)


def timed(plan: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    result = plan()
    return result, time.process_time() - start


def mixed(tensors: int) -> list[tuple[int, int]]:
    """Tensors of random heights and of row sizes as they occur."""
    draw = random.Random(0)
    return [(draw.randint(1, 5000), draw.choice(ROWS)) for _ in range(tensors)]


def experts_as_matrices(shapes: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [s for shape in shapes for s in ([shape[1:]] * shape[0] if len(shape) == 3 else [shape])]


def show_models() -> None:
    print("256 ranks                                 rows  block   PADDED  compact   proved")
    for model in ("deepseek-v3", "gpt-oss-120b"):
        for unit in MODELS[model]["units"]:
            shapes = [tuple(shape) for _, shape in unit["tensors"]]
            fused = any(len(shape) == 3 for shape in shapes)
            groups = {"dim 0": (shapes, 1)}
            groups |= {"inner": (shapes, 2), "matrices": (experts_as_matrices(shapes), 1)} if fused else {}
            for name, (group, row_dims) in groups.items():
                for block_size in (1, 32):
                    plan = dbuf.plan_compact(group, 256, block_size=block_size, row_dims=row_dims)
                    padded = plan.padded * 256 / plan.content - 1
                    what = f"{model:>13} {unit['name']:<12} {name:>14} {block_size:>6}"
                    print(f"{what} {padded:>8.2%} {plan.overhead:>8.3%}   {'yes' if plan.is_least else 'no'}")


def show_a_whole_model() -> None:
    units = MODELS["deepseek-v3"]["units"]
    for ranks in RANKS:

        def plan(ranks: int = ranks) -> int:
            planned = 0
            for unit in units:  # each of the blocks, although they are alike
                shapes = [tuple(shape) for _, shape in unit["tensors"]]
                for _ in range(unit["count"]):
                    dbuf.plan_compact(shapes, ranks, row_dims=2)
                    planned += 1
            return planned

        groups, seconds = timed(plan)
        print(f"DeepSeek-V3, {groups} groups, {ranks:>6} ranks: {seconds:.2f} s")


def show_growth() -> None:
    print("\ntensors   " + "".join(f"{f'{ranks} ranks':>14}" for ranks in RANKS))
    for tensors in TENSORS:
        shapes = mixed(tensors)
        seconds = [timed(functools.partial(dbuf.plan_compact, shapes, ranks))[1] for ranks in RANKS]
        print(f"{tensors:>7}   " + "".join(f"{f'{s:.3f} s':>14}" for s in seconds))


if __name__ == "__main__":
    show_models()
    print()
    show_a_whole_model()
    show_growth()
