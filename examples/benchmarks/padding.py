"""What padding costs on real models: every built-in model, on 8 to 16,384 ranks, by atoms, blocks and layouts.

    python examples/benchmarks/padding.py           # print
    python examples/benchmarks/padding.py --write   # and write docs/benchmarks/padding.json and docs/padding.md

Integers alone: no ranks are started, and every machine finds the same numbers.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import dbuf
from dbuf.models import Model, builtin_names, read_model
from dbuf.reports import plot

RANKS = (8, 64, 256, 1024, 4096, 16_384)
BLOCKS = (1, 32, 128)
ROW_DIMS = {"dim 0": 1, "inner rows": 2}
LAYOUTS = ("padded", "compact", "unpadded")
DOCS = Path(__file__).parents[2] / "docs"


def plan(shapes: tuple[tuple[int, ...], ...], ranks: int, block: int, row_dims: int) -> dict[str, dbuf.GlobalLayout]:
    options: dict[str, Any] = {"block_size": block, "row_dims": row_dims}
    return {
        "padded": dbuf.plan_row_atomic(shapes, ranks, **options),
        "compact": dbuf.plan_compact(shapes, ranks, **options).layout,
        "unpadded": dbuf.plan_row_atomic(shapes, ranks, shard_layout=dbuf.ShardLayout.UNPADDED, **options),
    }


def measure(model: Model, ranks: int, block: int, row_dims: int) -> dict[str, Any]:
    """Of each layout what the fullest rank holds of all units, by an even share of the parameters, less 1."""
    held = {how: [0] * ranks for how in LAYOUTS}
    units = {}
    for unit in model.units:
        odd = [f"{n} {s}" for n, s in zip(unit.names, unit.shapes, strict=True) if not divides(s, block, row_dims)]
        if odd:
            more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
            units[unit.name] = f"{block} does not divide the rows of {odd[0]}{more}"
            continue
        layouts = plan(unit.shapes, ranks, block, row_dims)
        units[unit.name] = {how: round(dbuf.report(layout).excess, 6) for how, layout in layouts.items()}
        for how, layout in layouts.items():
            for k, (start, stop) in enumerate(pairwise((*layout.rank_to_offset, layout.size))):
                held[how][k] += unit.count * (stop - start)
    planned = sum(unit.count * unit.numel for unit in model.units if not isinstance(units[unit.name], str))
    whole = planned == model.numel
    total = {how: round(max(held[how]) * ranks / planned - 1, 6) for how in LAYOUTS} if whole else None
    return {"ranks": ranks, "block": block, "row_dims": row_dims, "total": total, "units": units}


def divides(shape: tuple[int, ...], block: int, row_dims: int) -> bool:
    rows = shape[min(row_dims, max(len(shape) - 1, 1)) - 1] if shape else 1
    return rows % block == 0


def percent(excess: float) -> str:
    return f"{excess:.2%}" if excess < 10 else f"{1 + excess:.0f}x"


def table(name: str, cells: list[dict[str, Any]]) -> list[str]:
    """One model: a line for each block and kind of atom, a column for each number of ranks."""
    lines = [f"### {name}", "", "| | " + " | ".join(f"{ranks:,}" for ranks in RANKS) + " |", "|---" * 7 + "|"]
    notes = []
    stacks = any(len(shape) > 2 for unit in read_model(name).units for shape in unit.shapes)
    for block in BLOCKS:
        for what, row_dims in ROW_DIMS.items():
            of_line = [c for c in cells if (c["block"], c["row_dims"]) == (block, row_dims)]
            shown = [" / ".join(percent(c["total"][how]) for how in LAYOUTS) if c["total"] else "n/a" for c in of_line]
            if row_dims == 2 and not stacks:
                continue
            atoms = "rows" if block == 1 else f"blocks of {block}"
            lines.append(f"| {atoms}, {what} | " + " | ".join(shown) + " |")
            reasons = [(unit, why) for unit, why in of_line[0]["units"].items() if isinstance(why, str)]
            notes += [f"n/a for {atoms}, {what}: {unit}, where {why}" for unit, why in reasons]
    return [*lines, "", *(f"- {note}" for note in notes), *([""] if notes else [])]


HEAD = """# What padding costs

What the fullest rank holds of a model, above an even share of its parameters, for PADDED / compact / UNPADDED layouts
of one buffer a block. For the first two, whose segments are equal, that is padding; for UNPADDED it is imbalance. From
ten times an even share on it says how many times. `dim 0` cuts a stack of experts between experts alone, `inner rows`
(`row_dims=2`) between any two rows; models without such stacks have one line for both. Where rows are no multiple of a
block it says n/a, and which tensor that is.

    python examples/benchmarks/padding.py --write

makes this page and [padding.json](benchmarks/padding.json), which has each kind of block by itself. Of a model of your
own:

    python -m dbuf layout --model path/to/config.json --ranks 256 --layout compact --plot layout.png

{pictures}
"""
PICTURES = """A block of llama3-8b on 4 ranks, and one of GPT-OSS-120B on 64, both PADDED and cut along dim 0:

![4 ranks](benchmarks/layout_4.png)

![64 ranks](benchmarks/layout_64.png)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the page and its data")
    write = parser.parse_args().write
    data, text = {}, []
    for name in builtin_names():
        model = read_model(name)
        cells = [measure(model, n, block, dims) for block in BLOCKS for dims in ROW_DIMS.values() for n in RANKS]
        data[name] = cells
        text += table(name, cells)
        print("\n".join(table(name, cells)), flush=True)
    if not write:
        return
    rows = [f'"{name}": [\n' + ",\n".join(map(json.dumps, cells)) + "\n]" for name, cells in data.items()]
    (DOCS / "benchmarks" / "padding.json").write_text("{\n" + ",\n".join(rows) + "\n}\n")
    (DOCS / "padding.md").write_text(HEAD.format(pictures=PICTURES) + "\n" + "\n".join(text).rstrip() + "\n")
    for name, ranks in (("llama3-8b", 4), ("gpt-oss-120b", 64)):
        unit = read_model(name).units[0]
        layout = dbuf.plan_row_atomic(unit.shapes, ranks)
        title = f"{name}, one block on {ranks} ranks, PADDED"
        plot(layout, unit.names, title=title, path=DOCS / "benchmarks" / f"layout_{ranks}.png")


if __name__ == "__main__":
    main()
