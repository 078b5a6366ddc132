"""gathered and remat: what is gathered and computed again, what lives in between, and that gradients do not change."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.utils import run_and_get_code

import cheap_kernels
import dbuf
import models
import programs
from dbuf import Replicate, RowAtomic, testing, tree
from models import Gathers, Tensors, kept, shard_groups, share


def _both(fn: Callable[..., Any]) -> Callable[..., Any]:
    return dbuf.remat(dbuf.gathered(fn))


def _both_inside_out(fn: Callable[..., Any]) -> Callable[..., Any]:
    return dbuf.gathered(dbuf.remat(fn))


USES = {"kept": kept, "gathered": dbuf.gathered, "both": _both, "inside out": _both_inside_out}
LAYERS = 2  # with embedding and head: 4 groups


def _start(layers: int = LAYERS, **sizes: Any) -> tuple[dict[str, dbuf.DBuffer], torch.Tensor]:
    mesh = dbuf.init_mesh(("dp",))
    params = shard_groups(models.weights(layers, **sizes), mesh, RowAtomic())
    return params, share(models.batch(), mesh.get_rank(), mesh.size())


def _attention_loss(use: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    def loss_fn(params: Any, h: torch.Tensor) -> torch.Tensor:
        for group in params.values():
            h = use(run)(group, h)
        return h.square().mean()

    return loss_fn


def _microbatches(use: Callable[..., Any], count: int) -> Callable[..., Any]:
    """A step of several backwards whose gradients are added up."""
    run = dbuf.value_and_grad(models.language_loss(use))

    def step(params: Any, tokens: torch.Tensor) -> Any:
        total = None
        for part in tokens.chunk(count):
            _, grads = run(params, part)
            total = grads if total is None else tree.map(torch.add, total, grads)
        return tree.map(lambda g: g / count, total)

    return step


# Eager.


def _eager() -> dict[str, Any]:
    params, tokens = _start()
    out: dict[str, Any] = {
        name: dbuf.value_and_grad(models.language_loss(use))(params, tokens) for name, use in USES.items()
    }
    out = {name: (loss, models.whole(grads)) for name, (loss, grads) in out.items()}
    groups, run = models.attention_weights()
    modules = shard_groups(groups, dbuf.init_mesh(("dp",)), RowAtomic())
    h = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(7))
    attention = {name: models.whole(dbuf.grad(_attention_loss(use, run))(modules, h)) for name, use in USES.items()}
    replicated = shard_groups(models.weights(LAYERS), dbuf.init_mesh(("dp",)), Replicate())
    calls: list[bool] = []

    def spy(p: Any, h: torch.Tensor) -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        return models.block(p, h)

    dbuf.grad(models.language_loss(dbuf.gathered, spy))(params, tokens)
    once = len(calls)
    dbuf.grad(models.language_loss(_both, spy))(params, tokens)
    return {
        "language": out,
        "attention": attention,
        "replicated": models.whole(dbuf.grad(models.language_loss())(replicated, tokens)),
        "calls": (once, len(calls) - once),
    }


@pytest.mark.parametrize("ranks", [2, 3])
def test_eager_gradients_are_those_of_kept_weights(ranks: int) -> None:
    """The same operations in the same order: equal bits, with plain functions and with modules that attend."""
    for got in testing.run(_eager, world_size=ranks):
        for name in USES:
            testing.assert_bitwise(got["language"][name], got["language"]["kept"])
            testing.assert_bitwise(got["attention"][name], got["attention"]["kept"])
        testing.assert_close(got["replicated"], got["language"]["kept"][1])
        # gathered runs each block once; remat runs it again in the backward.
        assert got["calls"] == (LAYERS, 2 * LAYERS)


def _eager_memory() -> dict[str, int]:
    params, tokens = _start(4, width=24, hidden=40)
    full = params["block0"].layout.size * 4
    out = {}
    for name, use in USES.items():
        variables = tree.map(lambda x: x.detach().requires_grad_(), params)
        with Gathers() as gathers:
            loss = models.language_loss(use)(variables, tokens)
        out[name] = gathers.alive(full)
        torch.autograd.grad(loss, tree.leaves(variables))
    return out


def test_no_full_weight_among_saved_tensors() -> None:
    """autoparallel#410, #469, P#146693: after the forward of four blocks, whose memory is what `kept` shows."""
    for got in testing.run(_eager_memory, world_size=2):
        assert got == {"kept": 4, "gathered": 0, "both": 0, "inside out": 0}


def _backward_twice() -> dict[str, Any]:
    params, tokens = _start(2)
    variables = tree.map(lambda x: x.detach().requires_grad_(), params)
    leaves = tree.leaves(variables)
    loss = models.language_loss()(variables, tokens)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves, retain_graph=True)
    half = torch.autograd.grad(loss, leaves[:1], retain_graph=True)  # a backward that leaves notes unread
    third = torch.autograd.grad(loss, leaves)
    with torch.no_grad():
        quiet = models.language_loss()(params, tokens)
    return {"all": [first, second, third], "half": half, "loss": (loss.detach(), quiet)}


def test_retained_graphs_run_again() -> None:
    for got in testing.run(_backward_twice, world_size=2):
        first, second, third = got["all"]
        testing.assert_bitwise(second, first)
        testing.assert_bitwise(third, first)
        testing.assert_bitwise(got["half"], first[:1])
        testing.assert_bitwise(*got["loss"])


def _activation_is_written(p: Any, x: torch.Tensor) -> torch.Tensor:
    y = x.clone().requires_grad_() * 1.0
    out = (y @ p["w"]).sum()
    y.mul_(3.0)
    return out


def _weight_is_written(p: Any, x: torch.Tensor) -> torch.Tensor:
    h = x @ p["w"]
    with torch.no_grad():
        p["w"].detach().mul_(2.0)
    return (h @ p["w"]).square().sum()


def _weight_is_written_and_not_saved(p: Any, x: torch.Tensor) -> torch.Tensor:
    p["w"].detach().mul_(2.0)
    return p["w"].sum() * x.sum()


def _written(fn: Callable[..., Any]) -> Any:
    buf = dbuf.shard({"w": torch.ones(4, 4)}, dbuf.init_mesh(("dp",)), RowAtomic())
    return dbuf.grad(dbuf.gathered(fn))(buf, torch.ones(4, 4)).local.tolist()


@pytest.mark.parametrize("fn", [_activation_is_written, _weight_is_written])
def test_what_is_written_before_the_backward_reads_it_is_refused(fn: Callable[..., Any]) -> None:
    """As autograd does, which cannot see it any more: hooks hide the tensors that it saves."""
    with pytest.raises(testing.WorkerError, match="modified by an inplace operation"):
        testing.run(_written, fn, world_size=2)


def test_a_written_weight_that_the_backward_does_not_read_is_none_of_our_business() -> None:
    assert testing.run(_written, _weight_is_written_and_not_saved, world_size=2) == [[16.0] * 8] * 2


# Dropout. A loss that is linear in its weights has `<w, gradient> == loss` only if the backward uses the mask that
# the forward drew.

DROPOUTS: dict[str, Callable[..., Any]] = {
    "elements": lambda p, h: F.dropout(F.dropout(p["w"] * h, 0.5), 0.3),
    "attention": lambda p, h: F.scaled_dot_product_attention(
        h[None, None], h[None, None], (p["w"] * h)[None, None], dropout_p=0.5
    ),
}


def _linear_losses(use: Callable[..., Any]) -> Callable[..., Any]:
    def loss_fn(params: Any, h: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        made = {name: use(fn)(params[name], h) for name, fn in DROPOUTS.items()}
        return sum(x.sum() for x in made.values()), made

    return loss_fn


def _dropout_step(use: Callable[..., Any]) -> Callable[..., Any]:
    return dbuf.value_and_grad(_linear_losses(use), has_aux=True, reduction="sum")


def _dropout(compiled: bool) -> dict[str, Any]:
    mesh = dbuf.init_mesh(("dp",))
    params = shard_groups({name: {"w": torch.ones(16)} for name in DROPOUTS}, mesh, RowAtomic())
    h = torch.rand(8, 16, generator=torch.Generator().manual_seed(3)) + 0.1
    steps = {name: _dropout_step(use) for name, use in USES.items()}
    out: dict[str, Any] = {}

    def all_steps(params: Any, h: torch.Tensor) -> dict[str, Any]:
        return {name: step(params, h) for name, step in steps.items()}

    if compiled:
        jitted = dbuf.jit(all_steps)
        torch.manual_seed(mesh.get_rank())
        results = jitted(params, h)
        torch.manual_seed(mesh.get_rank())
        out["again"] = tree.map(torch.equal, jitted(params, h), results)
        out["next"] = jitted(params, h)["both"][0][0] != results["both"][0][0]
    else:
        results = {}
        for name, step in steps.items():
            torch.manual_seed(mesh.get_rank())
            results[name] = step(params, h)
    for name, ((_, made), grads) in results.items():
        out[name] = {
            "made": made,
            "gradients": models.whole(grads),
            "sums": {key: dbuf.psum(x.sum(), mesh) for key, x in made.items()},
            "by element": dbuf.psum(made["elements"].sum(0), mesh),
        }
    return out


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_dropout_is_replayed_exactly(compiled: bool) -> None:
    results = testing.run(_dropout, compiled, world_size=2)
    for got in results:
        for name in USES:
            one = got[name]
            assert 0.1 < (one["made"]["elements"] == 0).float().mean() < 0.9
            for key in DROPOUTS:
                product = one["gradients"][key]["w"].sum()  # the weights are ones
                testing.assert_close(product, one["sums"][key], rtol=1e-5)
            testing.assert_close(one["gradients"]["elements"]["w"], one["by element"])
            if not compiled:  # the same seed before each: autograd without remat is the oracle
                testing.assert_bitwise(one, got["kept"])
        if compiled:
            assert all(tree.leaves(got["again"])) and got["next"]
    assert not torch.equal(results[0]["kept"]["made"]["elements"], results[1]["kept"]["made"]["elements"])


# Compiled: counts in the graph.


def _matmuls(report: Any) -> int:
    return sum(count for name, count in report.ops.items() if name in ("aten.mm", "aten.addmm", "aten.bmm"))


def _blocks_loss(use: Callable[..., Any]) -> Callable[..., Any]:
    def loss_fn(params: Any, h: torch.Tensor) -> torch.Tensor:
        for group in params.values():
            h = use(models.block)(group, h)
        return h.square().mean()

    return loss_fn


def _graphs() -> dict[str, Any]:
    """Name -> collectives, matmuls, dtypes on the wire, attentions."""
    params, tokens = _start()
    blocks = {name: params[name] for name in ("block0", "block1")}
    one, h = {"block0": params["block0"]}, torch.randn(4, models.WIDTH)
    groups, run = models.attention_weights(LAYERS)
    modules = shard_groups(groups, dbuf.init_mesh(("dp",)), RowAtomic())
    half = functools.partial(dbuf.gathered, dtype=torch.bfloat16)
    narrow = functools.partial(half, grad_dtype=torch.bfloat16)

    def microbatches(params: Any, h: torch.Tensor) -> Any:
        parts = [dbuf.grad(_blocks_loss(dbuf.gathered))(params, part) for part in h.chunk(3)]
        return tree.map(lambda *gs: sum(gs), *parts)

    calls: dict[str, tuple[Any, ...]] = {}
    for name in ("kept", "gathered", "both"):
        calls[name] = dbuf.value_and_grad(models.language_loss(USES[name])), params, tokens
        attend = dbuf.value_and_grad(_attention_loss(USES[name], run))
        calls[f"{name} modules"] = attend, modules, torch.randn(2, 4, 8)
    calls |= {
        "inside out": (dbuf.value_and_grad(_blocks_loss(_both_inside_out)), blocks, h),
        "3 microbatches": (microbatches, blocks, torch.randn(6, models.WIDTH)),
        "fp32 wire": (dbuf.grad(_blocks_loss(dbuf.gathered)), one, h),
        "bf16 wire": (dbuf.grad(_blocks_loss(half)), one, h.bfloat16()),
        "bf16 gradients": (dbuf.grad(_blocks_loss(narrow)), one, h.bfloat16()),
    }
    return {
        name: {
            "collectives": report.collectives,
            "matmuls": _matmuls(report),
            "wire": {c.kind: str(c.dtype).removeprefix("torch.") for c in report.sequence},
            "attention": sum(count for op, count in report.ops.items() if "attention" in op),
            "alive": report.gathered_alive,
        }
        for name, report in programs.inspect_in_turns(calls).items()
    }


@pytest.mark.slow
def test_counts_in_the_compiled_graph() -> None:
    """P#161153, P#115484: 2 L gathers and L reduce-scatters for L blocks, and not one matmul more.

    The embedding is the one group whose backward reads no weight: it is gathered once. With a bf16 wire gradients
    are summed in fp32 by default; a reduce-scatter in bf16 fails this.
    """
    got: dict[str, Any] = {}
    for part in testing.run(_graphs, world_size=2):
        got |= part
    counts, matmuls = ({name: value[key] for name, value in got.items()} for key in ("collectives", "matmuls"))
    groups = LAYERS + 2
    assert counts["kept"] == {"all_gather": groups, "reduce_scatter": groups}
    assert counts["gathered"] == counts["both"] == {"all_gather": 2 * groups - 1, "reduce_scatter": groups}
    assert got["kept"]["alive"] == groups - 1
    assert got["gathered"]["alive"] == got["both"]["alive"] == 2
    # Forward 2 a block, backward 4; the head 1 and 2.
    assert matmuls["kept"] == matmuls["gathered"] == 6 * LAYERS + 3
    # Recomputed: the first matmul of each block; nothing reads what its second one, or the head's, gave.
    assert matmuls["both"] == matmuls["kept"] + LAYERS
    # Nobody asks for the gradient of the first block's input, which saves a matmul.
    assert counts["inside out"] == {"all_gather": 2 * LAYERS, "reduce_scatter": LAYERS}
    assert matmuls["inside out"] == 6 * LAYERS - 1 + LAYERS
    assert counts["3 microbatches"] == {"all_gather": 3 * 2 * LAYERS, "reduce_scatter": 3 * LAYERS}
    assert matmuls["3 microbatches"] == 3 * (6 * LAYERS - 1)
    assert got["fp32 wire"]["wire"] == {"all_gather": "float32", "reduce_scatter": "float32"}
    assert got["bf16 wire"]["wire"] == {"all_gather": "bfloat16", "reduce_scatter": "float32"}
    assert got["bf16 gradients"]["wire"] == {"all_gather": "bfloat16", "reduce_scatter": "bfloat16"}
    for name in ("kept", "gathered", "both"):
        again = 1 if name == "kept" else 2
        assert counts[f"{name} modules"] == {"all_gather": again * LAYERS, "reduce_scatter": LAYERS}
    assert matmuls["kept modules"] == matmuls["gathered modules"] < matmuls["both modules"]
    attention = [got[f"{name} modules"]["attention"] for name in ("kept", "gathered", "both")]
    assert attention == [2 * LAYERS, 2 * LAYERS, 3 * LAYERS]  # remat attends again, gathered does not


# Compiled: what lives, in the code that Inductor writes.


def lifetimes(code: str) -> list[tuple[str, int, int]]:
    """`(buffer it is gathered from, line of the gather, last line that reads it)` of every all-gather."""
    lines = programs.lines_of(code[code.index("def call(") :])
    found = []
    for i, line in enumerate(lines):
        made = re.search(r"(buf\d+) = torch\.ops\._c10d_functional\.\w+\.default\((\w+),", line)
        if made and programs.starts_gather(line):
            name = made.group(1)
            reads = [j for j in range(i, len(lines)) if re.search(rf"(?<!del )\b{name}\b", lines[j])]
            # Its memory may be handed on to another buffer; that line only renames it.
            last = max(j for j in reads if f"del {name}" not in lines[j])
            found.append((made.group(2), i, last))
    return found


def most_alive(spans: list[tuple[str, int, int]]) -> int:
    return max(sum(start <= at <= end for _, start, end in spans) for _, at, _ in spans)


def _compiled() -> dict[str, Any]:
    params, tokens = _start(3, width=24, hidden=40)
    jitted = dbuf.jit(dbuf.value_and_grad(models.language_loss()), overlap=False)  # test_schedule.py has it on
    (loss, grads), codes = run_and_get_code(jitted, params, tokens)
    order = {f"arg{i}_1": name for i, name in enumerate(params)}
    eager_loss, eager_grads = jitted.fn(params, tokens)
    return {
        "compiled": [loss, models.whole(grads)],
        "eager": [eager_loss, models.whole(eager_grads)],
        "spans": [(order[source], *span) for code in codes for source, *span in lifetimes(code)],
    }


@pytest.mark.slow
def test_lifetimes_in_the_compiled_code() -> None:
    """autoparallel#410, #469, P#146693: each block's full weights are freed before the next are gathered.

    Read from the code that Inductor writes: the lines where a gathered buffer is made and where it is deleted.
    """
    for got in testing.run(_compiled, world_size=2):
        testing.assert_close(got["compiled"], got["eager"])
        spans = [span for span in got["spans"] if span[0].startswith("block")]
        assert [name for name, _, _ in spans] == ["block0", "block1", "block2", "block2", "block1", "block0"]
        for (_, _, freed), (name, made, _) in itertools.pairwise(spans):
            assert freed < made, f"{name} is gathered while another block's weights are alive: {spans}"
        assert most_alive(got["spans"]) == 1


def _compiled_others() -> dict[str, Any]:
    params, tokens = _start(1)
    groups, run = models.attention_weights(1)
    modules = shard_groups(groups, dbuf.init_mesh(("dp",)), RowAtomic())
    h = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(7))
    half = functools.partial(dbuf.gathered, dtype=torch.bfloat16)

    def step(params: Any, modules: Any, tokens: torch.Tensor, h: torch.Tensor) -> Any:
        remats = [dbuf.grad(models.language_loss(use))(params, tokens) for use in (_both, _both_inside_out)]
        attend = [dbuf.grad(_attention_loss(use, run))(modules, h) for use in (dbuf.gathered, _both)]
        return [*remats, *attend, _microbatches(dbuf.gathered, 2)(params, tokens)], dbuf.grad(
            models.language_loss(half)
        )(params, tokens)

    jitted = dbuf.jit(step)
    with cheap_kernels.graphs_alone():
        compiled = models.whole(list(jitted(params, modules, tokens, h)))
    return {"compiled": compiled, "eager": models.whole(list(step(params, modules, tokens, h)))}


@pytest.mark.slow
def test_compiled_gradients_are_eagers() -> None:
    """remat in both orders, module blocks with attention, two microbatches: six backward regions in one graph."""
    for got in testing.run(_compiled_others, world_size=2):
        testing.assert_close(got["compiled"][0], got["eager"][0])
        testing.assert_close(got["compiled"][1], got["eager"][1], rtol=2e-2)  # bf16 compute, fused without rounding


# What is cheap is computed again.


def _normed_block(p: Tensors, h: torch.Tensor) -> torch.Tensor:
    return h + F.linear(F.rms_norm(h, h.shape[-1:], p["scale"]), p["w"])


def _growth(rows: int, width: int) -> float:
    """Bytes that a block more keeps from forward to backward, in the code of an SGD step."""
    peaks = []
    for layers in (3, 5):
        groups = {str(i): {"scale": torch.ones(width), "w": torch.randn(width, width)} for i in range(layers)}
        params = shard_groups(groups, dbuf.init_mesh(("dp",)), RowAtomic())

        def loss_fn(params: Any, h: torch.Tensor) -> torch.Tensor:
            for group in params.values():
                h = dbuf.gathered(_normed_block)(group, h)
            return h.square().mean()

        def step(params: Any, h: torch.Tensor, loss_fn: Any = loss_fn) -> Any:
            return tree.map(lambda p, g: p - 0.1 * g, params, dbuf.grad(loss_fn)(params, h))

        code = programs.code_of(dbuf.jit(step, donate_argnums=0), params, torch.randn(rows, width))
        peaks.append(max(sum(nbytes for _, nbytes in now.values()) for now in models.memory_of(code)))
    return (peaks[1] - peaks[0]) / 2


@pytest.mark.slow
def test_the_result_of_a_norm_is_computed_again() -> None:
    """A block keeps its input and one number a row; without the rule, what its matrix product read as well."""
    rows, width = 256, 8
    kept = rows * width * 4
    assert _growth(rows, width) <= 1.3 * kept
    with mock.patch("dbuf.schedule.repeat.cheap_to_repeat", lambda graph: set()):
        assert _growth(rows, width) >= 2 * kept


def _sequences(rows: tuple[int, ...]) -> dict[str, Any]:
    """The collectives of a step, batch by batch: a group of a bias alone stands between groups of products."""
    shapes = {"a": (8, 8), "b": (8,), "c": (8, 8), "d": (8, 8), "e": (8, 8)}
    groups = {name: {"w": torch.ones(shape)} for name, shape in shapes.items()}
    params = shard_groups(groups, dbuf.init_mesh(("dp",)), RowAtomic())

    def block(p: Tensors, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(h @ p["w"]) if p["w"].ndim > 1 else torch.sin(h + p["w"])

    def loss_fn(params: Any, h: torch.Tensor) -> torch.Tensor:
        for group in params.values():
            h = dbuf.gathered(block)(group, h)
        return h.square().mean()

    return programs.inspect_in_turns({str(n): (dbuf.grad(loss_fn), params, torch.ones(n, 8)) for n in rows})


@pytest.mark.slow
def test_what_is_gathered_again_does_not_depend_on_the_batch() -> None:
    """Ranks may have batches of other sizes: of one, seven or many rows they issue the same collectives."""
    some, others = testing.run(_sequences, (64, 8, 7, 1), world_size=2)
    found = [report.sequence for report in (some | others).values()]
    assert len(found) == 4 and all(sequence == found[0] for sequence in found)


def _gathers_of_a_table(rows: tuple[int, ...]) -> dict[str, Any]:
    """A table of positions stands before the blocks: with a batch of one it has the shape of the batch."""
    width, mesh = 4, dbuf.init_mesh(("dp",))
    first = dbuf.shard({"pos": torch.ones(3, width)}, mesh, RowAtomic())
    blocks = [dbuf.shard({"w": torch.ones(width, width)}, mesh, RowAtomic()) for _ in range(4)]

    def loss_fn(params: Any, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        first, *blocks = params
        h = dbuf.gathered(lambda p: F.silu(x + p["pos"] + table.sin()))(first)
        for block in blocks:
            h = dbuf.gathered(lambda p, h: h @ p["w"])(block, h)
        return h.square().mean()

    grad = dbuf.grad(loss_fn)
    table = torch.ones(3, width)
    return programs.inspect_in_turns({str(n): (grad, [first, *blocks], torch.ones(n, 3, width), table) for n in rows})


@pytest.mark.slow
def test_what_is_cheap_gathers_nothing_again() -> None:
    some, others = testing.run(_gathers_of_a_table, (8, 2, 1), world_size=2)
    found = [report.sequence for report in (some | others).values()]
    assert len(found) == 3 and all(sequence == found[0] for sequence in found)
    assert sum(c.kind == "all_gather" for c in found[0]) == 9  # four blocks twice, the table once


def _through_complex_views(conjugate: bool) -> list[Any]:
    torch.manual_seed(0)
    buf = dbuf.shard({"w": torch.randn(4, 2), "b": torch.randn(2)}, dbuf.init_mesh(("dp",)), RowAtomic())

    def fn(p: Tensors, x: torch.Tensor) -> torch.Tensor:
        weight = torch.view_as_complex(p["w"])
        return ((weight.conj() if conjugate else weight) * x).abs().square().sum()

    x = torch.randn(4, dtype=torch.complex64)
    found = []
    for call in (dbuf.gathered(fn), lambda buf, x: fn(dbuf.unpack(dbuf.allgather(buf)), x)):
        local, given = buf.local.clone().requires_grad_(), x.clone().requires_grad_()
        call(dbuf.DBuffer(local, buf.spec), given).backward()
        assert local.grad is not None and given.grad is not None
        found.append((local.grad, torch.view_as_real(given.grad)))
    return found


@pytest.mark.parametrize("conjugate", [False, True])
def test_complex_views_of_gathered_weights(conjugate: bool) -> None:
    """They are saved for the backward in another dtype than the buffer's."""
    for again, whole in testing.run(_through_complex_views, conjugate, world_size=2):
        testing.assert_bitwise(again, whole)
