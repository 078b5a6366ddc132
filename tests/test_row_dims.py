"""Layouts that count rows over several leading dimensions: cuts inside an expert, and everything that moves there."""

from __future__ import annotations

import dataclasses
import functools
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import cheap_kernels
import dbuf
import reference
from dbuf import BlockAtomic, GlobalLayout, Partial, Replicate, RowAtomic, ShardLayout, TensorAtomic, optim, testing
from dbuf.creation import _run_of
from dbuf.layout import num_row_dims
from dbuf.spec import BufferSpec
from dbuf.tree import Structure

R, S = Replicate(), RowAtomic()

# Experts that no number of ranks divides, a matrix, deeper and flatter tensors, a scalar and an empty stack.
SHAPES = {"up": (3, 10, 4), "mix": (4, 4), "nest": [(2, 2, 2, 4), (8, 2)], "norm": (6,), "scale": (), "none": (0, 2, 3)}
LAYOUTS = ("padded", "unpadded", "compact", "deeper", "block")


def make(name: str, seed: int) -> Any:
    """Multiples of 12, so that sums and averages over up to 4 ranks are exact. No scalar where blocks have two rows."""
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        return 12.0 * torch.randint(-3, 4, shape, generator=generator)

    shapes = SHAPES | {"scale": (2,)} if name == "block" else SHAPES
    return pytree.tree_map(draw, shapes, is_leaf=lambda x: isinstance(x, tuple))


def shapes_of(tree: Any) -> list[tuple[int, ...]]:
    return [tuple(x.shape) for x in pytree.tree_leaves(tree)]


def plan(name: str, ranks: int) -> GlobalLayout:
    shapes = shapes_of(make(name, 0))
    if name == "compact":
        return dbuf.plan_compact(shapes, ranks, row_dims=2, align=2).layout
    if name == "block":
        return dbuf.plan_row_atomic(shapes, ranks, block_size=2, row_dims=2, align=4)
    padding = ShardLayout.UNPADDED if name == "unpadded" else ShardLayout.PADDED
    return dbuf.plan_row_atomic(shapes, ranks, shard_layout=padding, row_dims=3 if name == "deeper" else 2)


def kind_of(name: str) -> Any:
    return BlockAtomic(2) if name == "block" else S


# --- integers -----------------------------------------------------------------------------------------------


def test_a_layout_without_row_dims_is_what_it_was() -> None:
    layout = GlobalLayout(((4, 2),), (0,), 8, (0, 4))
    assert layout == GlobalLayout(((4, 2),), (0,), 8, (0, 4), 1, 1)
    assert (
        repr(layout)
        == "GlobalLayout(tensor_shapes=((4, 2),), tensor_to_offset=(0,), size=8, rank_to_offset=(0, 4), align=1)"
    )
    assert layout.__reduce__()[1] == (((4, 2),), (0,), 8, (0, 4), 1)
    deep = GlobalLayout(((4, 2),), (0,), 8, (0, 4), row_dims=2)
    assert deep != layout and hash(deep) != hash(layout)
    assert eval(repr(deep)) == deep == pickle.loads(pickle.dumps(deep))
    with pytest.raises(dbuf.LayoutError, match="row_dims is not a positive int"):
        GlobalLayout((), (), 0, (0,), 1, 0).validate()


def test_rows_are_counted_over_leading_dimensions_but_never_over_the_last() -> None:
    shapes = ((2, 3, 4, 5), (3, 4, 5), (4, 5), (5,), ())
    assert [[num_row_dims(shape, n) for shape in shapes] for n in (1, 2, 3, 9)] == [
        [1, 1, 1, 1, 1],
        [2, 2, 1, 1, 1],
        [3, 2, 1, 1, 1],
        [3, 2, 1, 1, 1],
    ]
    layout = GlobalLayout(shapes, (0, 120, 180, 200, 205), 206, (0,), row_dims=2)
    assert [layout.row_size(t) for t in range(5)] == [20, 5, 5, 1, 1]


@pytest.mark.parametrize(
    ("cut", "fits"),
    [(4, {1}), (8, {1, 2}), (12, {1, 3}), (16, {1, 2, 4}), (20, {1, 2, 3, 4, 5}), (28, {1, 2}), (22, set())],
)
def test_a_block_begins_anew_in_every_expert(cut: int, fits: set[int]) -> None:
    """Experts of 5 rows of 4: a cut at 28 lies 2 rows into the second, and 7 rows into the tensor."""
    layout = GlobalLayout(((2, 5, 4),), (0,), 40, (0, cut), row_dims=2)
    assert {n for n in range(1, 6) if layout.admits(BlockAtomic(n))} == fits
    assert layout.admits(S) == bool(fits)
    assert not layout.admits(TensorAtomic())
    assert not GlobalLayout(((2, 5, 4),), (0,), 40, (0, cut)).admits(S) or cut == 20


def test_block_size_divides_the_dimension_that_rows_are_counted_in_last() -> None:
    shapes = [(3, 4, 5), (8, 2), (4,)]
    layout = dbuf.plan_row_atomic(shapes, 3, block_size=4, row_dims=2)
    assert layout.row_dims == 2 and layout.admits(BlockAtomic(4))
    assert dbuf.plan_row_atomic(shapes, 3, block_size=4, row_dims=9).rank_to_offset == layout.rank_to_offset
    with pytest.raises(dbuf.LayoutError, match=r"tensor 0 of shape \(3, 4, 5\)\n *need: shape\[0\] a multiple of 4"):
        dbuf.plan_row_atomic(shapes, 3, block_size=4)
    with pytest.raises(dbuf.LayoutError, match=r"tensor 0 of shape \(4, 6, 5\)\n *need: shape\[1\] a multiple of 4"):
        dbuf.plan_row_atomic([(4, 6, 5)], 3, block_size=4, row_dims=2)
    with pytest.raises(dbuf.LayoutError, match="row_dims is not a positive int"):
        dbuf.plan_row_atomic(shapes, 3, row_dims=0)


def test_recorded_layouts_do_not_change_with_row_dims_where_no_tensor_has_three_dimensions() -> None:
    shapes = [(6, 4), (9,), (), (2, 8)]
    flat, deep = (dbuf.plan_row_atomic(shapes, 4, row_dims=n) for n in (1, 2))
    assert (flat.tensor_to_offset, flat.rank_to_offset) == (deep.tensor_to_offset, deep.rank_to_offset)


def test_whole_tensors_keep_their_shape_where_nothing_is_cut_inside() -> None:
    """A view of rows where axes are sharded, on one rank too; the full shape on replicated and owned buffers."""
    mesh, tree = dbuf.init_mesh(), {"w": torch.arange(24.0).view(2, 3, 4)}
    layout = dbuf.plan_row_atomic([(2, 3, 4)], 1, row_dims=2)
    seen = {p: dbuf.unpack(dbuf.shard(tree, mesh, p, layout=layout))["w"].shape for p in (S, R, TensorAtomic())}
    assert seen == {S: (6, 4), R: (2, 3, 4), TensorAtomic(): (2, 3, 4)}


def test_moves_without_a_layout_keep_row_dims() -> None:
    mesh = dbuf.init_mesh()
    buf = dbuf.shard(make("padded", 0), mesh, S, layout=plan("padded", 1))
    moved = dbuf.redistribute(buf, S, layout=ShardLayout.UNPADDED)
    assert moved.layout.row_dims == dbuf.select(buf, ["['up']"]).layout.row_dims == 2


def test_a_cut_of_a_strided_tensor_copies_the_matrices_that_it_meets_alone() -> None:
    x = torch.arange(24.0).view(4, 3, 2)
    for leaf in (x, x.mT.contiguous().mT):
        for start in range(0, 24, 2):
            for numel in range(0, 25 - start, 2):
                assert torch.equal(_run_of(leaf, start, numel), x.reshape(-1)[start : start + numel])


# --- on ranks -----------------------------------------------------------------------------------------------


def targets(name: str, ranks: int) -> dict[str, tuple[Any, GlobalLayout | None]]:
    """Where a sharded buffer goes: in its layout, and to others with the same, fewer and more row dims."""
    shapes = shapes_of(make(name, 0))
    owners = [k % ranks for k in range(len(shapes))]
    return {
        "replicated": (R, None),
        "partial": (Partial("sum"), None),
        "unpadded": (S, dbuf.plan_row_atomic(shapes, ranks, shard_layout=ShardLayout.UNPADDED, row_dims=2)),
        "deeper": (S, dbuf.plan_row_atomic(shapes, ranks, row_dims=3)),
        "dim 0": (S, dbuf.plan_row_atomic(shapes, ranks)),
        "owners": (TensorAtomic(), dbuf.plan_tensor_atomic(shapes, ranks, tensor_owners=owners)),
    }


def loss(tree: Any, batch: torch.Tensor) -> torch.Tensor:
    assert tree["up"].shape == (3, 10, 4) and tree["nest"][0].shape == (2, 2, 2, 4)
    rows = (tree["up"] * batch[:4]).sum(-1) + tree["scale"].sum()
    return (
        (rows * rows).sum()
        + (tree["mix"] * batch[:4]).sum()
        + tree["nest"][0].sum() * batch[0]
        + (tree["norm"] * batch).sum()
    )


def batch_of(rank: int) -> torch.Tensor:
    return torch.arange(6.0) - 2 + rank


def travel(name: str, how: Callable[[Any], Any] = lambda f: f) -> dict[str, Any]:
    mesh = dbuf.init_mesh(("dp",))
    ranks, rank = mesh.size(), mesh.get_rank()
    layout, kind = plan(name, ranks), kind_of(name)
    buf = dbuf.shard(make(name, 0), mesh, kind, layout=layout)
    contributions = dbuf.shard(make(name, rank), mesh, Partial("sum"), layout=layout)
    ways, batch = targets(name, ranks), batch_of(rank)

    def go(buf: Any, contributions: Any, rows: Any) -> dict[str, Any]:
        moved = {to: dbuf.redistribute(buf, p, layout=at) for to, (p, at) in ways.items()}
        part = dbuf.select(buf, lambda path: "nest" in path or "up" in path)
        losses, grads = dbuf.value_and_grad(dbuf.gathered(loss))(buf, batch)
        return {
            "moved": moved,
            "back": [dbuf.redistribute(x, kind, layout=layout) for x in moved.values()],
            "reduced": dbuf.reduce_scatter(contributions, kind),
            "rows": dbuf.unpack(buf),
            "packed": dbuf.pack(rows, buf),
            "part": part,
            "merged": dbuf.merge(buf, dbuf.DBuffer(-part.local, part.spec)),
            "grads": grads,
            "loss": losses,
            "norms": dbuf.norms(buf),
        }

    found = how(go)(buf, contributions, dbuf.unpack(buf))
    return pytree.tree_map(
        lambda x: x.local if isinstance(x, dbuf.DBuffer) else x, found, is_leaf=lambda x: isinstance(x, dbuf.DBuffer)
    )


def compiled(name: str) -> dict[str, Any]:
    with cheap_kernels.graphs_alone():
        return travel(name, dbuf.jit)


def expect(name: str, ranks: int) -> list[dict[str, Any]]:
    layout, kind = plan(name, ranks), (kind_of(name),)
    buf = reference.shard(make(name, 0), (ranks,), kind, layout)
    contributions = reference.shard([make(name, k) for k in range(ranks)], (ranks,), (Partial("sum"),), layout)
    moved = {to: reference.redistribute(buf, (p,), at) for to, (p, at) in targets(name, ranks).items()}
    keep = [path in ("up", "nest") for path in ("up", "mix", "nest", "nest", "norm", "scale", "none")]
    part = reference.select(buf, keep)
    negated = reference.Buffer(part.mesh_shape, part.placements, part.layout, part.tree, tuple(-x for x in part.locals))
    losses, grads = reference.value_and_grad(loss, buf, [batch_of(k) for k in range(ranks)], "mean")
    return [
        {
            "moved": {to: x.locals[k] for to, x in moved.items()},
            "back": [buf.locals[k]] * len(moved),
            "reduced": reference.reduce_scatter(contributions, kind).locals[k],
            "rows": reference.unpack(buf)[k],
            "packed": buf.locals[k],
            "part": part.locals[k],
            "merged": reference.merge(buf, keep, negated).locals[k],
            "grads": grads.locals[k],
            "loss": losses[k],
            "norms": reference.norms(buf),
        }
        for k in range(ranks)
    ]


def check(found: list[dict[str, Any]], name: str, ranks: int) -> None:
    for of_rank, expected in zip(found, expect(name, ranks), strict=True):
        for key, value in expected.items():
            close = key in ("grads", "loss", "norms")
            (testing.assert_close if close else testing.assert_bitwise)(of_rank[key], value)
        assert set(of_rank["moved"]) == set(targets(name, ranks))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", LAYOUTS)
def test_movement_and_gradients_are_the_oracles(name: str, ranks: int) -> None:
    check(testing.run(travel, name, world_size=ranks), name, ranks)
    shapes = [x.shape for x in pytree.tree_leaves(expect(name, ranks)[-1]["rows"])]
    assert len(shapes[0]) == 2 and shapes[0][1] == 4
    assert ranks == 1 or not dataclasses.replace(plan(name, ranks), row_dims=1).admits(S)  # cuts inside an expert


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks"), [("padded", 1), ("unpadded", 2), ("compact", 2), ("block", 3), ("unpadded", 4)]
)
def test_compiled_movement_and_gradients_are_the_oracles(name: str, ranks: int) -> None:
    check(testing.run(compiled, name, world_size=ranks), name, ranks)


def on_two_axes() -> dict[str, Any]:
    mesh = dbuf.init_mesh(("outer", "inner"), (2, 2))
    buf = dbuf.shard(make("compact", 0), mesh, (S, S), layout=plan("compact", 4))
    inner = dbuf.redistribute(buf, (R, S))
    return {
        "rows": dbuf.unpack(buf),
        "inner rows": dbuf.unpack(inner),
        "whole": dbuf.unpack(dbuf.allgather(inner)),
        "uneven": dbuf.redistribute(inner, (S, S), layout=plan("unpadded", 4)).local,
    }


def test_two_axes() -> None:
    buf = reference.shard(make("compact", 0), (2, 2), (S, S), plan("compact", 4))
    inner = reference.redistribute(buf, (R, S))
    uneven = reference.redistribute(buf, (S, S), plan("unpadded", 4))
    for rank, found in enumerate(testing.run(on_two_axes, world_size=4)):
        expected = {"rows": reference.unpack(buf)[rank], "inner rows": reference.unpack(inner)[rank]}
        expected |= {"whole": make("compact", 0), "uneven": uneven.locals[rank]}
        testing.assert_bitwise(found, expected)


def disagree() -> None:
    mesh = dbuf.init_mesh(("dp",))
    layout = dbuf.plan_row_atomic([(2, 2, 2)], 2, row_dims=1 + mesh.get_rank())
    dbuf.check(dbuf.shard({"w": torch.ones(2, 2, 2)}, mesh, S, layout=layout))


def test_ranks_that_count_rows_otherwise_are_told() -> None:
    with pytest.raises(Exception, match=r"row_dims 1\n.*row_dims 2"):
        testing.run(disagree, world_size=2)


# --- optimizers ---------------------------------------------------------------------------------------------


def real(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"experts": (3, 10, 512), "w": (12, 8), "norm": (8,), "bias": (3, 10)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optim.adamw(0.01, weight_decay=0.1, mask=lambda path, shape: len(shape) > 1),
    "adamw8bit": lambda: optim.adamw8bit(0.01, block=128),
    "muon": lambda: optim.partition(
        {"muon": optim.muon(0.02), "rest": optim.adamw(0.01)},
        lambda path, shape: "muon" if len(shape) == 2 and "bias" not in path else "rest",
    ),
}


def train(optimizer: str, padding: str, how: Callable[[Any], Any] = lambda f: f) -> Any:
    mesh = dbuf.init_mesh(("dp",))
    shapes = [tuple(x.shape) for x in real(0).values()]
    layout = dbuf.plan_row_atomic(shapes, mesh.size(), shard_layout=ShardLayout(padding), row_dims=2)
    tx = OPTIMIZERS[optimizer]()
    shard = functools.partial(dbuf.shard, mesh=mesh, placements=S, layout=layout)

    @how
    def step(params: Any, grads: Any, state: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    params = shard(real(0))
    state = tx.init(params)
    for seed in range(1, 4):
        params, state = step(params, shard(real(seed)), state)
    return dbuf.unpack(dbuf.allgather(params))


def train_compiled(optimizer: str) -> Any:
    with cheap_kernels.graphs_alone():
        return train(optimizer, "padded", dbuf.jit)


@functools.cache
def alone(optimizer: str) -> Any:
    (found,) = testing.run(train, optimizer, "padded", world_size=1)
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("padding", ShardLayout)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_do_what_one_process_does(optimizer: str, padding: str, ranks: int) -> None:
    for found in testing.run(train, optimizer, str(padding), world_size=ranks):
        testing.assert_bitwise(found, alone(optimizer))


def test_adamw_is_torchs() -> None:
    params = list(real(0).values())
    groups = [{"params": [x for x in params if x.ndim > 1]}, {"params": [x for x in params if x.ndim < 2]}]
    groups[1]["weight_decay"] = 0.0  # type: ignore[assignment]
    theirs = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    for seed in range(1, 4):
        for param, grad in zip(params, real(seed).values(), strict=True):
            param.grad = grad
        theirs.step()
    torch.testing.assert_close(list(alone("adamw").values()), params, rtol=2e-6, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_compiled_adamw_does_what_one_process_does(ranks: int) -> None:
    for found in testing.run(train_compiled, "adamw", world_size=ranks):
        testing.assert_close(found, alone("adamw"))


def test_scales_lie_with_the_rows_of_their_blocks() -> None:
    layout = dbuf.plan_row_atomic([(3, 5, 8)], 2, shard_layout=ShardLayout.UNPADDED, row_dims=2)
    mesh = dbuf.init_mesh()
    spec = BufferSpec(mesh, (S,), layout, Structure.of({"w": 0}, "test")[0])
    scales = spec.of_scales(4).layout
    assert scales.tensor_shapes == ((15, 2),)
    assert [cut / 2 for cut in scales.rank_to_offset] == [cut / 8 for cut in layout.rank_to_offset] == [0, 7]
    assert math.prod(scales.tensor_shapes[0]) == scales.size
