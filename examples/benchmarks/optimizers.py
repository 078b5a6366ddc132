"""The training example with several optimizers, each at its best learning rate of one listed sweep.

python examples/benchmarks/optimizers.py                        # 600 steps, AdamW and Muon: two runs at a time
python examples/benchmarks/optimizers.py --optimizers adamw adamw8bit --rates 3e-3 --steps 300

The runs are those of `make train`, in one process each: what they compute does not depend on the number of processes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

TRAIN = Path(__file__).parents[1] / "train_lm.py"
OUT = Path(__file__).parents[2] / "docs" / "benchmarks"
RATES = [2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3]
COLORS = {"adamw": "tab:gray", "muon": "tab:orange"}

Curve = list[tuple[int, float]]
"""Steps and held-out losses, in nats per byte."""


def train(optimizer: str, rate: float, steps: int) -> tuple[Curve, float]:
    """The curve of a run, and the seconds that it took."""
    with tempfile.TemporaryDirectory() as out:
        options = [f"--optimizer={optimizer}", f"--lr={rate}", f"--steps={steps}", f"--out={out}"]
        done = subprocess.run(
            [sys.executable, str(TRAIN), *options],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"{optimizer} at {rate}:\n{done.stderr[-4000:]}")
    last = json.loads(done.stdout.splitlines()[-1])
    lines = re.findall(r"step (\d+): held-out loss (\S+)", done.stderr)
    curve = [(int(step), float(loss)) for step, loss in lines[:-1]] + [(steps, last["heldout_nats_per_byte"])]
    return [(step, math.inf if math.isnan(loss) else loss) for step, loss in curve], last["train_s"]


def done_before(file: Path, steps: int) -> list[dict[str, Any]]:
    """Runs of an earlier call, which need not be repeated."""
    kept = json.loads(file.read_text()) if file.exists() else {"steps": steps, "runs": []}
    return kept["runs"] if kept["steps"] == steps else []  # type: ignore[no-any-return]


def key_of(run: dict[str, Any]) -> tuple[str, float]:
    return run["optimizer"], run["rate"]


def reaches(curve: Curve, loss: float) -> float | None:
    """The step at which a curve first is as low as that, between two points by a straight line; None if never."""
    for (a, above), (b, below) in itertools.pairwise(curve):
        if below <= loss:
            return a + (b - a) * (above - loss) / (above - below)
    return None


def table(runs: list[dict[str, Any]]) -> list[str]:
    lines = ["| optimizer | peak learning rate | held-out nats per byte | seconds |", "|---|---|---|---|"]
    for run in runs:
        best = run is best_of(runs, run["optimizer"])
        loss = f"**{run['curve'][-1][1]:.4f}**" if best else f"{run['curve'][-1][1]:.4f}"
        lines.append(f"| {run['optimizer']} | {run['rate']:g} | {loss} | {run['seconds']:.0f} |")
    return lines


def best_of(runs: list[dict[str, Any]], optimizer: str) -> dict[str, Any]:
    return min((run for run in runs if run["optimizer"] == optimizer), key=lambda run: run["curve"][-1][1])


def picture(runs: list[dict[str, Any]], file: Path) -> None:
    """The best curve of each optimizer, the others of the sweep behind it, and where it meets the first one's end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(run["optimizer"] for run in runs))
    goal = best_of(runs, names[0])["curve"][-1][1]
    figure, axes = plt.subplots(figsize=(8, 5), constrained_layout=True)
    for i, name in enumerate(names):
        color, best = COLORS.get(name, f"C{i}"), best_of(runs, name)
        for run in runs:
            if run["optimizer"] == name and run is not best:
                axes.plot(*zip(*run["curve"], strict=True), color=color, alpha=0.25, linewidth=1)
        label = f"{name}, learning rate {best['rate']:g}: {best['curve'][-1][1]:.3f}"
        axes.plot(*zip(*best["curve"], strict=True), color=color, marker="o", markersize=4, linewidth=2, label=label)
        at = reaches(best["curve"], goal)
        if i and at is not None:
            axes.plot([at], [goal], marker="*", color="black", markersize=12, zorder=3)
            axes.annotate(f"step {at:.0f}", (at, goal), textcoords="offset points", xytext=(-8, -14), ha="right")
    axes.axhline(goal, color="gray", linestyle=":", linewidth=1)
    lowest = min(run["curve"][-1][1] for run in runs)
    axes.set(xlabel="step", ylabel="held-out loss (nats per byte)", ylim=(lowest - 0.15, lowest + 1.5))
    axes.set_title("Each optimizer at its best rate of the sweep; faint: the other rates", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "muon"], metavar="NAME")
    parser.add_argument("--rates", nargs="+", type=float, default=RATES, metavar="RATE")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, of one thread each")
    parser.add_argument("--fresh", action="store_true", help="repeat runs that the file has already")
    parser.add_argument("--name", default="optimizers", help="of the files that are written")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    file = args.out / f"{args.name}.json"
    wanted = list(itertools.product(args.optimizers, args.rates))
    runs = [] if args.fresh else [run for run in done_before(file, args.steps) if key_of(run) in wanted]
    todo = [pair for pair in wanted if pair not in map(key_of, runs)]
    args.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        futures = {pool.submit(train, name, rate, args.steps): (name, rate) for name, rate in todo}
        for future in as_completed(futures):
            (name, rate), (curve, seconds) = futures[future], future.result()
            runs.append({"optimizer": name, "rate": rate, "curve": curve, "seconds": seconds})
            runs.sort(key=lambda run: wanted.index(key_of(run)))
            file.write_text(json.dumps({"steps": args.steps, "runs": runs}) + "\n")
            print(f"{len(runs)} of {len(wanted)}: {name} at {rate:g}: {curve[-1][1]:.4f}", file=sys.stderr, flush=True)
    print("\n".join(table(runs)))
    first, *others = args.optimizers
    goal = best_of(runs, first)["curve"][-1][1]
    for name in others:
        at = reaches(best_of(runs, name)["curve"], goal)
        when = "never" if at is None else f"at step {at:.0f} of {args.steps}"
        print(f"{name} reaches the {goal:.4f} of {first} {when}")
    picture(runs, args.out / f"{args.name}.png")


if __name__ == "__main__":
    main()
