"""`python -m dbuf layout`: what a layout of each unit of a model costs."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from dbuf.cli.table import align, bytes_as_text
from dbuf.errors import DbufError, LayoutError, explain
from dbuf.layout import GlobalLayout
from dbuf.models import Model, Unit, read_model
from dbuf.placement import Placements, describe
from dbuf.reports.groups import plan_group
from dbuf.reports.layout import LayoutReport, report
from dbuf.reports.picture import plot
from dbuf.reports.text import draw
from dbuf.reports.traffic import ranks_along_shards

__all__ = ["LayoutQuestion", "run_layout"]

_HEAD = ("unit", "count", "parameters", "size", "padding", "max / mean", "empty", "bytes a rank", "alignment")


class LayoutQuestion(NamedTuple):
    """What is asked: see `dbuf.cli.arguments`."""

    model: str
    group_by: str
    dtype: torch.dtype | None
    mesh: tuple[int, ...]
    placements: Placements
    shard_layout: str
    row_dims: int
    align: int


class _Planned(NamedTuple):
    """A unit with its layout and report, or why it has none."""

    unit: Unit
    layout: GlobalLayout | None
    report: LayoutReport | None
    problem: str


def run_layout(question: LayoutQuestion, *, as_json: bool, unit: str | None, plot: str | None) -> int:
    """Print the answer; 2 if a unit cannot be planned."""
    model = read_model(question.model, group_by=question.group_by, dtype=question.dtype)
    planned = [_plan(each, question) for each in model.units]
    print(json.dumps(_as_dict(model, planned, question), indent=1) if as_json else _as_text(model, planned, question))
    if plot is not None:
        _draw(planned, unit, plot, sys.stderr if as_json else sys.stdout)
    for problem in dict.fromkeys(one.problem for one in planned if one.problem):
        print(problem, file=sys.stderr)
    return 2 if any(one.problem for one in planned) else 0


def _plan(unit: Unit, question: LayoutQuestion) -> _Planned:
    try:
        layout = plan_group(
            unit.shapes,
            ranks_along_shards(question.placements, question.mesh),
            question.placements,
            shard_layout=question.shard_layout,
            align=question.align,
            row_dims=question.row_dims,
            names=[f"{unit.name}.{name}" for name in unit.names],
        )
    except LayoutError as error:
        return _Planned(unit, None, None, str(error))
    return _Planned(unit, layout, report(layout, itemsize=unit.dtype.itemsize), "")


def _as_text(model: Model, planned: list[_Planned], question: LayoutQuestion) -> str:
    kind = describe(question.placements)
    title = f"{model.name}: {model.numel:,} parameters on {'x'.join(map(str, question.mesh))} ranks, {kind}"
    rows = [_HEAD, *map(_row, planned), *([_total_row(planned)] if len(planned) > 1 else [])]
    return f"{title}, {question.shard_layout}\n\n{align(rows)}"


def _row(one: _Planned) -> tuple[str, ...]:
    unit, found = one.unit, one.report
    start = (unit.name, f"{unit.count:,}", f"{unit.numel:,}")
    if found is None:
        return (*start, *["n/a"] * 6)
    return (
        *start,
        f"{found.size:,}",
        f"{found.overhead:.3%}",
        f"{found.imbalance:.4f}",
        f"{found.empty:,}",
        bytes_as_text(found.nbytes),
        f"{found.alignment:,}",
    )


def _total_row(planned: list[_Planned]) -> tuple[str, ...]:
    total = _total(planned)
    start = ("total", f"{total['units']:,}", f"{total['parameters']:,}")
    if total["size"] is None:
        return (*start, *["n/a"] * 6)
    tail = (f"{total['overhead']:.3%}", f"{total['imbalance']:.4f}", "", bytes_as_text(total["nbytes"]), "")
    return (*start, f"{total['size']:,}", *tail)


def _total(planned: list[_Planned]) -> dict[str, Any]:
    """Of all units together: a rank holds its segment of each."""
    parameters = sum(one.unit.count * one.unit.numel for one in planned)
    total = {"units": sum(one.unit.count for one in planned), "parameters": parameters}
    layouts = [(one.unit, one.layout) for one in planned if one.layout is not None]
    if len(layouts) < len(planned):
        return total | dict.fromkeys(("size", "overhead", "imbalance", "nbytes"))
    held = [0] * layouts[0][1].dp_size
    numel = [0] * len(held)
    for unit, layout in layouts:
        for k, (start, stop) in enumerate(pairwise((*layout.rank_to_offset, layout.size))):
            numel[k] += unit.count * (stop - start)
            held[k] += unit.count * (stop - start) * unit.dtype.itemsize
    size = sum(numel)
    overhead = size / parameters - 1 if parameters else 0.0
    balance = max(numel) * len(numel) / size if size else 1.0
    return total | {"size": size, "overhead": overhead, "imbalance": balance, "nbytes": max(held)}


def _as_dict(model: Model, planned: list[_Planned], question: LayoutQuestion) -> dict[str, Any]:
    return {
        "model": model.name,
        "mesh": question.mesh,
        "placements": describe(question.placements),
        "layout": question.shard_layout,
        "row_dims": question.row_dims,
        "align": question.align,
        "units": [
            {
                "name": one.unit.name,
                "count": one.unit.count,
                "parameters": one.unit.numel,
                "dtype": str(one.unit.dtype).removeprefix("torch."),
                "report": one.report.as_dict() if one.report else None,
            }
            for one in planned
        ],
        "total": _total(planned),
    }


def _draw(planned: list[_Planned], name: str | None, file: str, out: Any) -> None:
    """A unit as text, or as a picture in a file."""
    fitting = [one for one in planned if one.layout is not None and name in (None, one.unit.name)]
    if not fitting:
        raise DbufError(
            explain(
                "dbuf layout",
                "there is no such unit to draw.",
                got=f"--unit {name}" if name else "no unit that can be planned",
                need=", ".join(one.unit.name for one in planned if one.layout is not None) or "another --block",
                fix="--plot without --unit, for the largest",
            )
        )
    one = max(fitting, key=lambda found: found.unit.count * found.unit.numel)
    assert one.layout is not None
    if file:
        plot(one.layout, one.unit.names, title=one.unit.name, path=file)
        print(f"\n{one.unit.name}: {file}", file=out)
    else:
        print(f"\n{one.unit.name}\n{draw(one.layout, one.unit.names)}", file=out)
