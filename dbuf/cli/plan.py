"""`python -m dbuf plan`: memory a rank and bytes a step of each strategy."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import torch

from dbuf.cli.table import align, bytes_as_text
from dbuf.models import read_model
from dbuf.placement import BlockAtomic, RowAtomic
from dbuf.reports.memory import MemoryPlan, plan_memory
from dbuf.train.strategy import Strategy

__all__ = ["PlanQuestion", "run_plan"]

_HEAD = ("strategy", "weights", "compute", "gradients", "optimizer", "gathered", "total", "collectives", "received")


class PlanQuestion(NamedTuple):
    """What is asked: see `dbuf.cli.arguments`."""

    model: str
    group_by: str
    dtype: torch.dtype
    mesh: tuple[int, ...]
    shard: RowAtomic | BlockAtomic
    shard_layout: str
    row_dims: int
    optimizer: str
    microbatches: int


def run_plan(question: PlanQuestion, *, as_json: bool) -> int:
    """Print the answer."""
    model = read_model(question.model, group_by=question.group_by)
    plans = {
        name: plan_memory(
            model.units,
            question.mesh,
            strategy,
            optimizer=question.optimizer,
            microbatches=question.microbatches,
            compute_dtype=question.dtype,
            shard_layout=question.shard_layout,
            row_dims=question.row_dims,
        )
        for name, strategy in _strategies(len(question.mesh), question.shard).items()
    }
    dtype = str(question.dtype).removeprefix("torch.")
    if as_json:
        asked: dict[str, Any] = {
            "model": model.name,
            "mesh": question.mesh,
            "optimizer": question.optimizer,
            "dtype": dtype,
            "microbatches": question.microbatches,
            "layout": question.shard_layout,
            "row_dims": question.row_dims,
        }
        print(json.dumps(asked | {"strategies": {name: plan.as_dict() for name, plan in plans.items()}}, indent=1))
        return 0
    mesh = "x".join(map(str, question.mesh))
    print(
        f"{model.name}: {model.numel:,} parameters on {mesh} ranks, {question.optimizer}, compute in {dtype}, ", end=""
    )
    print(f"microbatches {question.microbatches}\n")
    print(align([_HEAD, *(_row(name, plan) for name, plan in plans.items())]))
    print("\nA rank's memory without activations, and what it receives in a step.")
    return 0


def _strategies(ndim: int, shard: RowAtomic | BlockAtomic) -> dict[str, Strategy]:
    """Those that have a name, for a mesh of so many axes."""
    named = {
        "ddp": Strategy.ddp(ndim),
        "zero1": Strategy.zero1(shard, ndim),
        "zero2": Strategy.zero2(shard, ndim),
        "zero3": Strategy.zero3(shard, ndim),
    }
    return named if ndim != 2 else named | {"hsdp": Strategy.hsdp(shard), "hfsdp": Strategy.hfsdp(shard)}


def _row(name: str, plan: MemoryPlan) -> tuple[str, ...]:
    parts = (plan.weights, plan.compute_weights, plan.gradients, plan.optimizer, plan.gathered, plan.total)
    collectives = ", ".join(f"{count} {kind.replace('_', '-')}" for kind, count in plan.collectives.items())
    return (name, *map(bytes_as_text, parts), collectives or "none", bytes_as_text(plan.received))
