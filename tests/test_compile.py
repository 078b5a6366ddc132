"""jit: one compilation for equal specs, streams of batch shapes, errors as themselves, and what may be nested in it."""

from __future__ import annotations

import copy
import tempfile
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import cheap_kernels
import dbuf
import dbuf.compile
import models
import programs
from dbuf import Replicate, RowAtomic, testing, tree
from dbuf.compile import run_on_fakes
from dbuf.errors import DbufError, PlacementError, TreeError


def _buffer(*values: float, name: str = "w") -> dbuf.DBuffer:
    return dbuf.shard({name: torch.tensor(values or (1.0, 2.0, 3.0))}, dbuf.init_mesh(("dp",)), RowAtomic())


def _double(tree_of_buffers: Any) -> Any:
    return tree.map(lambda x: x * 2, tree_of_buffers)


def test_equal_but_distinct_specs_do_not_compile_again() -> None:
    double = dbuf.jit(_double)
    a, b = _buffer(1.0, 2.0), _buffer(3.0, 4.0)
    assert a.spec is not b.spec and a.spec == b.spec
    testing.assert_bitwise(double(a).local, torch.tensor([2.0, 4.0]))
    with torch.compiler.set_stance("fail_on_recompile"):
        testing.assert_bitwise(double(b).local, torch.tensor([6.0, 8.0]))
        testing.assert_bitwise(double(double(a)).local, torch.tensor([4.0, 8.0]))  # P#168890: a result goes back in
        assert double(copy.copy(a)).spec == a.spec
    assert double.compiles == 1


@pytest.mark.slow
def test_other_specs_get_programs_of_their_own() -> None:
    """More layouts than Dynamo's limit of 8 recompilations, none of them dynamic."""
    double = dbuf.jit(_double)
    for n in range(1, 11):
        buf = _buffer(*map(float, range(n)))
        testing.assert_bitwise(double(buf).local, buf.local * 2)
    assert double.compiles == 10
    double(_buffer(1.0, name="other"))
    double({"a": _buffer(1.0)})
    assert double.compiles == 12


def test_one_guard_for_all_static_metadata() -> None:
    """Guards do not grow with the tensors of a buffer."""
    counts = []
    for tensors in (1, 50):
        params = dbuf.shard({f"w{i}": torch.ones(3) for i in range(tensors)}, dbuf.init_mesh(("dp",)), RowAtomic())
        torch.compiler.reset()
        jitted = dbuf.jit(_double)
        jitted(params)
        counts.append(_number_of_guards(jitted))
    assert counts[0] > 0
    assert abs(counts[0] - counts[1]) <= 2


def _number_of_guards(jitted: Any) -> int:
    """Guards of the newest program."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    (program,) = jitted._programs.values()
    newest = _debug_get_cache_entry_list(program._compiled._torchdynamo_orig_callable.__code__)[0]
    return len([line for line in str(newest.guard_manager).splitlines() if "+- " in line])


def _train(steps: int, lengths: list[int]) -> tuple[Any, list[float]]:
    """A compiled step over a stream of batches; the weights must never become dynamic."""
    params = models.shard_groups(models.weights(1), dbuf.init_mesh(("dp",)), RowAtomic())
    optimizer = dbuf.optim.sgd(0.5)

    def step(params: Any, state: Any, tokens: torch.Tensor) -> tuple[Any, Any, torch.Tensor]:
        loss, grads = dbuf.value_and_grad(models.language_loss())(params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return dbuf.optim.apply_updates(params, updates), state, loss

    jitted, state, losses = dbuf.jit(step, donate_argnums=(0, 1)), optimizer.init(params), []
    for i in range(steps):
        tokens = models.batch(0, rows=4, context=lengths[i % len(lengths)])
        params, state, loss = jitted(params, state, tokens)
        losses.append(loss.item())
    return jitted, losses


@pytest.mark.slow
def test_twenty_steps_compile_once() -> None:
    jitted, losses = _train(20, [4])
    assert jitted.compiles == 1
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.slow
def test_stream_of_batch_shapes_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """P#195635: the second length makes the batch dynamic, never a buffer; the third to twelfth change nothing."""
    seen: list[list[tuple[Any, ...]]] = []
    compile_inductor = dbuf.compile.compat.compile_inductor

    def spy(gm: Any, inputs: list[Any], *rest: Any) -> Any:
        values = [node.meta["example_value"] for node in gm.graph.nodes if node.op == "placeholder"]
        seen.append([tuple(x.shape) for x in values if isinstance(x, torch.Tensor)])
        return compile_inductor(gm, inputs, *rest)

    monkeypatch.setattr(dbuf.compile.compat, "compile_inductor", spy)
    jitted, losses = _train(24, [4, 7, 3, 9, 5, 11, 2, 8, 6, 10, 12, 13])
    assert jitted.compiles == len(seen) == 2
    assert losses[-1] < losses[0]
    dynamic = [[any(not isinstance(n, int) for n in shape) for shape in shapes] for shapes in seen]
    assert [sum(flags) for flags in dynamic] == [0, 1]
    assert all(len(shape) == 2 for shape, flag in zip(seen[1], dynamic[1], strict=True) if flag)  # the batch


def test_a_size_changes_in_one_function_and_not_in_another() -> None:
    """Dynamo knows functions by where they are written, and every program of `jit` is written in one place."""
    buf = _buffer(1.0, 2.0)
    sizes = []
    for rows in (4, 6, 8):

        def scaled(buf: Any, x: torch.Tensor) -> Any:
            return dbuf.tree.map(lambda y: y * x.sum(), buf)

        code = programs.code_of(dbuf.jit(scaled), buf, torch.ones(rows, 2))
        sizes.append(f"({rows}, 2)" in code)
    assert sizes == [True] * 3, "compiled for any size"


def test_disable_jit() -> None:
    seen: list[bool] = []

    def fn(buf: Any) -> Any:
        seen.append(torch.compiler.is_compiling())
        return _double(buf)

    double, buf = dbuf.jit(fn, donate_argnums=0), _buffer(1.0, 2.0)
    with dbuf.disable_jit():
        out = double(buf)
    assert (seen, double.compiles) == ([False], 0)
    testing.assert_bitwise(buf.local, torch.tensor([1.0, 2.0]))  # plain Python: nothing is donated
    testing.assert_bitwise(out.local, torch.tensor([2.0, 4.0]))
    double(buf)
    assert double.compiles == 1


@pytest.mark.parametrize(
    ("fn", "error", "match"),
    [
        (lambda b: dbuf.reduce_scatter(b, RowAtomic()), None, None),
        (lambda b: dbuf.allreduce(b, Replicate()), PlacementError, r"^dbuf.allreduce: "),
        (lambda b: dbuf.value_and_grad(lambda p: dbuf.unpack(p)["w"])(b), TreeError, r"the loss is not a floating"),
        (lambda b: dbuf.value_and_grad(lambda p, t: t.sum(), argnums=1)(b, b.local), TreeError, r"plain"),
        (lambda b: dbuf.optim.apply_updates(b, dbuf.allgather(b)), PlacementError, r"^dbuf.optim.apply_updates: "),
        (lambda b: dbuf.unpack(b)["missing"], KeyError, "missing"),
        (lambda b: 1 // 0, ZeroDivisionError, "zero"),
        (lambda b: b.local @ torch.ones(2, 2), RuntimeError, "reduction dim"),
    ],
    ids=["fine", "row", "loss", "plain tensor", "optimizer", "key", "python", "shapes"],
)
def test_errors_come_out_as_themselves(fn: Any, error: Any, match: Any) -> None:
    """Inside fullgraph they would arrive as Dynamo's own; nothing has run and nothing is lost."""
    buf = _buffer()
    before = buf.local.clone()
    jitted = dbuf.jit(fn)
    if error is None:
        jitted(buf)
        return
    with pytest.raises(error, match=match) as caught:
        jitted(buf)
    assert type(caught.value) is error and "torch._dynamo" not in type(caught.value).__module__
    assert jitted.compiles == 0
    testing.assert_bitwise(buf.local, before)
    with pytest.raises(error, match=match):  # and again: a refused call leaves no program behind
        jitted(buf)


def test_keyword_arguments_and_other_values() -> None:
    def fn(buf: Any, *, scale: float, on: bool = True, extra: Any = None) -> Any:
        return tree.map(lambda x: x * scale if on else x, buf), {"extra": extra}

    jitted = dbuf.jit(fn)
    out, rest = jitted(_buffer(1.0, 2.0), scale=3.0, extra=(None, "text"))
    testing.assert_bitwise(out.local, torch.tensor([3.0, 6.0]))
    assert rest == {"extra": (None, "text")}
    out, _ = jitted(_buffer(1.0, 2.0), scale=3.0, on=False)
    testing.assert_bitwise(out.local, torch.tensor([1.0, 2.0]))
    assert jitted.__name__ == "fn"


def _noisy(buf: Any) -> Any:
    return tree.map(lambda x: F.dropout(x + torch.randn_like(x), 0.5), buf)


def test_random_functions_draw_anew_and_repeat_with_the_seed() -> None:
    noisy, buf = dbuf.jit(_noisy), _buffer(*[1.0] * 32)
    torch.manual_seed(1)
    first, second = noisy(buf), noisy(buf)
    assert not torch.equal(first.local, second.local)
    torch.manual_seed(1)
    testing.assert_bitwise(noisy(buf), first)


def test_a_run_on_fakes_neither_runs_nor_draws() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    buf = _buffer(1.0, 2.0)
    out = run_on_fakes(_noisy, (buf,), {})
    testing.assert_bitwise(torch.get_rng_state(), before)
    assert out.spec == buf.spec and out.local.shape == (2,)
    testing.assert_bitwise(buf.local, torch.tensor([1.0, 2.0]))


def test_jit_inside_jit_is_part_of_the_outer_program() -> None:
    inner = dbuf.jit(_double)
    outer = dbuf.jit(lambda buf: _double(inner(buf)))
    testing.assert_bitwise(outer(_buffer(1.0, 2.0)).local, torch.tensor([4.0, 8.0]))
    assert outer.compiles == 1


def test_inside_a_plain_compile() -> None:
    """A movement compiles under `torch.compile` by itself; `value_and_grad` needs what jit sets, or the setting."""
    double = torch.compile(_double, fullgraph=True, backend="eager")
    testing.assert_bitwise(double(_buffer(1.0, 2.0)).local, torch.tensor([2.0, 4.0]))


class State(NamedTuple):
    count: torch.Tensor
    buf: Any


def test_results_of_any_structure() -> None:
    def fn(state: State) -> dict[str, Any]:
        return {"state": State(state.count + 1, _double(state.buf)), "list": [state.count, None, 3]}

    jitted, state = dbuf.jit(fn), State(torch.tensor(0), _buffer(1.0))
    for i in range(3):
        out = jitted(state)
        state = out["state"]
        assert type(state) is State and type(state.buf) is dbuf.DBuffer and type(state.buf.local) is torch.Tensor
        assert out["list"][1:] == [None, 3] and state.count == i + 1
    assert jitted.compiles == 1


def _owned() -> dict[str, Any]:
    """A compiled `shard` of big tensors into small parts."""
    mesh = dbuf.init_mesh(("dp",))
    tensors = {"a": torch.arange(4096.0).view(64, 64), "b": torch.arange(100.0)}
    one = {"a": torch.arange(4096.0).view(64, 64)}

    def fn(tensors: Any, one: Any) -> list[Any]:
        return [dbuf.shard(t, mesh, p) for t in (tensors, one) for p in (RowAtomic(), Replicate())]

    eager, compiled = fn(tensors, one), dbuf.jit(fn)(tensors, one)
    testing.assert_bitwise(compiled, eager)
    return {
        "storage": [(b.local.untyped_storage().nbytes(), b.local.nbytes) for b in [*eager, *compiled]],
        "shares": [b.local.data_ptr() in {t.data_ptr() for t in tensors.values()} for b in [*eager, *compiled]],
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_compiled_shard_owns_memory_of_its_own_size(ranks: int) -> None:
    """A narrow and a clone would keep the whole flat storage alive: Inductor drops the clone."""
    for got in testing.run(_owned, world_size=ranks):
        assert all(storage == own for storage, own in got["storage"]), got["storage"]
        assert not any(got["shares"])


def _same_order() -> list[tuple[str, int]]:
    """The collectives of a step on uneven and empty segments, as this rank's graph has them."""
    mesh = dbuf.init_mesh(("dp",))
    params = models.shard_groups(models.weights(1), mesh, RowAtomic(), layout=dbuf.ShardLayout.UNPADDED)
    params["tiny"] = dbuf.shard({"w": torch.ones(1)}, mesh, RowAtomic(), layout=dbuf.ShardLayout.UNPADDED)

    def loss_fn(params: Any, tokens: torch.Tensor) -> torch.Tensor:
        rest = {k: v for k, v in params.items() if k != "tiny"}
        return models.language_loss()(rest, tokens) * dbuf.gathered(lambda t: t["w"].sum())(params["tiny"])

    report = dbuf.inspect(dbuf.value_and_grad(loss_fn), params, models.share(models.batch(), mesh.get_rank(), 3))
    return [(c.kind, c.numel) for c in report.sequence]


@pytest.mark.slow
def test_collectives_stand_in_the_same_order_on_every_rank() -> None:
    """With empty segments, passes that look at local shapes have put them in another order on some ranks."""
    first, *others = testing.run(_same_order, world_size=3)
    assert len(first) >= 9
    assert all([kind for kind, _ in other] == [kind for kind, _ in first] for other in others)


_WHOLE = dbuf.jit(lambda buf: dbuf.allgather(buf))


_DOUBLED = dbuf.jit(lambda x: x * 2)


def _two_worlds() -> list[Any]:
    """One jitted function in two worlds whose groups of one name are of other ranks."""
    rank, ranks, out = dist.get_rank(), dist.get_world_size(), []
    for groups_before in ([], [[0, 3], [1, 2]]):
        for members in groups_before:
            dist.new_group(members)
        mesh = dbuf.init_mesh(("outer", "inner"), (2, 2))
        own = torch.tensor(float(rank))
        assert _DOUBLED(own) == 2 * rank
        zeros = dbuf.shard({"w": torch.zeros(2, 2)}, mesh, (Replicate(), RowAtomic()), dp_size=2)
        got = _WHOLE(tree.map(lambda x, rank=rank: x + rank, zeros))
        names = [of.get_group("inner").group_name for of in (mesh, got.spec.mesh)]
        out.append((got.local.tolist(), names[0] == names[1]))
        store = [f"{tempfile.mkdtemp()}/store" if rank == 0 else None]
        dist.broadcast_object_list(store)
        dist.destroy_process_group()
        assert _DOUBLED(own) == 2 * rank  # outside of any world, after one
        dist.init_process_group("gloo", init_method=f"file://{store[0]}", rank=rank, world_size=ranks)
    return [*out, _WHOLE.compiles]


@pytest.mark.slow
def test_a_new_world_has_programs_of_its_own() -> None:
    for rank, (*worlds, compiles) in enumerate(testing.run(_two_worlds, world_size=4)):
        first = float(rank // 2 * 2)
        assert worlds == [([first, first, first + 1, first + 1], True)] * 2 and compiles == 2


def test_options_and_dynamic_are_handed_on() -> None:
    with pytest.raises(Exception, match="no_such_option"):
        dbuf.jit(_double, options={"no_such_option": 1})(_buffer())
    with pytest.raises(DbufError):
        dbuf.jit(_double, donate_argnums=3)(_buffer())


def _sums_of_batches() -> Any:
    """A collective whose size is that of the batch."""
    mesh = dbuf.init_mesh(("dp",))
    buf = dbuf.shard({"w": torch.ones(3)}, mesh, RowAtomic())
    step = dbuf.jit(lambda b, x: (dbuf.gathered(lambda p: p["w"].sum())(b) + x.sum(), dbuf.pmean(x * 2, mesh)))
    with cheap_kernels.graphs_alone():
        values = [step(buf, torch.full((n, 2), 1.0))[1].sum().item() for n in range(3, 13)]
    sizes = [max(c.numel for c in step.inspect(buf, torch.ones(n, 2)).sequence) for n in (3, 5, 12)]
    return values, sizes, step.compiles


@pytest.mark.slow
def test_collectives_of_changing_sizes_compile_twice_and_are_reported_for_these_arguments() -> None:
    """Was wrong: reading the graph fixed each size, and the ninth size was an error."""
    for values, sizes, compiles in testing.run(_sums_of_batches, world_size=2):
        assert (values, sizes, compiles) == ([4.0 * n for n in range(3, 13)], [6, 10, 24], 2)


def test_a_mistake_at_a_later_call_is_told_as_python_tells_it() -> None:
    step = dbuf.jit(lambda x: x.reshape(2, -1).sum(0))
    step(torch.ones(4))
    with pytest.raises(RuntimeError, match="shape '\\[2, -1\\]' is invalid") as caught:
        step(torch.ones(5))
    assert "Dynamo" not in str(caught.value)


def test_a_transform_over_a_jitted_function_is_refused() -> None:
    with pytest.raises(dbuf.DbufError, match=r"inside a torch\.func transform"):
        torch.func.vmap(dbuf.jit(torch.sin))(torch.ones(2, 3))
    testing.assert_close(dbuf.jit(torch.func.vmap(torch.sin))(torch.ones(2, 3)), torch.ones(2, 3).sin())
