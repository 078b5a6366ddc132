"""The picture of what `step.py` measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def picture(result: dict[str, Any], file: Path) -> None:
    """Bars of every line, and of weak scaling if that was measured."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in result["step"] if "failed" not in row and row["to_floor"]]
    scaling = result.get("scaling")
    figure, axes = plt.subplots(1, 2 if scaling else 1, figsize=(13 if scaling else 8, 0.32 * len(rows) + 1.5))
    bars = axes[0] if scaling else axes
    colors = ["tab:orange" if row["line"].startswith("dbuf") else "tab:gray" for row in rows]
    bars.barh([row["line"] for row in rows], [row["to_floor"] for row in rows], color=colors)
    for at, row in enumerate(rows):
        bars.text(row["to_floor"], at, f" {row['to_floor']:.2f}  ({row['peak_mb']:.0f} MB)", va="center", fontsize=8)
    bars.axvline(1, color="black", linewidth=0.8)
    bars.set_xlim(0, max(row["to_floor"] for row in rows) * 1.25)
    bars.invert_yaxis()
    bars.set_xlabel("time of a step / compute alone (peak memory)")
    if scaling:
        for line in [row["line"] for row in next(iter(scaling.values()))]:
            points = [(int(n), row) for n, part in scaling.items() for row in part if row["line"] == line]
            points = [(n, row) for n, row in points if "failed" not in row]
            style = {"linewidth": 2.5} if line.startswith("dbuf") else {"linewidth": 1, "linestyle": "--"}
            axes[1].plot([n for n, _ in points], [row["ms"][0] for _, row in points], marker="o", label=line, **style)
        axes[1].set_xlabel("ranks (the same batch on each)")
        axes[1].set_ylabel("ms a step")
        axes[1].set_ylim(bottom=0)
        axes[1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
