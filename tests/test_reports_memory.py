"""The memory plan: by hand, and against what a real step on two and four ranks holds and sends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

import cheap_kernels
import dbuf
import programs
from dbuf import BlockAtomic, RowAtomic, ShardLayout, TensorAtomic, testing, tree
from dbuf.errors import LayoutError, PlacementError
from dbuf.models import read_model
from dbuf.reports.memory import OPTIMIZERS, MemoryPlan, plan_memory
from dbuf.train import Strategy, init, make_train_step
from training import strategy_for

BF16 = torch.bfloat16


class Group(NamedTuple):
    shapes: tuple[tuple[int, ...], ...]
    count: int = 1


# Widths that no number of ranks divides, so that there is padding. The second layer of each reads its weight in the
# backward, so every group is gathered twice.
WIDTH, HIDDEN = 65, (67, 131, 99, 75)
SHAPES = [((hidden, WIDTH), (hidden,), (WIDTH, hidden)) for hidden in HIDDEN]
GROUPS = [Group(shapes) for shapes in SHAPES]


def layer(p: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    return x + F.linear(torch.tanh(F.linear(x, p["up"], p["bias"])), p["down"])


def loss_fn(params: dict[str, Any], batch: torch.Tensor) -> torch.Tensor:
    x = batch
    for part in params.values():
        x = dbuf.gathered(layer)(part, x)
    return x.square().mean()


MAKE = {
    "sgd": lambda: dbuf.optim.sgd(0.1),
    "momentum": lambda: dbuf.optim.sgd(0.1, momentum=0.9),
    "lion": lambda: dbuf.optim.lion(0.1),
    "adamw": lambda: dbuf.optim.adamw(0.1),
    "adamw8bit": lambda: dbuf.optim.adamw8bit(0.1),
}


def nbytes(value: Any) -> int:
    """Bytes of all tensors of more than one element in a tree."""
    leaves = [leaf for leaf in tree.leaves(value) if isinstance(leaf, torch.Tensor) and leaf.ndim]
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves)


def prepare(case: dict[str, Any]) -> tuple[dict[str, int], Any, Any, torch.Tensor]:
    """What one rank's state holds; its compiled step, and what the step takes."""
    shape, name, how = case["mesh"], case["strategy"], case["layout"]
    strategy = strategy_for(name, shape)
    mesh = dbuf.init_mesh(("outer", "inner")[-len(shape) :], shape, device_type="cpu")
    params = {
        f"layer{i}": dbuf.shard(
            {"up": torch.ones(shapes[0]), "bias": torch.ones(shapes[1]), "down": torch.ones(shapes[2])},
            mesh,
            strategy.optim,
            layout=how,
            dp_size=strategy.dp_size(mesh),
        )
        for i, shapes in enumerate(SHAPES)
    }
    optimizer = MAKE[case["optimizer"]]()
    state = init(params, optimizer, strategy, compute_dtype=case["dtype"])
    step = make_train_step(
        loss_fn, optimizer, strategy, microbatches=case["m"], compute_dtype=case["dtype"], grad_dtype=torch.float32
    )
    batch = torch.ones(6, WIDTH, dtype=case["dtype"])
    grads = dbuf.redistribute(dbuf.grad(loss_fn)(dbuf.cast(state.weights, case["dtype"]), batch), strategy.grads)
    held = {
        "weights": nbytes(state.params),
        "compute_weights": nbytes(state.compute),
        "optimizer": nbytes(state.opt_state),
        "gradients": nbytes(dbuf.cast(grads, torch.float32)),
    }
    return held, dbuf.jit(step, donate_argnums=0), state, batch


def seen(report: dbuf.Report) -> dict[str, Any]:
    """What the graph of a step moves."""
    return {
        "collectives": report.collectives,
        "nbytes": {kind: n for kind, n in report.nbytes.items() if kind in report.collectives},
        "gathered": report.gathered_nbytes_alive,
    }


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """What one rank's state holds, and on one of the ranks, what the compiled step's graph moves."""
    held, *call = prepare(case)
    with cheap_kernels.graphs_alone():
        reports = programs.inspect_in_turns({"step": tuple(call)})
    return held | (seen(reports["step"]) if reports else {})


def measure_all(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [measure(case) for case in cases]


def case(strategy: str, mesh: tuple[int, ...], m: int = 1, **changed: Any) -> dict[str, Any]:
    given = {"strategy": strategy, "mesh": mesh, "m": m, "layout": ShardLayout.PADDED, "optimizer": "adamw"}
    return given | {"dtype": torch.float32} | changed


CASES = {
    2: [
        case("ddp", (2,), 3),
        case("zero1", (2,), dtype=BF16),
        case("zero2", (2,), 3, optimizer="momentum"),
        case("zero3", (2,), dtype=BF16, optimizer="adamw8bit"),
        case("zero3", (2,), 2, layout=ShardLayout.UNPADDED, optimizer="lion"),
    ],
    4: [
        case("zero1", (4,)),
        case("zero3", (4,), optimizer="sgd"),
        case("hsdp", (2, 2), 2),
        case("hfsdp", (2, 2), dtype=BF16),
        case("zero3", (2, 2), layout=ShardLayout.UNPADDED),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", CASES)
def test_a_real_step_holds_and_sends_what_was_planned(ranks: int) -> None:
    """Counts exactly, and bytes but for those of losses and norms, an element each."""
    by_rank = testing.run(measure_all, CASES[ranks], world_size=ranks)
    for i, asked in enumerate(CASES[ranks]):
        found = [of_rank[i] for of_rank in by_rank]
        plan = plan_of(asked)
        for part in ("weights", "compute_weights", "optimizer", "gradients"):
            assert max(of[part] for of in found) == pytest.approx(getattr(plan, part), rel=1e-3), f"{part}, {asked}"
        (of_graph,) = [of for of in found if "collectives" in of]
        check_graph(of_graph, plan, asked)


def plan_of(asked: dict[str, Any]) -> MemoryPlan:
    return plan_memory(
        GROUPS,
        asked["mesh"],
        strategy_for(asked["strategy"], asked["mesh"]),
        optimizer=asked["optimizer"],
        microbatches=asked["m"],
        compute_dtype=asked["dtype"],
        shard_layout=asked["layout"],
    )


def check_graph(found: dict[str, Any], plan: MemoryPlan, asked: dict[str, Any]) -> None:
    assert found["collectives"] == plan.collectives, asked
    assert found["nbytes"] == pytest.approx(plan.nbytes, rel=1e-3), asked
    if plan.gathered:
        assert found["gathered"] == pytest.approx(plan.gathered, rel=1e-3), asked


@pytest.mark.slow
def test_a_step_on_1024_ranks_compiles_and_sends_what_was_planned() -> None:
    """One rank of a fake process group, on (1024,) and (32, 32): its state, its graph, and its generated code."""
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, str(root / "tests" / "thousand_ranks.py")],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")])},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for name, found in json.loads(done.stdout).items():
        asked = case(name, (1024,) if name == "zero3" else (32, 32))
        plan = plan_of(asked)
        check_graph(found, plan, asked)
        for part in ("weights", "compute_weights", "optimizer", "gradients"):
            assert found[part] == pytest.approx(getattr(plan, part), rel=1e-3), f"{part}, {asked}"
        written = Counter(kind for kind, numel in found["written"] if numel > 1)
        assert sum(written.values()) == sum(plan.collectives.values()), written
        print(f"{name}: traced in {found['seconds']:.1f} s")


def test_the_optimizers_here_are_those_of_the_plan() -> None:
    assert {*MAKE, "muon"} == set(OPTIMIZERS)


# --- by hand ----------------------------------------------------------------------------------------------------

SMALL = [Group(((5, 4), (2, 6), (3,)), 2), Group(((8,),))]  # PADDED: 36 and 8 elements for one rank, 48 and 8 for two


@pytest.mark.parametrize(
    "strategy, mesh, held, collectives, sent, received",
    [
        (Strategy.ddp(), (2,), (80, 0, 80, 80, 0), {"all_reduce": 3}, {"all_reduce": 80}, 80),
        (Strategy.zero1(), (2,), (52, 104, 104, 52, 0), {"reduce_scatter": 3, "all_gather": 3}, 104, 104),
        (Strategy.zero2(), (2,), (52, 104, 52, 52, 0), {"reduce_scatter": 6, "all_gather": 3}, (208, 104), 156),
        (Strategy.zero3(), (2,), (52, 0, 52, 52, 96), {"all_gather": 12, "reduce_scatter": 6}, (208, 416), 312),
    ],
)
def test_numbers_by_hand(
    strategy: Strategy, mesh: tuple[int, ...], held: Any, collectives: Any, sent: Any, received: int
) -> None:
    plan = plan_memory(SMALL, mesh, strategy, optimizer="momentum", microbatches=2)
    weights, apart, gradients, state, gathered = (4 * numel for numel in held)
    assert (plan.weights, plan.compute_weights, plan.gradients) == (weights, apart, gradients)
    assert (plan.optimizer, plan.gathered) == (state, gathered)
    assert plan.total == weights + apart + gradients + state + gathered
    assert plan.collectives == collectives
    if isinstance(sent, int):
        sent = (sent, sent)
    if not isinstance(sent, dict):
        sent = dict(zip(("reduce_scatter", "all_gather"), sent, strict=True))
    assert plan.nbytes == {kind: 4 * numel for kind, numel in sent.items()}
    assert plan.received == 4 * received


def test_two_axes_and_axes_of_one_rank() -> None:
    hsdp = plan_memory(SMALL, (2, 2), Strategy.hsdp())
    assert hsdp.collectives == {"all_gather": 6, "reduce_scatter": 3, "all_reduce": 3}
    assert hsdp.weights == plan_memory(SMALL, (2,), Strategy.zero3()).weights
    assert hsdp.nbytes["all_reduce"] == 4 * 52
    alone = plan_memory(SMALL, (1, 1), Strategy.hfsdp())
    assert (alone.collectives, alone.received, alone.gathered) == ({}, 0, 0)
    assert plan_memory(SMALL, (1, 2), Strategy.hsdp()).nbytes == plan_memory(SMALL, (2,), Strategy.zero3()).nbytes


def test_bf16_halves_gathers_and_their_memory_alone() -> None:
    wide, narrow = (plan_memory(SMALL, (2,), Strategy.zero3(), compute_dtype=d) for d in (torch.float32, BF16))
    assert narrow.gathered * 2 == wide.gathered and narrow.nbytes["all_gather"] * 2 == wide.nbytes["all_gather"]
    assert narrow.nbytes["reduce_scatter"] == wide.nbytes["reduce_scatter"] and narrow.weights == wide.weights


def test_whole_tensors_and_other_layouts() -> None:
    owned = plan_memory([Group(((8, 8), (4, 8)))], (2,), Strategy.zero3(TensorAtomic()))
    assert owned.weights == 64 * 4
    unpadded = plan_memory([Group(((5, 7), (9, 11)))], (3,), Strategy.zero3(), shard_layout="unpadded")
    compact = plan_memory([Group(((5, 7), (9, 11)))], (3,), Strategy.zero3(), shard_layout="compact")
    padded = plan_memory([Group(((5, 7), (9, 11)))], (3,), Strategy.zero3())
    assert unpadded.weights <= compact.weights <= padded.weights


def test_sixteen_thousand_ranks() -> None:
    units = read_model("deepseek-v3").units
    hsdp = plan_memory(units, (16, 1024), Strategy.hsdp(), row_dims=2, shard_layout="compact", optimizer="adamw8bit")
    flat = plan_memory(units, (16_384,), Strategy.zero3(), row_dims=2, shard_layout="unpadded")
    params = sum(unit.count * unit.numel for unit in units)
    assert params * 4 / 16_384 <= flat.weights <= params * 4 / 16_384 * 1.25
    assert params * 4 / 1024 <= hsdp.weights <= params * 4 / 1024 * 1.25
    assert hsdp.optimizer < hsdp.weights * 0.55


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(dbuf.DbufError, match=r"(?s)no such optimizer.*'adam'.*adamw8bit"):
        plan_memory(SMALL, (2,), Strategy.zero3(), optimizer="adam")
    with pytest.raises(PlacementError, match="2 mesh axes meets a mesh of 1"):
        plan_memory(SMALL, (2,), Strategy.hsdp())
    with pytest.raises(dbuf.DbufError, match="mesh is not a positive int"):
        plan_memory(SMALL, (0,), Strategy.zero3())
    with pytest.raises(dbuf.DbufError, match="microbatches is not a positive int"):
        plan_memory(SMALL, (2,), Strategy.zero3(), microbatches=0)
    with pytest.raises(LayoutError, match="block_size=2 does not divide"):
        plan_memory(SMALL, (2,), Strategy.zero3(BlockAtomic(2)))
    assert plan_memory([Group(())], (2,), Strategy.zero3(RowAtomic())).total == 0
