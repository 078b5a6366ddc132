"""value_and_grad and grad: equal to one process, in the dual placements, and refused where they would be wrong."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import dbuf
import models
from dbuf import Partial, Replicate, RowAtomic, testing
from dbuf.errors import DbufError, TreeError
from models import shard_groups, share

Tensors = dict[str, torch.Tensor]


def _alone(groups: dict[str, Tensors], tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, Tensors]]:
    """Loss and gradients by plain autograd on the whole batch: no dbuf in it but for the names."""
    leaves = {g: {k: v.clone().requires_grad_() for k, v in ts.items()} for g, ts in groups.items()}
    loss = models.language_loss(models.plain)(leaves, tokens)
    loss.backward()
    return loss.detach(), {g: {k: v.grad for k, v in ts.items()} for g, ts in leaves.items()}


def _local_and_global(placement: Any) -> dict[str, Any]:
    mesh = dbuf.init_mesh(("dp",))
    rank, ranks = mesh.get_rank(), mesh.size()
    params = shard_groups(models.weights(), mesh, placement)
    tokens = share(models.batch(), rank, ranks)
    loss, grads = dbuf.value_and_grad(models.language_loss())(params, tokens)
    sums = dbuf.grad(models.language_loss(), reduction="sum")(params, tokens)
    by_axis = dbuf.grad(models.language_loss(), mean_over="dp")(params, tokens)
    assert not loss.requires_grad and not any(g.local.requires_grad for g in grads.values())
    own, _ = _alone(models.weights(), tokens)
    return {
        "loss": dbuf.pmean(loss, mesh),
        "own loss": (loss, own),
        "placements": {str(g.placements) for g in grads.values()},
        "layouts": all(grads[k].layout == params[k].layout for k in params),
        "mean": models.whole(grads),
        "sum": models.whole(sums),
        "mean_over": models.whole(by_axis),
    }


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("placement", "dual"), [(RowAtomic(), RowAtomic()), (Replicate(), Partial("sum"))])
def test_equal_to_one_process_on_the_whole_batch(placement: Any, dual: Any, ranks: int) -> None:
    """fairchem#2135: an all-reduce gradient too large by the world size fails this at 2 and at 3 ranks."""
    loss, grads = _alone(models.weights(), models.batch())
    for got in testing.run(_local_and_global, placement, world_size=ranks):
        testing.assert_close(got["loss"], loss)
        testing.assert_close(*got["own loss"])
        assert got["placements"] == {str((dual,))}
        assert got["layouts"]
        testing.assert_close(got["mean"], grads)
        testing.assert_close(got["mean_over"], grads)
        for group, tensors in grads.items():
            testing.assert_close(got["sum"][group], {k: v * ranks for k, v in tensors.items()})


def _rules() -> dict[str, Any]:
    mesh = dbuf.init_mesh(("dp",))
    rank = mesh.get_rank()
    w = {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), "b": torch.tensor([0.5, -1.0, 2.0])}
    x = torch.tensor([1.0, 2.0]) + rank
    a, b = (dbuf.shard(w, mesh, RowAtomic()) for _ in range(2))
    partial = dbuf.shard(w, mesh, Partial("sum"))

    def fn(p: Any, x: torch.Tensor, q: Any, scale: float = 1.0) -> tuple[torch.Tensor, dict[str, Any]]:
        def inner(t: Tensors) -> torch.Tensor:
            return (t["w"] @ x + t["b"]).square().sum()

        first, second = dbuf.gathered(inner)(p), dbuf.gathered(inner)(q)
        return scale * (first + 3 * second), {"first": first, "names": "kept", "none": None}

    (loss, aux), (ga, gb) = dbuf.value_and_grad(fn, argnums=(0, 2), has_aux=True)(a, x, b, scale=2.0)
    only_b, _ = dbuf.grad(fn, argnums=2, has_aux=True)(a, x, b, scale=2.0)
    of_partial = dbuf.grad(lambda p: dbuf.unpack(dbuf.allreduce(p))["w"].sum(), reduction="sum")(partial)

    def unused(p: dict[str, Any]) -> torch.Tensor:
        return dbuf.gathered(lambda t: t["w"].sum())(p["a"])

    grads = dbuf.grad(unused)({"a": a, "b": b})
    counts = [
        dbuf.inspect(dbuf.grad(f), args).collectives
        for f, args in ((unused, {"a": a, "b": b}), (lambda p: unused(p) + unused({"a": p["b"]}), {"a": a, "b": b}))
    ]
    return {
        "rank": rank,
        "loss": loss,
        "aux": aux,
        "aux grad": aux["first"].requires_grad,
        "ga": models.whole(ga),
        "gb": models.whole(gb),
        "only_b": models.whole(only_b),
        "of_partial": (str(of_partial.placements), dbuf.unpack(of_partial)),
        "unused": (grads["b"].local.count_nonzero().item(), str(grads["b"].spec == b.spec.dual())),
        "counts": counts,
    }


def test_argnums_aux_keywords_unused_and_partial() -> None:
    """Against gradients written out by hand for `sum((W x + b)^2)`: `2 r x^T` and `2 r`, averaged over ranks."""
    w, b = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.tensor([0.5, -1.0, 2.0])
    xs = [torch.tensor([1.0, 2.0]) + rank for rank in range(2)]
    residuals = [w @ x + b for x in xs]
    hand = {
        "w": torch.stack([2 * torch.outer(r, x) for r, x in zip(residuals, xs, strict=True)]).mean(0),
        "b": torch.stack([2 * r for r in residuals]).mean(0),
    }
    for got in testing.run(_rules, world_size=2):
        first = residuals[got["rank"]].square().sum()
        testing.assert_close(got["loss"], 8 * first)
        testing.assert_close(got["aux"], {"first": first, "names": "kept", "none": None})
        assert got["aux grad"] is False
        testing.assert_close(got["ga"], {k: 2 * v for k, v in hand.items()})
        testing.assert_close(got["gb"], {k: 6 * v for k, v in hand.items()})
        testing.assert_close(got["only_b"], got["gb"])
        # The dual of Partial is Replicate: each rank's contribution gets the gradient of the whole, from all ranks.
        placements, values = got["of_partial"]
        assert placements == "(Replicate(),)"
        testing.assert_bitwise(values, {"w": torch.full((3, 2), 2.0), "b": torch.zeros(3)})
        assert got["unused"] == (0, "True")
        # The forward gather of the one that is used (its backward reads no weight), and one reduce-scatter.
        assert got["counts"] == [{"all_gather": 1, "reduce_scatter": 1}, {"all_gather": 2, "reduce_scatter": 2}]


def _sub_meshes() -> dict[str, Any]:
    mesh = dbuf.init_mesh(("outer", "inner"), (2, 2))
    sub = dbuf.mesh.prepare(mesh["inner"])
    both = {"wide": dbuf.shard({"w": torch.ones(4)}, mesh, (Replicate(), RowAtomic()), dp_size=2)}
    both["narrow"] = dbuf.shard({"w": torch.ones(4)}, sub, RowAtomic())

    def fn(p: dict[str, Any]) -> torch.Tensor:
        return sum(dbuf.gathered(lambda t: t["w"].sum())(buf) for buf in p.values())

    with pytest.raises(TreeError) as error:
        dbuf.value_and_grad(fn)(both)
    grads = dbuf.grad(fn, mean_over=("outer", "inner"))(both)
    wide = dbuf.unpack(dbuf.allgather(dbuf.allreduce(grads["wide"])))["w"]
    narrow = dbuf.unpack(dbuf.allgather(grads["narrow"]))["w"]
    inner_only = dbuf.grad(fn, mean_over="inner")(both)["narrow"]
    return {"error": str(error.value), "wide": wide, "narrow": narrow, "inner": dbuf.unpack(dbuf.allgather(inner_only))}


def test_mean_over_is_needed_on_meshes_of_different_sizes() -> None:
    for got in testing.run(_sub_meshes, world_size=4):
        assert "mean_over" in got["error"] and "[2, 4] ranks" in got["error"]
        testing.assert_bitwise(got["wide"], torch.ones(4))  # 4 ranks / 4
        testing.assert_bitwise(got["narrow"], torch.full((4,), 0.5))  # only the 2 ranks of its mesh add up
        testing.assert_bitwise(got["inner"], {"w": torch.ones(4)})


def _buffer(values: Any = (1.0, 2.0), **options: Any) -> dbuf.DBuffer:
    return dbuf.shard({"w": torch.tensor(values, **options)}, dbuf.init_mesh(("dp",)), RowAtomic())


def _square(p: Any) -> torch.Tensor:
    return dbuf.gathered(lambda t: (t["w"] ** 2).sum())(p)


@pytest.mark.parametrize(
    ("fn", "args", "part"),
    [
        (lambda p: _square(p["buf"]), lambda: ({"buf": _buffer(), "t": torch.ones(2)},), "['t']: Tensor"),
        (lambda p: p.sum(), lambda: (torch.ones(2),), "the argument: Tensor"),
        (lambda p: torch.ones(()), lambda: ({},), "no buffer"),
        (_square, lambda: (_buffer((1, 2)),), "the argument: DBuffer of torch.int64"),
        (lambda p: dbuf.unpack(p)["w"], lambda: (_buffer(),), "torch.float32 of shape (2,)"),
        (lambda p: dbuf.unpack(p)["w"].sum().long(), lambda: (_buffer(),), "torch.int64 of shape ()"),
        (lambda p: 1.0, lambda: (_buffer(),), "float"),
        (lambda p: (_square(p), 1), lambda: (_buffer(),), "tuple"),
    ],
    ids=["tensor beside", "tensor alone", "nothing", "integers", "no scalar", "integer loss", "float", "forgotten aux"],
)
def test_refused(fn: Any, args: Any, part: str) -> None:
    with pytest.raises(TreeError, match=r"^dbuf.value_and_grad: ") as error:
        dbuf.value_and_grad(fn)(*args())
    assert f"got:  {part}" in str(error.value)
    assert "try:" in str(error.value)


def test_integers_and_constants_beside_buffers_are_left_alone() -> None:
    tree = {"buf": _buffer(), "step": torch.tensor(3), "name": "x", "none": None}
    grads = dbuf.grad(lambda p: _square(p["buf"]) * p["step"])(tree)
    testing.assert_bitwise(grads["buf"].local, torch.tensor([6.0, 12.0]))
    assert (grads["step"], grads["name"], grads["none"]) == (torch.tensor(3), "x", None)


@pytest.mark.parametrize("argnums", [3, (0, 0), -1])
def test_no_such_arguments(argnums: Any) -> None:
    with pytest.raises(DbufError, match="no such arguments to differentiate"):
        dbuf.value_and_grad(lambda p: p.local.sum(), argnums)(dbuf.shard(torch.ones(2), dbuf.init_mesh(), RowAtomic()))


def test_no_such_reduction() -> None:
    with pytest.raises(DbufError, match="no such reduction"):
        dbuf.value_and_grad(_square, reduction="avg")


def test_an_unknown_axis_of_mean_over() -> None:
    with pytest.raises(DbufError, match="no such mesh axis"):
        dbuf.value_and_grad(_square, mean_over="pp")(_buffer())


@pytest.mark.parametrize(
    "outer",
    [
        lambda fn, x: torch.func.grad(fn)(x),
        lambda fn, x: torch.func.vjp(fn, x),
        lambda fn, x: torch.func.vmap(fn)(x[None]),
    ],
    ids=["grad", "vjp", "vmap"],
)
def test_refused_inside_torch_func(outer: Any) -> None:
    buf = _buffer()

    def fn(x: torch.Tensor) -> torch.Tensor:
        return dbuf.value_and_grad(_square)(dbuf.DBuffer(x, buf.spec))[0]

    with pytest.raises(DbufError, match=r"called inside a torch.func transform"):
        outer(fn, buf.local)


class _Count(TorchDispatchMode):
    """Counts operations in eager."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_unpack_backward_is_one_concatenation() -> None:
    """64 leaves of 65,536 floats: a slice a leaf would pad 64 gradients to full size and add them up."""
    buf = dbuf.shard({f"w{i}": torch.ones(256, 256) for i in range(64)}, dbuf.init_mesh(("dp",)), RowAtomic())

    def step(buf: Any) -> Any:
        return dbuf.grad(lambda p: sum(leaf.sum() * i for i, leaf in enumerate(dbuf.unpack(p).values())))(buf)

    with _Count() as seen:
        grads = step(buf)
    testing.assert_bitwise(grads.local, torch.arange(64.0).repeat_interleave(65536))
    for ops in (seen.ops, dbuf.inspect(step, buf).ops):
        assert ops["aten.cat"] == 1
        assert not {"aten.slice_backward", "aten.slice_scatter", "aten.slice", "aten.narrow"} & set(ops)


def test_inputs_are_not_touched() -> None:
    buf = _buffer()
    before = buf.local.clone()
    dbuf.value_and_grad(_square)(buf)
    testing.assert_bitwise(buf.local, before)
    assert buf.local.grad is None and not buf.local.requires_grad


def test_under_no_grad_it_still_differentiates() -> None:
    with torch.no_grad():
        testing.assert_bitwise(dbuf.grad(_square)(_buffer()).local, torch.tensor([2.0, 4.0]))


def test_low_precision_buffers_get_gradients_of_their_dtype() -> None:
    buf = dbuf.cast(_buffer((1.0, 2.0, 4.0)), torch.bfloat16)
    grads = dbuf.grad(_square)(buf)
    assert grads.dtype == torch.bfloat16
    testing.assert_bitwise(grads.local, torch.tensor([2.0, 4.0, 8.0], dtype=torch.bfloat16))


def test_two_calls_give_the_same_bits() -> None:
    """A step is a function of its arguments."""
    params = shard_groups(models.weights(), dbuf.init_mesh(("dp",)), RowAtomic())
    run = dbuf.value_and_grad(models.language_loss())
    testing.assert_bitwise(run(params, models.batch()), run(params, models.batch()))


def test_loss_of_the_untrained_model_is_that_of_chance() -> None:
    """The models here are worth training: a loss far from ln(VOCAB) would make parity tests blind."""
    loss, grads = _alone(models.weights(), models.batch())
    assert abs(loss.item() - math.log(models.VOCAB)) < 1
    assert all(g.abs().max() > 1e-3 for ts in grads.values() for g in ts.values())


def _bf16_loss() -> tuple[Any, int]:
    mesh = dbuf.init_mesh(("dp",))
    buf = dbuf.shard({"w": torch.ones(6, 2)}, mesh, RowAtomic())
    grads = dbuf.grad(dbuf.gathered(lambda p: p["w"].sum().bfloat16()))(buf)
    return grads.local, mesh.size()


def test_a_loss_in_bf16_does_not_round_one_over_the_ranks() -> None:
    """1 / 3 in bf16 is 0.2 % too large, and so would be every gradient."""
    for local, ranks in testing.run(_bf16_loss, world_size=3):
        assert ranks == 3
        testing.assert_close(local, torch.ones(4), rtol=1e-6)


def _cubes(buf: dbuf.DBuffer) -> torch.Tensor:
    return dbuf.gathered(lambda p: (p["w"] ** 3).sum())(buf)


@pytest.mark.parametrize("wrap", [lambda fn: fn, dbuf.jit], ids=["eager", "jit"])
def test_what_would_be_differentiated_twice_is_refused(wrap: Callable[..., Any]) -> None:
    """Was wrong: the derivative of the inner gradients was left out. torch.func has it."""
    buf = dbuf.shard({"w": torch.tensor([1.0, 2.0])}, dbuf.init_mesh(("dp",)), RowAtomic())

    def penalised(b: dbuf.DBuffer, quiet: bool = False) -> torch.Tensor:
        with torch.no_grad() if quiet else contextlib.nullcontext():
            inner = dbuf.grad(_cubes)(b)
        return _cubes(b) + dbuf.vdot(inner, inner)

    with pytest.raises(dbuf.DbufError, match=r"inside another dbuf\.value_and_grad"):
        wrap(dbuf.grad(penalised))(buf)
    assert dbuf.grad(lambda b: penalised(b, quiet=True))(buf).local.tolist() == [3.0, 12.0]

    def twice(b: dbuf.DBuffer) -> torch.Tensor:
        inner = torch.func.grad(_cubes)(b)
        return _cubes(b) + dbuf.vdot(inner, inner)

    assert torch.func.grad(twice)(buf).local.tolist() == [39.0, 300.0]


@pytest.mark.parametrize("wrap", [lambda fn: fn, dbuf.jit], ids=["eager", "jit"])
def test_a_loss_that_reads_no_buffer_is_refused(wrap: Callable[..., Any]) -> None:
    buf = dbuf.shard({"w": torch.ones(2)}, dbuf.init_mesh(("dp",)), RowAtomic())
    with pytest.raises(dbuf.DbufError, match="reads none of the buffers"):
        wrap(dbuf.grad(lambda b: torch.tensor(1.0)))(buf)


def _scaled_cubes(scale: float, p: Tensors) -> torch.Tensor:
    return (p["w"] ** 3).sum() * scale


def _scaled_loss(scale: float, buf: dbuf.DBuffer) -> torch.Tensor:
    return dbuf.gathered(functools.partial(_scaled_cubes, scale))(buf)


@pytest.mark.parametrize("wrap", [lambda fn: fn, dbuf.jit], ids=["eager", "jit"])
def test_a_partial_is_a_function_like_any_other(wrap: Callable[..., Any]) -> None:
    """Was an error of Dynamo, where the transform of a partial was made inside the compiled function."""
    buf = dbuf.shard({"w": torch.tensor([1.0, 2.0])}, dbuf.init_mesh(("dp",)), RowAtomic())
    loss = functools.partial(_scaled_loss, 2.0)

    def of_all(b: dbuf.DBuffer, w: torch.Tensor) -> Any:
        again = dbuf.remat(functools.partial(_scaled_cubes, 3.0))
        return dbuf.value_and_grad(loss)(b), dbuf.grad(loss)(b), again({"w": w})

    (value, grads), only, of_tensors = wrap(of_all)(buf, torch.tensor([1.0, 2.0]))
    assert (value.item(), of_tensors.item()) == (18.0, 27.0)
    assert grads.local.tolist() == only.local.tolist() == [6.0, 24.0]
