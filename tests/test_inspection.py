"""inspect, against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dbuf
from dbuf import Replicate, RowAtomic, testing, tree
from dbuf.inspection import Collective, Report

NAMES = ("replica", "shard")


def _layer(p: Any, h: torch.Tensor) -> torch.Tensor:
    return torch.tanh(h @ p["w"])


def _loss(params: dict[str, Any], h: torch.Tensor) -> torch.Tensor:
    for buf in params.values():
        h = dbuf.gathered(_layer)(buf, h)
    return h.square().mean()


def _hsdp() -> dict[str, Any]:
    """Two groups of 8 x 8 on a (2, 2) mesh, sharded over the inner axis."""
    mesh = dbuf.init_mesh(NAMES, (2, 2))
    placements = (Replicate(), RowAtomic())
    params = {k: dbuf.shard({"w": torch.ones(8, 8)}, mesh, placements, dp_size=2) for k in ("a", "b")}
    h = torch.randn(3, 8)

    def step(params: Any, h: torch.Tensor) -> Any:
        loss, grads = dbuf.value_and_grad(_loss)(params, h)
        grads = dbuf.redistribute(grads, placements)
        return tree.map(lambda p, g: p - g, params, grads), dbuf.pmean(loss, mesh), torch.randn(2)

    jitted = dbuf.jit(step, donate_argnums=0)
    before, state = tree.map(torch.clone, params), torch.get_rng_state()
    report = jitted.inspect(params, h)
    untouched = tree.map(torch.equal, before, params)
    assert torch.equal(state, torch.get_rng_state()) and all(tree.leaves(untouched))
    assert jitted.inspect(params, h) == report
    free = dbuf.inspect(step, params, h)
    assert free.sequence == report.sequence  # donation changes where results go, and nothing on the wire
    return {"report": report, "compiles": jitted.compiles, "text": str(report)}


@pytest.mark.slow
def test_a_hybrid_step_worked_out_by_hand() -> None:
    for got in testing.run(_hsdp, world_size=4):
        report: Report = got["report"]
        fp32 = torch.float32
        # Each group: gathered over the inner axis, again in the backward (the last first); the first layer's input
        # needs no gradient, so its backward reads no weight: one gather fewer.
        kinds = [(c.kind, c.axis, c.numel, c.backward) for c in report.sequence if c.numel > 1]
        gather, scatter = ("all_gather", "shard", 64), ("reduce_scatter", "shard", 64)
        reduced = ("all_reduce", "replica", 32, False)
        expected = [(*gather, False)] * 2 + [(*gather, True)] + [(*scatter, True)] * 2 + [reduced] * 2
        assert sorted(kinds) == sorted(expected)
        assert kinds[:3] == expected[:3]
        assert {c.dtype for c in report.sequence} == {fp32}
        assert report.collectives == {"all_gather": 3, "reduce_scatter": 2, "all_reduce": 2}
        # The mean of the loss: one element over each of the two axes, listed apart.
        assert report.scalars == {"all_reduce": 2}
        assert report.nbytes == {"all_gather": 3 * 256, "reduce_scatter": 2 * 256, "all_reduce": 2 * 128 + 2 * 4}
        assert (report.gathered_alive, report.gathered_nbytes_alive) == (2, 512)
        # Forward 2; backward 2 for the weights and 1 for the second layer's input.
        assert report.ops["aten.mm"] == 5
        assert (got["compiles"], report.graph_breaks) == (0, 0)
        rows = [" ".join(line.split()) for line in got["text"].splitlines()]
        assert "all_gather shard float32 forward 2" in rows
        assert "all_gather shard float32 backward 1" in rows
        assert rows[-1] == "gathered at once: 2 buffers, 512 bytes; compiles 0, graph breaks 0"


def test_bytes_of_a_collective() -> None:
    gather = Collective("all_gather", "dp", 100, torch.bfloat16, backward=False)
    assert gather.nbytes == 200
    report = Report((gather, Collective("all_reduce", "dp", 1, torch.float32, backward=True)), {}, 200, 1)
    assert report.collectives == {"all_gather": 1} and report.scalars == {"all_reduce": 1}


def test_alone_nothing_is_communicated_and_later_calls_count_compiles() -> None:
    buf = dbuf.shard({"w": torch.ones(8, 8)}, dbuf.init_mesh(("dp",)), RowAtomic())
    jitted = dbuf.jit(dbuf.value_and_grad(_loss))
    assert jitted.inspect({"a": buf}, torch.ones(2, 8)).compiles == 0
    jitted({"a": buf}, torch.ones(2, 8))
    report = jitted.inspect({"a": buf}, torch.ones(2, 8))
    assert (report.collectives, report.gathered_alive, report.compiles) == ({}, 0, 1)
