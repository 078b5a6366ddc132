"""Overlap in the generated code: how much runs behind compute, what is alive, and the same order on every rank."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._inductor.utils import run_and_get_code

import dbuf
import models
import programs
from dbuf import Partial, Replicate, RowAtomic, ShardLayout, testing
from dbuf.errors import DbufError
from dbuf.plan.tensors import plan_tensor_atomic
from dbuf.schedule import Overlap
from dbuf.train import Strategy, init, make_train_step

BLOCKS = 2
RANKS = [pytest.param(2, marks=pytest.mark.exhaustive), 3]  # of what compiles kernels at each number of ranks


def _state(
    strategy: Strategy, mesh: Any, kinds: tuple[str, ...] = ("padded",), blocks: int = BLOCKS
) -> tuple[Any, Any]:
    """A state whose groups take the kinds of layout in turn, and the optimizer."""
    optimizer = dbuf.optim.adamw(1e-2)
    params, size = {}, strategy.dp_size(mesh)
    groups = {**models.weights(blocks), "tiny": {"w": torch.ones(1)}}
    for i, (name, group) in enumerate(groups.items()):
        kind = "unpadded" if name == "tiny" else kinds[i % len(kinds)]
        layout: Any = ShardLayout(kind) if kind != "owners" else _owners(group, size)
        params[name] = dbuf.shard(group, mesh, strategy.optim, layout=layout, dp_size=size)
    return init(params, optimizer, strategy), optimizer


def _owners(group: Any, size: int) -> Any:
    return plan_tensor_atomic([t.shape for t in group.values()], size, tensor_owners=[0] * len(group))


def _loss(params: Any, tokens: torch.Tensor) -> torch.Tensor:
    rest = {name: buf for name, buf in params.items() if name != "tiny"}
    return models.language_loss()(rest, tokens) * dbuf.gathered(lambda p: p["w"].sum())(params["tiny"])


def _step(strategy: Strategy, optimizer: Any, **options: Any) -> Any:
    return dbuf.jit(make_train_step(_loss, optimizer, strategy), donate_argnums=0, **options)


# The order on every rank.

FAKE = Path(__file__).with_name("fake_world.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["zero3", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("hsdp", "hfsdp"))]
)
def test_every_rank_of_a_world_of_two_by_four_issues_the_same_collectives(strategy: str) -> None:
    """PADDED, UNPADDED and whole tensors in one step; most ranks own nothing of some groups, seven of `tiny`."""
    run = subprocess.run([sys.executable, str(FAKE), strategy], capture_output=True, text=True, timeout=1500)
    assert run.returncode == 0, run.stderr[-3000:]
    ranks = [[tuple(step) for step in rank] for rank in json.loads(run.stdout.splitlines()[-1])]
    assert len([op for op, _, _ in ranks[0] if op.startswith("all_gather")]) >= 2 * (1 + 2)
    for rank, own in enumerate(ranks):
        assert [step[:2] for step in own] == [step[:2] for step in ranks[0]], f"rank {rank} differs from rank 0"
    for steps in zip(*ranks, strict=True):  # one collective on every rank
        op, axis, _ = steps[0]
        sizes = [size for _, _, size in steps]
        groups = {"inner": [sizes[:4], sizes[4:]], "outer": [sizes[i::4] for i in range(4)]}.get(axis, [sizes])
        assert all(len(set(group)) == 1 for group in groups), f"{op} over {axis}: {groups}"
        # Over `outer` each group handles one segment, of its own size, and of none where its ranks own nothing.
        assert max(sizes) > 0 and (axis == "outer" or len(set(sizes)) == 1), f"{op} over {axis}: {sizes}"


def _on_three() -> dict[str, Any]:
    """A step on uneven and empty segments, with and without overlap: losses, weights, order of collectives."""
    mesh, strategy = dbuf.init_mesh(("dp",)), Strategy.zero3()
    out: dict[str, Any] = {}
    for overlap in (True, False):
        state, optimizer = _state(strategy, mesh, ("unpadded", "padded", "owners"), blocks=1)
        empty = [name for name, buf in state.params.items() if not buf.local.numel()]
        step, losses = _step(strategy, optimizer, overlap=overlap), []
        for i in range(3):
            state, metrics = step(state, models.share(models.batch(i), dist.get_rank(), 3))
            losses.append(metrics["loss"].item())
        report = step.inspect(state, models.share(models.batch(), dist.get_rank(), 3))
        out[f"{overlap}"] = {
            "losses": losses,
            "weights": {name: buf.local for name, buf in state.params.items()},
            "sequence": [(c.kind, c.axis, c.numel) for c in report.sequence],
            "counts": (report.collectives, report.scalars),
        }
    return {**out, "empty": empty}


@pytest.mark.slow
def test_three_ranks_with_empty_segments_agree_and_overlap_changes_no_number() -> None:
    first, *others = testing.run(_on_three, world_size=3, timeout_s=600)
    assert any(got["empty"] for got in (first, *others))
    for got in (first, *others):
        on, off = got["True"], got["False"]
        assert on["losses"] == off["losses"] and on["counts"] == off["counts"]
        testing.assert_bitwise(on["weights"], off["weights"])
        assert on["sequence"] == first["True"]["sequence"] and off["sequence"] == first["False"]["sequence"]
        assert sorted(on["sequence"]) == sorted(off["sequence"])
    assert first["True"]["sequence"] != first["False"]["sequence"], "overlap moved nothing"


# What the program does.


def _programs() -> dict[str, Any]:
    mesh, strategy = dbuf.init_mesh(("dp",)), Strategy.zero3()
    state, optimizer = _state(strategy, mesh)
    tokens = models.share(models.batch(), dist.get_rank(), 2)
    out: dict[str, Any] = {}
    lines: list[str] = []
    settings = {
        "on": True,
        "off": False,
        "gathers": Overlap(reductions=False),
        "reductions": Overlap(gathers=False),
        "three": Overlap(groups_in_flight=3, report=lines.append),
    }
    for i, (name, overlap) in enumerate(settings.items()):
        if i % 2 != dist.get_rank():
            dbuf.check({"argument 0": state, "argument 1": tokens})  # the exchange of the rank that does look
            continue
        code = programs.code_of(_step(strategy, optimizer, overlap=overlap), state, tokens)
        behind = programs.behind(code)
        out[name] = {
            "alive": programs.gathered_alive(code),
            "under way": programs.under_way(code),
            "gathers": [n for op, n in behind if op.startswith("all_gather")],
            "reductions": [n for op, n in behind if op.startswith("all_to_all")],
        }
    return {**out, "lines": lines}


@pytest.mark.slow
def test_what_runs_behind_compute_and_what_is_alive() -> None:
    first, second = testing.run(_programs, world_size=2, timeout_s=600)
    got = {**second, **first}  # each rank looks at some; "three", with its lines, is one of the first's
    groups = BLOCKS + 2
    on, off = got["on"], got["off"]
    assert (on["alive"], off["alive"], got["three"]["alive"]) == (2, 1, 3)
    assert {at["under way"] for name, at in got.items() if name != "lines"} == {1}, "gloo crashes with two"
    assert len(on["gathers"]) == len(off["gathers"]) and len(on["reductions"]) == groups + 1
    # Every gather but that of the first group runs behind the group before it, every reduction behind the one after.
    assert sum(n > 0 for n in on["gathers"]) >= len(on["gathers"]) - 3
    assert sum(n > 0 for n in on["reductions"]) >= groups - 1
    # Without, a gather is waited for where it starts; what reads a reduction stands where Inductor put it.
    assert not any(off["gathers"]) and not any(got["reductions"]["gathers"]) and any(got["gathers"]["gathers"])
    assert sum(n > 0 for n in off["reductions"]) <= sum(n > 0 for n in on["reductions"])
    assert [line.split(",")[1].split(":")[0] for line in got["lines"]] == [" graph", " graph", " program"]
    assert f"{groups + 1} reductions an exchange" in got["lines"][1]


# Reductions on gloo.


DTYPES = (torch.float32, torch.int32)
ROUNDED = (torch.bfloat16, torch.float16, torch.bool)  # a sum that is fused into its readers would have other values


def _reduce(bufs: dict[str, dbuf.DBuffer]) -> dict[str, dbuf.DBuffer]:
    return dbuf.reduce_scatter(bufs, RowAtomic())


def _reduce_and_read(bufs: dict[str, dbuf.DBuffer]) -> Any:
    sums = _reduce(bufs)
    return sums, {name: dbuf.cast(buf, torch.float32).local * 3 for name, buf in sums.items()}


def _reduce_all(bufs: dict[str, dbuf.DBuffer]) -> dict[str, dbuf.DBuffer]:
    return dbuf.allreduce(bufs, Replicate())


def _with_and_without_exchange(fn: Any, *args: Any) -> dict[bool, Any]:
    """What a program does, what it returns and what it reports."""
    out = {}
    for exchange in (True, False):
        jitted = dbuf.jit(fn, overlap=Overlap(exchange=exchange), options={"fx_graph_cache": False})
        values, (code,) = run_and_get_code(jitted, *args)
        ops = [op for op, _, _ in programs.collectives(code)]
        out[exchange] = ops, values, jitted.inspect(*args).collectives
    return out


def _reductions() -> dict[bool, Any]:
    mesh, rank = dbuf.init_mesh(("dp",)), dist.get_rank()
    numbers = 4001 * (rank + 1) * torch.arange(14)  # of which fp16 holds no sum, and bf16 rounds them all
    whole = {str(dtype): dbuf.shard({"w": numbers.to(dtype)}, mesh, Partial()) for dtype in (*DTYPES, *ROUNDED)}
    return _with_and_without_exchange(_reduce_and_read, whole)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_on_gloo_a_reduction_is_an_exchange_and_a_sum(ranks: int) -> None:
    """The same numbers; the report says what it means."""
    for got in testing.run(_reductions, world_size=ranks):
        (on, (x, read), report), (off, (y, expected_read), expected) = got[True], got[False]
        count = len(DTYPES) + len(ROUNDED)
        assert sorted(on) == ["all_to_all_single"] * len(DTYPES) + ["reduce_scatter_tensor"] * len(ROUNDED)
        assert off == ["reduce_scatter_tensor"] * count
        assert report == expected == {"reduce_scatter": count}
        for name in x:
            testing.assert_bitwise(x[name].local, y[name].local)  # and dtypes: a sum of integers is no int64
        testing.assert_bitwise(read, expected_read)


def _with_ones(buf: dbuf.DBuffer) -> dbuf.DBuffer:
    return dbuf.tree.map(lambda x: x.index_put((torch.arange(12),), torch.ones(12), accumulate=True), buf)


def _scaled_and(reduce: Any, buf: dbuf.DBuffer, scale: torch.Tensor) -> Any:
    return dbuf.tree.map(lambda x: x * scale, buf), reduce(buf)


def _reduced_and_donated() -> list[Any]:
    """What a rank adds of its own lies in donated memory, which the step writes."""
    mesh, own = dbuf.init_mesh(("dp",)), dist.get_rank() + 1.0
    out = []
    for reduce in (_reduce, _reduce_all, _with_ones):
        step = dbuf.jit(functools.partial(_scaled_and, reduce), donate_argnums=0)
        scaled, reduced = step(dbuf.shard({"w": torch.full((12,), own)}, mesh, Partial()), torch.tensor(-5.0))
        out.append((scaled.local.tolist(), reduced.local.unique().tolist()))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_a_reduction_of_donated_memory_is_of_what_it_held(ranks: int) -> None:
    """Nor is that of an operation which Inductor does in place."""
    for rank, got in enumerate(testing.run(_reduced_and_donated, world_size=ranks)):
        assert all(set(scaled) == {-5.0 * (rank + 1)} for scaled, _ in got)
        assert [set(other) for _, other in got] == [{sum(range(ranks + 1))}] * 2 + [{rank + 2.0}]


def _sums_of_changing_sizes() -> list[Any]:
    mesh = dbuf.init_mesh(("dp",))
    total = dbuf.jit(lambda x: (dbuf.psum(x, mesh) * 2, dbuf.psum(x.sum(), mesh)))
    return [(total(x), (dbuf.psum(x, mesh) * 2, dbuf.psum(x.sum(), mesh))) for x in map(torch.arange, (4.0, 7.0, 20.0))]


def test_sums_of_changing_sizes_are_those_of_eager() -> None:
    for got in testing.run(_sums_of_changing_sizes, world_size=2):
        for compiled, eager in got:
            testing.assert_close(compiled, eager)


LEAVES = {"a": (3, 4), "none": (0, 2), "one": (), "b": (5, 3), "c": (7,)}
LAYOUTS = (ShardLayout.PADDED, ShardLayout.UNPADDED)


def _gather(bufs: list[dbuf.DBuffer], wire: torch.dtype) -> Any:
    """Each buffer twice, by two gathers: one that is unpacked and one that is read as it is."""
    unpacked, whole = ([dbuf.allgather(buf, dtype=wire) for buf in bufs] for _ in range(2))
    return dbuf.tree.map(lambda x: x + 1, ([dbuf.unpack(buf) for buf in unpacked], [buf.local for buf in whole]))


def _gathers(wire: torch.dtype) -> dict[bool, Any]:
    mesh, generator = dbuf.init_mesh(("dp",)), torch.Generator().manual_seed(0)
    leaves = {name: torch.randn(shape, generator=generator) for name, shape in LEAVES.items()}
    bufs = [dbuf.shard(leaves, mesh, RowAtomic(), layout=layout) for layout in LAYOUTS]
    return _with_and_without_exchange(_gather, bufs, wire)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_on_gloo_a_gather_is_an_exchange_of_segments(wire: torch.dtype, ranks: int) -> None:
    """The same numbers, whatever reads them and wherever a tensor lies; the report says what it means.

    What travels in bf16 is gathered: this rank's own segment would be read as it was before it was rounded.
    """
    gathers = 2 * len(LAYOUTS)
    for got in testing.run(_gathers, wire, world_size=ranks):
        (on, x, report), (off, y, expected) = got[True], got[False]
        exchanged = "all_to_all_single" if wire == torch.float32 else "all_gather_into_tensor"
        assert (on, off) == ([exchanged] * gathers, ["all_gather_into_tensor"] * gathers)
        assert report == expected == {"all_gather": gathers}
        testing.assert_bitwise(x, y)


@torch.library.custom_op("dbuf_tests::raise_by", mutates_args=("w",))
def _raise_by(w: torch.Tensor, by: float) -> None:
    w.add_(by)


def _memory_readers() -> dict[str, Any]:
    """What a graph says by offsets into the memory of all gathered weights: writes by custom operations, strides."""
    mesh, generator = dbuf.init_mesh(("dp",)), torch.Generator().manual_seed(0)
    leaves = {name: torch.randn(shape, generator=generator) for name, shape in {"a": (6, 6), "b": (6, 6)}.items()}
    bufs = {name: dbuf.shard(leaves, mesh, RowAtomic()) for name in ("first", "second")}
    x = torch.randn(4, 6, generator=generator)

    def written(p: Any, h: torch.Tensor) -> torch.Tensor:
        a, b = p["a"].detach(), p["b"].detach()
        before = a.sum(0) + b.sum(1)
        with torch.no_grad():
            _raise_by(b, 0.5)
        return h * (before + b[0]) + h.sin() * b.T.sum(0)

    def strided(p: Any, h: torch.Tensor) -> torch.Tensor:
        return h * (p["b"].diagonal() + p["b"].as_strided((6,), (6,)) + p["a"][0])

    def loss(bufs: dict[str, dbuf.DBuffer], x: torch.Tensor) -> torch.Tensor:
        h = dbuf.gathered(lambda p, x: x @ p["a"])(bufs["first"], x)  # the blocks' gradients go on to it
        blocks = [written, strided, dbuf.compiled_once(strided)]
        return sum(dbuf.gathered(fn)(bufs["second"], h).square().mean() for fn in blocks)

    step = dbuf.value_and_grad(loss)
    return {"eager": step(bufs, x), "compiled": dbuf.jit(step)(bufs, x)}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_weights_that_are_read_as_memory_stay_in_one_piece(ranks: int) -> None:
    for got in testing.run(_memory_readers, world_size=ranks):
        testing.assert_close(got["compiled"], got["eager"])


def _parts(buf: dbuf.DBuffer, h: torch.Tensor) -> Any:
    """Parts of a gathered tensor whose size is that of the batch, which changes."""
    whole = dbuf.allgather(buf).local
    return whole[: h.shape[0]] + h, whole[h.shape[0] :].sum(), whole.split([h.shape[0], 32 - h.shape[0]])[1].sin()


def _parts_of_changing_sizes() -> list[Any]:
    buf, jitted = dbuf.shard({"a": torch.arange(32.0)}, dbuf.init_mesh(("dp",)), RowAtomic()), dbuf.jit(_parts)
    return [(jitted(buf, torch.arange(n)), _parts(buf, torch.arange(n))) for n in (4.0, 7.0, 20.0)]


def test_parts_of_a_gathered_tensor_may_be_of_changing_sizes() -> None:
    for got in testing.run(_parts_of_changing_sizes, world_size=2):
        for compiled, eager in got:
            testing.assert_close(compiled, eager)


def _gathered_and_donated() -> dict[str, Any]:
    mesh = dbuf.init_mesh(("dp",))
    buf = dbuf.shard({name: torch.ones(shape) for name, shape in LEAVES.items()}, mesh, RowAtomic())

    def step(buf: dbuf.DBuffer, factor: torch.Tensor) -> Any:
        before = dbuf.unpack(dbuf.allgather(buf))
        return (
            dbuf.tree.map(lambda x: x * factor, buf),
            before,
            {name: t.T for name, t in before.items() if t.ndim == 2},
        )

    new, *before = dbuf.jit(step, donate_argnums=0)(buf, torch.tensor(2.0))
    memory = new.local.untyped_storage().data_ptr()
    shared = [t.untyped_storage().data_ptr() == memory for tree in before for t in tree.values() if t.numel()]
    values = {t.unique().item() for tree in before for t in tree.values() if t.numel()}
    return {"shared": any(shared), "before": values, "after": set(new.local.unique().tolist()) - {0.0}}


@pytest.mark.slow
def test_gathered_weights_that_are_returned_are_no_views_of_what_is_donated() -> None:
    """Was wrong: a tensor of this rank's own segment was the donated memory, and held the new values."""
    for got in testing.run(_gathered_and_donated, world_size=2):
        assert got == {"shared": False, "before": {1.0}, "after": {2.0}}


def _clipped() -> int:
    """The most full-size buffers of an exchange alive at once, in a step that needs all gradients for their norm."""
    mesh, width = dbuf.init_mesh(("dp",)), 32
    params = {str(k): dbuf.shard({"w": torch.randn(width, width)}, mesh, RowAtomic()) for k in range(6)}

    def loss_fn(params: Any, h: torch.Tensor) -> torch.Tensor:
        for group in params.values():
            h = dbuf.gathered(lambda p, h: torch.tanh(h @ p["w"]))(group, h)
        return h.square().mean()

    def step(params: Any, h: torch.Tensor) -> Any:
        grads = dbuf.grad(loss_fn)(params, h)
        scale = (1 / (dbuf.global_norm(grads) + 1e-6)).clamp(max=1.0)
        return dbuf.tree.map(lambda p, g: p - scale * g, params, grads)

    held = models.memory_of(programs.code_of(dbuf.jit(step, donate_argnums=0), params, torch.randn(4, width)))
    return max(sum(kind.startswith("all_to_all") for kind, _ in now.values()) for now in held)


@pytest.mark.slow
def test_gradients_that_wait_for_their_norm_are_shards() -> None:
    assert testing.run(_clipped, world_size=2) == [3, 3]


def test_a_bound_is_a_positive_count() -> None:
    with pytest.raises(DbufError, match="groups_in_flight"):
        Overlap(groups_in_flight=0)
    with pytest.raises(DbufError, match="groups_in_flight"):
        Overlap(groups_in_flight=True)
    with pytest.raises(DbufError, match="no such overlap"):
        dbuf.jit(_loss, overlap=3)  # type: ignore[arg-type]
