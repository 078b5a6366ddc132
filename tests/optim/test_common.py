"""What every optimizer holds: the numbers of one process, whatever the ranks, the mesh, the layout and the compiler."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch

import cheap_kernels
import dbuf
from dbuf import BlockAtomic, Replicate, RowAtomic, ShardLayout, TensorAtomic, plan_tensor_atomic, testing
from dbuf.optim import adamw, set_learning_rate
from optim.optimizers import CASES, MATRICES, make_step, rate_at, reference, tensors, train, whole

STEPS = 20
COMPILED = (
    "nesterov",
    "amsgrad",
    "masked",
    "lion",
    "partition",
    "shampoo",
    "by_owner",
)  # the others are parts of these
LAYOUTS = ("padded", "unpadded", "block", "tensor")


def shard(mesh: Any, layout: str, groups: Any, replicated: int = 0) -> Any:
    """Buffers of all groups, the outer axes replicated."""
    count = mesh.ndim - replicated
    ranks = 1
    for axis in range(replicated, mesh.ndim):
        ranks *= mesh.size(axis)

    def placed(name: str) -> Any:
        kinds = {"block": RowAtomic() if name == "odd" else BlockAtomic(2), "tensor": TensorAtomic()}
        return (Replicate(),) * replicated + (kinds.get(layout, RowAtomic()),) * count

    def planned(tree: dict[str, torch.Tensor]) -> Any:
        if layout != "tensor":
            return ShardLayout.UNPADDED if layout == "unpadded" else ShardLayout.PADDED
        shapes = [tuple(x.shape) for x in tree.values()]
        return plan_tensor_atomic(shapes, ranks, tensor_owners=[k % ranks for k in range(len(shapes))])

    return {
        name: dbuf.shard(tree, mesh, placed(name), layout=planned(tree), dp_size=ranks) for name, tree in groups.items()
    }


def results(mesh_shape: tuple[int, ...], replicated: int = 0) -> dict[str, Any]:
    """On a rank: the parameters after some steps, for each optimizer and layout."""
    names = ("dp",) if len(mesh_shape) == 1 else ("outer", "inner")
    mesh = dbuf.init_mesh(names, mesh_shape)
    out = {}
    for name in CASES:
        for layout in LAYOUTS:
            params, _ = train(name, 4, functools.partial(shard, mesh, layout, replicated=replicated), make_step(name))
            out[f"{name}, {layout}"] = whole(params)
    return out


@functools.cache
def alone() -> dict[str, Any]:
    return results((1,))


@pytest.mark.parametrize("name", CASES)
def test_twenty_steps_are_those_of_one_dense_process(name: str) -> None:
    mesh = dbuf.init_mesh()
    params, _ = train(name, STEPS, functools.partial(shard, mesh, "padded"), make_step(name))
    testing.assert_close(whole(params), reference(name, STEPS), rtol=2e-5)


@pytest.mark.parametrize(
    "mesh_shape, replicated",
    [
        ((2,), 0),
        ((3,), 0),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [((4,), 0), ((2, 2), 0), ((2, 2), 1)]),
    ],
    ids=str,
)
def test_result_does_not_depend_on_ranks_mesh_or_layout(mesh_shape: tuple[int, ...], replicated: int) -> None:
    world_size = 4 if len(mesh_shape) == 2 else mesh_shape[0]
    for found in testing.run(results, mesh_shape, replicated, world_size=world_size, timeout_s=300):
        for key, params in found.items():
            name = key.split(",")[0]
            if CASES[name].elementwise:
                testing.assert_bitwise(params, alone()[f"{name}, padded"])
            else:
                testing.assert_close(params, alone()[f"{name}, padded"], rtol=1e-6)


def compiled_and_eager() -> Any:
    """All kinds of optimizers in one program, twenty steps with a schedule; with kernels element-wise ones alone."""
    mesh = dbuf.init_mesh(("dp",))
    make = functools.partial(shard, mesh, "unpadded")
    steps = {name: make_step(name) for name in COMPILED if mesh.size() > 1 or CASES[name].elementwise}
    params = {name: make(tensors(CASES[name].shapes, 0)) for name in steps}
    states = {name: CASES[name].make(rate_at).init(params[name]) for name in steps}

    def all_steps(params: Any, states: Any, grads: Any) -> Any:
        done = {name: steps[name](params[name], states[name], grads[name]) for name in steps}
        return {name: pair[0] for name, pair in done.items()}, {name: pair[1] for name, pair in done.items()}

    step = dbuf.jit(all_steps, donate_argnums=(0, 1))
    with contextlib.nullcontext() if mesh.size() == 1 else cheap_kernels.graphs_alone():
        for i in range(STEPS):
            params, states = step(params, states, {name: make(tensors(CASES[name].shapes, 100 + i)) for name in steps})
    eager = {name: whole(train(name, STEPS, make, steps[name])[0]) for name in steps}
    return {name: whole(params[name]) for name in steps}, eager, step.compiles


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_twenty_scheduled_steps_compile_once_and_equal_eager(world_size: int) -> None:
    for compiled, eager, compiles in testing.run(compiled_and_eager, world_size=world_size, timeout_s=600):
        testing.assert_close(compiled, eager)
        assert compiles == 1


def state_bytes() -> dict[str, int]:
    """Bytes of this rank's optimizer state of a buffer whose rows and matrices divide by two."""
    mesh = dbuf.init_mesh()
    out = {}
    for name, case in CASES.items():
        params = {
            "w": dbuf.shard({key: torch.ones(8, 4 - 2 * (k % 2)) for k, key in enumerate("abcd")}, mesh, RowAtomic())
        }
        leaves = dbuf.tree.leaves(case.make(0.1).init(params))
        out[name] = sum(leaf.nbytes for leaf in leaves if leaf is not None and leaf.ndim)
    return out


def test_state_is_shared_out_and_nobody_has_it_twice() -> None:
    (whole_state,) = testing.run(state_bytes, world_size=1)
    assert whole_state["adamw"] == 2 * 4 * 8 * 12 and whole_state["by_owner"] == 4 * (4 * 8 + 12)
    for of_rank in testing.run(state_bytes, world_size=2):
        assert of_rank == {name: nbytes // 2 for name, nbytes in whole_state.items()}


@pytest.mark.parametrize("name", CASES)
def test_a_gradient_that_is_partial_or_cut_otherwise_is_refused(name: str) -> None:
    mesh, shapes = dbuf.init_mesh(), CASES[name].shapes
    params, grads = shard(mesh, "padded", tensors(shapes, 0)), shard(mesh, "padded", tensors(shapes, 1))
    optimizer = CASES[name].make(0.1)
    state = optimizer.init(params)
    for wrong in (
        dbuf.redistribute(dbuf.allgather(grads), dbuf.Partial("sum")),
        shard(mesh, "tensor", tensors(shapes, 1)),
    ):
        with pytest.raises(dbuf.PlacementError, match=r"dbuf\.optim\.\w+: .*\n.*grads\['first'\] has"):
            optimizer.update(wrong, state, params)


def test_the_learning_rate_changes_without_a_compile() -> None:
    mesh = dbuf.init_mesh()
    params, grads = shard(mesh, "padded", tensors(MATRICES, 0)), shard(mesh, "padded", tensors(MATRICES, 1))
    optimizer = adamw(0.5)
    update = dbuf.jit(optimizer.update)
    first, _ = update(grads, optimizer.init(params), params)
    second, _ = update(grads, set_learning_rate(optimizer.init(params), 0.25), params)
    testing.assert_close(second["last"].local * 2, first["last"].local)
    assert update.compiles == 1
