"""Muon and `by_owner`: orthogonal directions, torch's own rule, what moves, and a whole ZeRO-3 step."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cheap_kernels
import dbuf
import models
import programs
from dbuf import Replicate, RowAtomic, TensorAtomic, optim, plan_tensor_atomic, testing
from dbuf.train import Strategy, init, make_train_step
from optim.optimizers import MATRICES, tensors, whole


@pytest.mark.parametrize("shape", [(5, 5), (3, 8), (8, 3), (2, 4, 6)])
def test_a_long_iteration_ends_at_the_orthogonal_factor(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    for coefficients, steps in (("cubic", 40), ("polar_express", 12)):
        found = optim.orthogonalize(x, steps, coefficients, dtype=torch.float64)
        testing.assert_close(found, u @ v, rtol=1e-6)


@pytest.mark.parametrize("coefficients, low, high", [("jordan", 0.65, 1.2), ("polar_express", 0.85, 1.15)])
def test_five_steps_bring_singular_values_near_one(coefficients: str, low: float, high: float) -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.linalg.svdvals(optim.orthogonalize(x, 5, coefficients, dtype=dtype))
        assert low < values.min() and values.max() < high


def test_a_zero_matrix_stays_zero() -> None:
    assert not optim.orthogonalize(torch.zeros(3, 4)).any()


@pytest.mark.parametrize("scale, theirs", [("spectral", "original"), ("match_rms_adamw", "match_rms_adamw")])
def test_muon_is_torchs(scale: str, theirs: str) -> None:
    """Twenty steps of bf16 Newton-Schulz, which both round in other places."""
    shapes = {"g": {name: shape for name, shape in MATRICES["first"].items() if len(shape) == 2}}
    params = {name: dbuf.shard(group, dbuf.init_mesh(), RowAtomic()) for name, group in tensors(shapes, 0).items()}
    optimizer = optim.muon(0.02, scale=scale)
    state = optimizer.init(params)
    peer = {name: torch.nn.Parameter(x) for name, x in tensors(shapes, 0)["g"].items()}
    muon = torch.optim.Muon(peer.values(), lr=0.02, weight_decay=0.1, adjust_lr_fn=theirs)
    for step in range(20):
        given = tensors(shapes, 100 + step)
        grads = {name: dbuf.shard(group, dbuf.init_mesh(), RowAtomic()) for name, group in given.items()}
        updates, state = optimizer.update(grads, state, params)
        params = optim.apply_updates(params, updates)
        for name, x in peer.items():
            x.grad = given["g"][name]
        muon.step()
    testing.assert_close(whole(params)["g"], {name: x.detach() for name, x in peer.items()}, rtol=1e-2)


@pytest.mark.parametrize("scale", ["spectral", "match_rms_adamw"])
def test_heads_are_matrices_of_their_own(scale: str) -> None:
    flat = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
    updates = {}
    for heads, grads in ((3, flat), (1, flat.view(2, 3, 2, 4))):
        buf = dbuf.shard({"matrix": grads[0], "stack": grads}, dbuf.init_mesh(), RowAtomic())
        optimizer = optim.muon(0.1, scale=scale, heads=heads)
        updates[heads] = dbuf.unpack(optimizer.update(buf, optimizer.init(buf), buf)[0])
    testing.assert_bitwise(updates[3], {name: x.flatten(-3, -2) for name, x in updates[1].items()})


def test_vectors_and_bad_choices_are_refused() -> None:
    params = {"b": dbuf.shard({"w": torch.ones(2, 2), "bias": torch.ones(3)}, dbuf.init_mesh(), RowAtomic())}
    with pytest.raises(dbuf.TreeError, match=r"\['b'\]\['bias'\]: \(3,\)"):
        optim.muon(0.1).init(params)
    with pytest.raises(dbuf.DbufError, match="no such coefficients"):
        optim.muon(0.1, coefficients="newton")
    with pytest.raises(dbuf.DbufError, match="no such scale"):
        optim.muon(0.1, scale="rms")
    matrix = dbuf.shard({"w": torch.ones(6, 2)}, dbuf.init_mesh(), RowAtomic())
    with pytest.raises(dbuf.TreeError, match=r"4 heads do not divide(?s:.*)\(6, 2\)"):
        optim.muon(0.1, heads=4).init(matrix)
    with pytest.raises(dbuf.DbufError, match="heads"):
        optim.muon(0.1, heads=0)


def test_states_of_different_structures_are_refused() -> None:
    params = dbuf.shard({"a": torch.ones(2, 2), "b": torch.ones(3)}, dbuf.init_mesh(), RowAtomic())
    uneven = optim.by_owner(lambda p: {"m": p} if p.ndim == 2 else (), lambda g, state: (g, state))
    with pytest.raises(dbuf.TreeError, match=r"(?s)different structures.*\['b'\]"):
        uneven.init(params)


def _moves() -> dict[str, Any]:
    """Collectives and bytes of `by_owner` on rows, on resting whole tensors, and beside a replicated axis."""
    count, width = 8, 6
    given = {f"w{i}": torch.randn(width, width, generator=torch.Generator().manual_seed(i)) for i in range(count)}
    flat, grid = dbuf.init_mesh(("dp",)), dbuf.init_mesh(("outer", "inner"), (2, 2))
    owners = plan_tensor_atomic([(width, width)] * count, 4, tensor_owners=[i % 4 for i in range(count)])
    grads = {
        "rows": dbuf.shard(given, flat, RowAtomic()),
        "resting": dbuf.shard(given, flat, TensorAtomic(), layout=owners),
        "hybrid": dbuf.shard(given, grid, (Replicate(), RowAtomic()), dp_size=2),
        "replicated": dbuf.shard(given, flat, Replicate()),
    }
    tx = optim.by_owner(lambda w: (), lambda g, state: (g @ g.mT @ g, state))
    expected = {name: w @ w.T @ w for name, w in given.items()}
    out = {}
    for name, buf in grads.items():
        call = dbuf.jit(lambda buf: tx.update(buf, tx.init(buf), buf)[0])
        with cheap_kernels.graphs_alone():
            testing.assert_close(dbuf.unpack(dbuf.allgather(call(buf))), expected)
        report = call.inspect(buf)
        out[name] = report.collectives, sum(c.nbytes for c in report.sequence if c.kind == "all_to_all")
    return out


@pytest.mark.slow
def test_what_moves_to_owners_and_back() -> None:
    share = 8 * 6 * 6 * 4 // 4  # P / W in bytes: what a rank holds, and what it owns
    for got in testing.run(_moves, world_size=4, timeout_s=300):
        assert got["rows"] == ({"all_to_all": 2}, 2 * share)
        assert got["resting"] == ({}, 0)
        assert got["hybrid"] == ({"all_to_all": 2, "all_gather": 1}, 2 * share + share)
        assert got["replicated"] == ({"all_gather": 1, "all_to_all": 1}, share)


def _losses(step: Any, state: Any) -> list[float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    losses = []
    for i in range(3):
        state, metrics = step(state, models.share(models.batch(i), rank, ranks))
        losses.append(metrics["loss"].item())
    return losses


def _zero3_with_muon(compiled: bool) -> Any:
    """Muon on the matrices of blocks, AdamW on the rest; some ranks own no matrix."""
    mesh, strategy = dbuf.init_mesh(("dp",)), Strategy.zero3()
    rule = lambda path, shape: "muon" if "block" in path and optim.is_matrix(path, shape) else "adamw"  # noqa: E731
    optimizer = optim.partition({"muon": optim.muon(0.02, dtype=torch.float32), "adamw": optim.adamw(0.02)}, rule)
    params = models.shard_groups(models.weights(2), mesh, strategy.optim)
    plain = make_train_step(models.language_loss(), optimizer, strategy)
    state = init(params, optimizer, strategy)
    if not compiled:
        return _losses(plain, state)
    step = dbuf.jit(plain, donate_argnums=0)
    tokens = models.share(models.batch(), dist.get_rank(), mesh.size())
    code = programs.code_of(dbuf.jit(plain, donate_argnums=0), state, tokens)
    with cheap_kernels.graphs_alone():
        report = step.inspect(state, tokens)
        losses = _losses(step, state)
    return losses, report, step.compiles, programs.behind(code)


@pytest.mark.slow
def test_a_zero3_step_with_muon_and_adamw_is_one_program() -> None:
    (alone,) = testing.run(_zero3_with_muon, False, world_size=1)
    for losses in testing.run(_zero3_with_muon, False, world_size=3):
        testing.assert_close(losses, alone)
    of_rank = testing.run(_zero3_with_muon, True, world_size=3, timeout_s=300)
    kinds = [kind for kind, _ in of_rank[0][3]]
    for losses, report, compiles, behind in of_rank:
        testing.assert_close(losses, alone)
        # 4 groups: gathered in forward and in backward, but for the embedding, whose backward reads no weight. Of the
        # two groups of matrices one lies with its owners already: a matrix is a rank's segment there.
        assert report.collectives == {"all_gather": 7, "reduce_scatter": 4, "all_to_all": 2}
        assert (report.graph_breaks, compiles) == (0, 1)
        # The generated code: reductions are exchanges on gloo, beside Muon's two and two scalars; no point-to-point.
        assert [kind for kind, _ in behind] == kinds
        assert collections.Counter(kinds) == {"all_gather_in_pieces": 7, "all_to_all_single": 4 + 2, "all_reduce": 2}
        assert sum(kernels > 0 for _, kernels in behind) >= 8, "little runs behind compute"
