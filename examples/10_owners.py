"""Who works on which matrix: a plan for many ranks, its balance, and a picture of it.

python examples/10_owners.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from dbuf.plan import OwnerPlan, newton_schulz_flops, plan_owners

WIDTH, LAYERS, RANKS = 4096, 6, 11
MATRICES = {
    "qkv": (6144, WIDTH),
    "out": (WIDTH, WIDTH),
    "up": (14336, WIDTH),
    "gate": (14336, WIDTH),
    "down": (WIDTH, 14336),
}
OUT = Path("out") / "owners.png"


def draw(axes: Axes, plan: OwnerPlan, names: list[str], costs: list[float]) -> None:
    """A bar a rank, made of the matrices that it owns."""
    mean = sum(costs) / RANKS
    colors = {name: f"C{i}" for i, name in enumerate(MATRICES)}
    height = [0.0] * RANKS
    for owner, name, cost in zip(plan.owners, names, costs, strict=True):
        axes.bar(owner, cost / mean, bottom=height[owner], color=colors[name], edgecolor="white", linewidth=0.3)
        height[owner] += cost / mean
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(xlabel="rank", ylabel="Newton-Schulz work / mean", title=f"makespan {plan.balance:.3f} x the mean")
    axes.set_xticks(range(RANKS))
    axes.legend(
        handles=[pyplot.Rectangle((0, 0), 1, 1, color=color, label=name) for name, color in colors.items()],
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        frameon=False,
    )


def main() -> None:
    names = [name for _ in range(LAYERS) for name in MATRICES]
    shapes = [MATRICES[name] for name in names]
    by_work = plan_owners(shapes, RANKS, cost="newton_schulz")
    print(by_work)
    print("by size:", plan_owners(shapes, RANKS, cost="numel"))
    print("too many ranks:", plan_owners(shapes, 4 * RANKS, cost="newton_schulz"))
    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    draw(axes, by_work, names, [newton_schulz_flops(shape) for shape in shapes])
    OUT.parent.mkdir(exist_ok=True)
    figure.savefig(OUT, dpi=120)
    print(OUT)


if __name__ == "__main__":
    main()
