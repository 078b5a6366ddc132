"""Donation: results in the memory of the arguments, nothing of full size allocated, and refused where it cannot be."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.utils import run_and_get_code

import dbuf
import models
from dbuf import RowAtomic, testing, tree
from dbuf.errors import DbufError, TreeError
from models import allocations, memory_of, peak_of_run

NUMEL = 4096


def _state(numel: int = NUMEL) -> tuple[Any, Any, Any]:
    """Parameters, AdamW's state, gradients: 4 buffers of `numel`."""
    mesh = dbuf.init_mesh(("dp",))
    params = {"a": dbuf.shard({"w": torch.rand(numel)}, mesh, RowAtomic())}
    grads = {"a": dbuf.shard({"w": torch.rand(numel)}, mesh, RowAtomic())}
    return params, dbuf.optim.adamw(1e-2).init(params), grads


def _update(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
    updates, state = dbuf.optim.adamw(1e-2).update(grads, state, params)
    return dbuf.optim.apply_updates(params, updates), state


def _pointers(values: Any) -> list[int]:
    return [leaf.data_ptr() for leaf in tree.leaves(values)]


@pytest.mark.slow
def test_adamw_writes_into_the_donated_memory() -> None:
    """P#195329: an update of a whole buffer makes no second copy of it; without donation it makes three."""
    params, state, grads = _state()
    expected = _update(params, state, grads)
    donating = dbuf.jit(_update, donate_argnums=(0, 1))
    keeping = dbuf.jit(_update)
    for jitted, full_size in ((keeping, 3), (donating, 0)):
        given = _pointers((params, state))
        out = jitted(params, state, grads)
        testing.assert_close(out, expected)
        assert (_pointers(out) == given) is (jitted is donating)
        made = [n for n in allocations(lambda jitted=jitted, out=out: jitted(*out, grads)) if n >= NUMEL * 4]
        assert len(made) == full_size
    assert donating.compiles == keeping.compiles == 1


def test_values_are_those_without_donation_over_steps() -> None:
    donating, keeping = dbuf.jit(_update, donate_argnums=(0, 1)), _update
    (params, state, grads), (p, s, _) = _state(100), _state(100)
    p, s = tree.map(torch.clone, (params, state))
    for _ in range(3):
        params, state = donating(params, state, grads)
        p, s = keeping(p, s, grads)
        testing.assert_close((params, state), (p, s))


def test_results_keep_their_structure() -> None:
    class Carry(NamedTuple):
        w: Any
        n: torch.Tensor

    def fn(w: Any, n: torch.Tensor) -> Carry:
        return Carry(tree.map(lambda x: x + n, w), n + 1)

    out = dbuf.jit(fn, donate_argnums=(0, 1))(_state(8)[0], torch.tensor(0))
    assert type(out) is Carry and out.n.item() == 1
    lone = dbuf.jit(lambda buf: tree.map(lambda x: x + 1, buf), donate_argnums=(0,))
    buf = _state(8)[0]["a"]
    pointer = buf.local.data_ptr()
    assert lone(buf).local.data_ptr() == pointer


def _logged(buf: Any, x: torch.Tensor, how: str = "") -> tuple[Any, Any]:
    """Another branch for another flag, another size of the batch, and for an argument that is the donated memory."""
    if how in ("wide", "partial"):
        wide = dbuf.cast(buf, torch.float64)
        return wide if how == "wide" else dbuf.DBuffer(buf.local + 1, buf.spec.dual()), x
    log = buf.local if how == "old" or x.shape[0] > 4 else x
    return tree.map(lambda local: local + 1, buf), log


@pytest.mark.parametrize("how, rows, share", [("old", 2, False), ("", 8, False), ("", 4, True)])
def test_a_later_branch_keeps_old_numbers_too(how: str, rows: int, share: bool) -> None:
    step = dbuf.jit(_logged, donate_argnums=0)
    x = torch.zeros(4)
    assert step(_state(4)[0]["a"], x)[1] is x
    buf = _state(4)[0]["a"]
    old = buf.local.clone()
    new, log = step(buf, buf.local if share else torch.zeros(rows), how)
    testing.assert_bitwise((new.local, log), (old + 1, old))


def test_what_is_no_tensor_in_a_donated_argument_is_returned_as_it_became() -> None:
    """Was wrong: the argument came back, and a step counted by a Python number stood still."""
    step = dbuf.jit(lambda s: {"w": s["w"] * 2, "n": s["n"] + 1, "name": s["name"]}, donate_argnums=0)
    state = {"w": torch.ones(3), "n": 3, "name": "state"}
    for n in (4, 5):
        state = step(state)
        assert (state["n"], state["name"]) == (n, "state")
    testing.assert_bitwise(state["w"], torch.full((3,), 4.0))


@pytest.mark.parametrize("how, need", [("wide", "float32"), ("partial", "Replicate")])
def test_a_later_branch_that_does_not_pair_is_refused(how: str, need: str) -> None:
    step = dbuf.jit(_logged, donate_argnums=0)
    mesh = dbuf.init_mesh(("dp",))
    buf = dbuf.shard({"w": torch.arange(4.0)}, mesh, dbuf.Replicate())
    buf, _ = step(buf, torch.zeros(4))
    with pytest.raises(TreeError, match=f"argument 0 is donated, but result 0 does not fit(?s:.*){need}"):
        step(buf, torch.zeros(4), how)
    testing.assert_bitwise(buf.local, torch.arange(4.0) + 1)


def test_a_donated_buffer_that_the_function_also_finds_outside_keeps_its_numbers() -> None:
    found = _state(4)[0]["a"]
    old = found.local.clone()
    new, outside = dbuf.jit(lambda buf: (tree.map(lambda x: 2 * x, buf), found), donate_argnums=0)(found)
    testing.assert_bitwise((new.local, outside.local), (2 * old, old))


_GRID = (4, 6)
_MOVES = {
    "flip": lambda w: w.flip(0),
    "queue": lambda w: F.pad(w[:-1], (0, 0, 1, 0)),
    "turn": lambda w: w.view(6, 4).t().reshape(_GRID) * 0.5,
    "roll": lambda w: w.roll(1, 0),
    "rows": lambda w: w[[3, 2, 1, 0]],
    "first": lambda w: w[1].expand(_GRID) * 2,
}


def _moves(buf: Any) -> Any:
    """New values that are read from other places of the old ones."""
    return {name: dbuf.pack({"w": move(dbuf.unpack(buf[name])["w"])}, like=buf[name]) for name, move in _MOVES.items()}


def test_a_value_that_moves_within_its_own_memory_is_read_before_it_is_written() -> None:
    """Inductor alone would write one element after the other, and read some that it has written."""
    w = torch.arange(24.0).view(_GRID)
    make = lambda: {name: dbuf.shard({"w": w}, dbuf.init_mesh(("dp",)), RowAtomic()) for name in _MOVES}  # noqa: E731
    given = make()
    places = _pointers(given)
    out = dbuf.jit(_moves, donate_argnums=0)(given)
    testing.assert_bitwise(out, _moves(make()))
    assert _pointers(out) == places


def _scatter(a: torch.Tensor) -> Any:
    return a * 2, torch.slice_scatter(a, torch.full((2,), 100.0), 0, 0, 2), a.view(2, 2).select_scatter(a[:2], 1, 0)


def _assign(a: torch.Tensor) -> Any:
    b = a.clone()
    b[0:2] = -100.0
    return b.relu(), b


def _put(a: torch.Tensor) -> Any:
    put = a.index_put((torch.tensor([0, 2]),), torch.tensor([-1.0, -2.0]))
    return put * 2, put


def _put_and_keep(a: torch.Tensor) -> Any:
    put = a.index_put((torch.tensor([0]),), torch.ones(1), accumulate=True)
    return put, put


@pytest.mark.parametrize("fn", [_scatter, _assign, _put, _put_and_keep])
def test_what_inductor_would_do_in_place_is_done_on_a_copy(fn: Any) -> None:
    """Further results are memory of their own: what an earlier step returned does not change."""
    step = dbuf.jit(fn, donate_argnums=0)
    mine, eager = torch.arange(4.0), torch.arange(4.0)
    kept = []
    for _ in range(3):
        (mine, *others), (eager, *expected) = step(mine), fn(eager)
        kept.append((others, expected))
    testing.assert_bitwise(mine, eager)
    for others, expected in kept:
        testing.assert_bitwise(others, expected)


def _reduced_in_place() -> dict[str, Any]:
    mesh = dbuf.init_mesh(("dp",))
    out: dict[str, Any] = {}
    whole = dbuf.shard({"w": torch.arange(4.0) - 1}, mesh, dbuf.Replicate())

    def turned(buf: dbuf.DBuffer) -> dbuf.DBuffer:
        return dbuf.DBuffer(dbuf.psum(buf.local, mesh).view(2, 2).t().reshape(-1), buf.spec)

    def twice(buf: dbuf.DBuffer) -> Any:
        total = tree.map(lambda x: dbuf.psum(x, mesh), buf)
        return total, total

    out["turned"] = (turned(whole).local, dbuf.jit(turned, donate_argnums=0)(tree.map(torch.clone, whole)).local)
    step, buf, logs = dbuf.jit(twice, donate_argnums=0), tree.map(torch.ones_like, whole), []
    for _ in range(3):
        buf, log = step(buf)
        logs.append(log)
    out["logs"] = [log.local[0].item() for log in logs]
    return out


@pytest.mark.slow
def test_a_sum_over_ranks_that_is_read_twice_is_not_made_in_the_donated_memory() -> None:
    for got in testing.run(_reduced_in_place, world_size=2):
        testing.assert_bitwise(*got["turned"])
        assert got["logs"] == [2.0, 4.0, 8.0]


def test_complex_numbers_keep_every_bit_when_they_are_taken_early() -> None:
    make = lambda: (torch.tensor([complex("inf+0j")]), torch.tensor([complex("1+nanj")]))  # noqa: E731
    got = dbuf.jit(_swap, donate_argnums=(0, 1))(*make())
    testing.assert_bitwise([torch.view_as_real(x) for x in got], [torch.view_as_real(x) for x in _swap(*make())])


def test_packing_one_tensor_takes_no_further_memory() -> None:
    buf = _state()[0]["a"]
    double = dbuf.jit(lambda b: dbuf.pack({"w": dbuf.unpack(b)["w"] * 2 + 1}, like=b), donate_argnums=0)
    buf = double(buf)
    assert [n for n in allocations(lambda: double(buf)) if n >= NUMEL * 4] == []


def _swap(a: Any, b: Any) -> tuple[Any, Any]:
    return b, a


def test_results_that_are_other_donated_arguments_do_not_overwrite_each_other() -> None:
    """`(b, a)` from donated `(a, b)`: each must get the other's old numbers."""
    a, b = _state(4)[0], _state(4)[2]
    old_a, old_b = a["a"].local.clone(), b["a"].local.clone()
    new_a, new_b = dbuf.jit(_swap, donate_argnums=(0, 1))(a, b)
    testing.assert_bitwise((new_a["a"].local, new_b["a"].local), (old_b, old_a))


@pytest.mark.parametrize(
    "fn",
    [
        lambda a, b: (_twice(a), a),
        lambda a, b: (_twice(a), tree.map(torch.clone, a)),
        lambda a, b: (tree.map(torch.clone, b), tree.map(torch.clone, a)),
        lambda a, b: (_twice(b), _twice(a)),
        lambda a, b: (b, tree.map(lambda x: x.view(2, -1).flatten(), a)),
    ],
    ids=["previous", "clone", "swap of clones", "computed", "view"],
)
def test_a_donated_argument_as_another_result_keeps_its_old_numbers(fn: Any) -> None:
    """`(params, previous) -> (new, params)`: Inductor drops the copy and would read `params` after the update."""
    given = _state(4)[0], _state(4)[2]
    expected = [buf.local.clone() for result in fn(*given) for buf in result.values()]
    got = [buf.local for result in dbuf.jit(fn, donate_argnums=(0, 1))(*given) for buf in result.values()]
    testing.assert_bitwise(got, expected)


@pytest.mark.parametrize(
    "further",
    [lambda a: a, lambda a: a["a"].local[1:3], lambda a: dbuf.allgather(a), lambda a: dbuf.unpack(a["a"])],
    ids=["itself", "slice", "gathered alone", "unpacked"],
)
def test_a_further_result_that_looks_at_a_donated_argument_has_its_old_numbers(further: Any) -> None:
    """Donated memory holds the new state; a result that is no state keeps what it was when it was made."""
    given = _state(4)[0]
    expected = [leaf.clone() for leaf in tree.leaves((further(given), 3.0 * given["a"].local))]
    new, *rest = dbuf.jit(lambda a: (_twice(a), further(a), 3.0 * a["a"].local), donate_argnums=0)(given)
    testing.assert_bitwise(tree.leaves(rest), expected)
    assert _pointers(new) == _pointers(given)


def test_the_order_of_keys_is_part_of_what_a_program_is_for() -> None:
    """A state from elsewhere with other keys first would be written layer by layer into the wrong memory."""

    def step(p: Any, x: torch.Tensor) -> Any:
        return {k: tree.map(lambda v: v + x.mean(), p[k]) for k in ("a", "b")}

    jitted = dbuf.jit(step, donate_argnums=0)
    jitted({"a": _one(3), "b": _one(3)}, torch.ones(3))
    for rows in (3, 4):
        with pytest.raises(TreeError, match="argument 0 is donated, but result 0 does not fit"):
            jitted({"b": _one(3), "a": _one(3)}, torch.ones(rows))


def test_donated_tensors_of_another_dtype_or_shape_are_checked_again() -> None:
    step = dbuf.jit(lambda buf: tree.map(lambda x: x.float() + 1, buf), donate_argnums=0)
    step(_one(3))
    with pytest.raises(TreeError, match=r"torch\.bfloat16"):
        step(dbuf.cast(_one(3), torch.bfloat16))
    add = dbuf.jit(lambda x: x[:1] + 1, donate_argnums=0)
    add(torch.ones(1, 3))
    with pytest.raises(TreeError, match=r"\(5, 3\)"):
        add(torch.ones(5, 3))


def _twice(buf: Any) -> Any:
    return tree.map(lambda x: x * 2, buf)


@pytest.mark.parametrize(
    ("fn", "args", "donate", "error", "part"),
    [
        (lambda a, b: _twice(b), lambda: (_one(3), _one(4)), 0, TreeError, "argument 0 is donated, but result 0"),
        (lambda a: dbuf.allgather(a), lambda: (_one(3),), 0, TreeError, "argument 0 is donated"),
        (lambda a: dbuf.cast(a, torch.bfloat16), lambda: (_one(3),), 0, TreeError, "torch.bfloat16"),
        (lambda a: {"x": a}, lambda: (_one(3),), 0, TreeError, "argument 0 is donated"),
        (lambda a, b: (_twice(a),), lambda: (_one(3), _one(3)), (0, 1), TreeError, "result 1 does not fit"),
        (lambda a: (_twice(a), 1), lambda: (_one(3),), (1,), DbufError, "no such arguments"),
        (lambda a: (_twice(a), 1), lambda: (_one(3),), (-1,), DbufError, "no such arguments"),
        (lambda a: (_twice(a), 1), lambda: (_one(3),), (0, 0), DbufError, "no such arguments"),
        (lambda a, b: (_twice(a), _twice(b)), lambda: (_one(3),) * 2, (0, 1), DbufError, "share memory"),
        (lambda a, b: (_twice(a), _twice(b)), lambda: _overlapping(), (0, 1), DbufError, "share memory"),
    ],
    ids=["shape", "placement", "dtype", "tree", "missing", "number", "negative", "twice", "alias", "overlap"],
)
def test_refused_before_anything_runs(fn: Any, args: Any, donate: Any, error: Any, part: str) -> None:
    given = args()
    before = [leaf.clone() for leaf in tree.leaves(given)]
    jitted = dbuf.jit(fn, donate_argnums=donate)
    with pytest.raises(error, match=r"^dbuf.jit: ") as caught:
        jitted(*given)
    assert part in str(caught.value)
    assert jitted.compiles == 0
    testing.assert_bitwise(tree.leaves(given), before)


def _one(numel: int) -> dbuf.DBuffer:
    return dbuf.shard({"w": torch.rand(numel)}, dbuf.init_mesh(("dp",)), RowAtomic())


def _overlapping() -> tuple[dbuf.DBuffer, dbuf.DBuffer]:
    """Two buffers whose memory overlaps without starting at the same place."""
    base, buf = torch.rand(4), _one(3)
    return dbuf.DBuffer(base[:3], buf.spec), dbuf.DBuffer(base[1:], buf.spec)


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda a: (a, a[1:3]), "another argument share memory"),
        (lambda a: (a, a.view(2, 4)), "another argument share memory"),
        (lambda a: (a[0::2], a[4:8]), "another argument share memory"),
        (lambda a: (a[:1].expand(4), torch.ones(4)), "elements of a donated tensor share memory"),
        (lambda a: (torch.nn.Parameter(a), torch.ones(4)), "requires a gradient"),
        (lambda a: ((a * torch.nn.Parameter(a)), torch.ones(4)), "requires a gradient"),
    ],
    ids=["part", "view", "strided", "expanded", "parameter", "graph"],
)
@pytest.mark.parametrize("later", [False, True])
def test_memory_that_cannot_be_written_over_is_refused(make: Any, part: str, later: bool) -> None:
    """At the first call and at a later one: the program is that of arguments with memory of their own."""
    step = dbuf.jit(lambda a, b: (a * 2, b.sum()), donate_argnums=0)
    a, b = make(torch.arange(8.0))
    if later:
        step(torch.ones(a.shape), torch.ones(b.shape))
    with pytest.raises(DbufError, match=part):
        step(a, b)
    testing.assert_bitwise(a.detach().flatten()[0], torch.tensor(0.0))


def test_aliases_are_refused_at_any_call() -> None:
    jitted = dbuf.jit(lambda a, b: (_twice(a), _twice(b)), donate_argnums=(0, 1))
    a, b = jitted(_one(3), _one(3))
    with pytest.raises(DbufError, match="share memory"):
        jitted(a, a)
    jitted(a, b)


def _old_and_new() -> list[torch.Tensor]:
    """A moving average, and the weights that were there before: a gather that nothing but the result reads."""
    mesh = dbuf.init_mesh(("dp",))
    average, new = (dbuf.shard({"w": torch.full((8, 4), value)}, mesh, RowAtomic()) for value in (1.0, 2.0))

    def step(average: Any, new: Any) -> Any:
        weights = dbuf.gathered(lambda p: p["w"])(average)
        return tree.map(lambda a, b: 0.5 * a + 0.5 * b, average, new), weights

    average, weights = dbuf.jit(step, donate_argnums=0)(average, new)
    return [average.local, weights]


def test_a_gather_that_is_a_result_reads_before_the_update() -> None:
    for average, weights in testing.run(_old_and_new, world_size=2):
        assert average.unique().tolist() == [1.5] and weights.unique().tolist() == [1.0]


# The whole step.


def _linear_block(p: models.Tensors, h: torch.Tensor) -> torch.Tensor:
    return h + F.linear(torch.tanh(F.linear(h, p["up"])), p["down"])


def _whole_step(layers: int, padded: bool, overlap: bool) -> dict[str, Any]:
    mesh = dbuf.init_mesh(("dp",))
    width, hidden = 32, 64
    groups = {name: ts for name, ts in models.weights(layers, width=width, hidden=hidden).items() if "block" in name}
    if not padded:
        groups = {name: {"up": ts["up"], "down": ts["down"]} for name, ts in groups.items()}
    params = models.shard_groups(groups, mesh, RowAtomic())
    optimizer = dbuf.optim.adamw(1e-2)

    def loss_fn(params: Any, h: torch.Tensor) -> torch.Tensor:
        for group in params.values():
            h = dbuf.gathered(models.block if padded else _linear_block)(group, h)
        return h.square().mean()

    def step(params: Any, state: Any, h: torch.Tensor) -> tuple[Any, Any, torch.Tensor]:
        loss, grads = dbuf.value_and_grad(loss_fn)(params, h)
        updates, state = optimizer.update(grads, state, params)
        return dbuf.optim.apply_updates(params, updates), state, loss

    jitted = dbuf.jit(step, donate_argnums=(0, 1), overlap=overlap)
    state, h = optimizer.init(params), torch.randn(4, width)
    given = _pointers((params, state))
    (params, state, _), (code,) = run_and_get_code(jitted, params, state, h)
    full, held = params["block0"].layout.size * 4, memory_of(code)
    same_memory = _pointers((params, state)) == given
    return {
        "same memory": same_memory,
        "peak of a run": peak_of_run(lambda: jitted(params, state, h)),
        "peak": max(sum(nbytes for _, nbytes in now.values()) for now in held),
        "full": full,
        "weights alive": max(sum(kind == "all_gather" for kind, _ in now.values()) for now in held),
        "full alive": max(sum(nbytes == full for _, nbytes in now.values()) for now in held),
        "padding": params["block0"].layout.size - sum(t.numel() for t in groups["block0"].values()),
        "activations": 4 * (2 * width + hidden) * 4,  # a block's input, its tanh and its output
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("padded", "overlap"),
    [(True, True), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in [(False, True), (True, False)])],
)
def test_peak_of_a_whole_step_grows_by_activations_and_shards_alone(padded: bool, overlap: bool) -> None:
    """ISEEKYAN/Megatron-LM#158: the inputs of all reduce-scatters must not be alive at once.

    Gradients of a layout with padding are concatenated with zeros, which depend on nothing: Inductor has filled
    them in for all blocks in the first kernel of the step, with every full-size gradient allocated there.

    With overlap two gathered blocks are alive, and where the forward turns, the memory of a third, which Inductor
    keeps for the gradient that comes next. Of two reductions on their way there are, on gloo, what is sent and what is
    received.
    """
    few, many = {(False, True): (4, 6), (True, False): (2, 4), (True, True): (4, 8)}[padded, overlap]
    small, large = (testing.run(_whole_step, layers, padded, overlap, world_size=2)[0] for layers in (few, many))
    assert small["same memory"] and large["same memory"] and (small["padding"] > 0) is padded
    assert all(0 < step["peak"] == step["peak of a run"] for step in (small, large))  # the code was read right
    grown = (large["peak"] - small["peak"]) / (many - few)
    print(f"\npeak {small['peak']:,} bytes with {few} blocks, {large['peak']:,} with {many}: {grown:,.0f} a block more")
    print(f"a block's full weights are {small['full']:,} bytes: {small['full alive']}, {large['full alive']} alive")
    assert grown <= small["full"] / 2 + small["activations"] + 512
    assert large["full alive"] == small["full alive"] <= (6 if overlap else 3)
    assert large["weights alive"] == small["weights alive"] <= (3 if overlap else 2)


def test_tensors_that_require_a_gradient_are_refused() -> None:
    """A module's parameters: each step would hang its own graph onto the last one's."""
    weights = {"w": torch.nn.Parameter(torch.ones(3, 2))}
    buf = dbuf.shard(weights, dbuf.init_mesh(("dp",)), dbuf.RowAtomic())
    step = dbuf.jit(_twice, donate_argnums=0)
    with pytest.raises(DbufError, match=r"torch\.Tensor\.detach"):
        step(buf)
    assert step(tree.map(torch.Tensor.detach, buf)).local[0] == 2.0
