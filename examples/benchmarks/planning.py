"""How long planning takes, and how much padding is left: real models, and growth in tensors and in ranks.

    python examples/benchmarks/planning.py           # print
    python examples/benchmarks/planning.py --write   # and write docs/benchmarks/planning.json and planning.png

Prints processor seconds of a plan, which are this machine's, and padding, which is not. No ranks are started.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dbuf
from dbuf.reports import report_segment

MODELS = json.loads((Path(__file__).parents[2] / "tests" / "cases" / "models.json").read_text())
RANKS = (8, 256, 16_384)
GROWING_RANKS = (8, 64, 512, 4096, 16_384)
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


def show_a_whole_model() -> dict[str, float]:
    found = {}
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
        found[str(ranks)] = seconds
    return found


def steps(shapes: list[tuple[int, int]], ranks: int) -> dict[str, float]:
    """Seconds of each planner, of the report, and of the pieces of at most a thousand ranks."""
    padded, padded_s = timed(lambda: dbuf.plan_row_atomic(shapes, ranks))
    unpadded = functools.partial(dbuf.plan_row_atomic, shapes, ranks, shard_layout=dbuf.ShardLayout.UNPADDED)
    asked = [k * ranks // min(ranks, 1000) for k in range(min(ranks, 1000))]
    return {
        "PADDED": padded_s,
        "UNPADDED": timed(unpadded)[1],
        "compact": timed(lambda: dbuf.plan_compact(shapes, ranks))[1],
        "plan_layout": timed(lambda: dbuf.plan_layout(shapes, ranks))[1],
        "report": timed(lambda: dbuf.report(padded))[1],
        "pieces of 1,000 ranks": timed(lambda: [report_segment(padded, k) for k in asked])[1],
    }


def show_growth() -> dict[str, dict[str, dict[str, float]]]:
    """Seconds by tensors at the most ranks, and by ranks at 1,000 tensors."""
    curves = {
        "tensors": {str(n): steps(mixed(n), RANKS[-1]) for n in TENSORS},
        "ranks": {str(n): steps(mixed(1_000), n) for n in GROWING_RANKS},
    }
    for what, rows in curves.items():
        print(f"\n{what:>8}" + "".join(f"{name:>23}" for name in next(iter(rows.values()))))
        for n, row in rows.items():
            print(f"{n:>8}" + "".join(f"{f'{seconds:.4f} s':>23}" for seconds in row.values()))
    return curves


def draw(curves: dict[str, Any], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    titles = {"tensors": f"{RANKS[-1]:,} ranks", "ranks": "1,000 tensors"}
    for panel, (what, rows) in zip(panels, curves.items(), strict=True):
        for name in next(iter(rows.values())):
            panel.loglog([int(n) for n in rows], [max(row[name], 1e-5) for row in rows.values()], "o-", label=name)
        panel.set_xlabel(what)
        panel.set_title(titles[what])
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("processor seconds")
    panels[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the curves and their picture")
    write = parser.parse_args().write
    show_models()
    print()
    whole = show_a_whole_model()
    curves = show_growth()
    if write:
        docs = Path(__file__).parents[2] / "docs" / "benchmarks"
        (docs / "planning.json").write_text(json.dumps({"deepseek-v3": whole, **curves}, indent=1) + "\n")
        draw(curves, docs / "planning.png")
