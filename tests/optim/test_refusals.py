"""What optimizers refuse, and numbers that were wrong in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cheap_kernels  # noqa: F401
import dbuf
from dbuf import RowAtomic, optim, testing
from dbuf.optim.quantized import _runs, is_second_moment


def shard(tensors: Any) -> dbuf.DBuffer:
    return dbuf.shard(tensors, dbuf.init_mesh(), RowAtomic())


PAIR = {key: shard({"w": torch.ones(2, 2)}) for key in "ab"}


@pytest.mark.parametrize(
    "schedule, first",
    [(optim.warmup_stable_decay(1.0, 2, 10, 0), 0.5), (optim.warmup_cosine(1.0, 5, 5), 0.2)],
)
def test_a_phase_of_no_steps_does_not_begin_early(schedule: optim.Schedule, first: float) -> None:
    assert schedule(torch.tensor(0)).item() == pytest.approx(first)


@pytest.mark.parametrize("grads", [{"b": PAIR["b"], "a": PAIR["a"]}, list(PAIR.values()), {**PAIR, "b": None}])
def test_trees_of_other_order_or_containers_are_refused(grads: Any) -> None:
    tx = optim.adamw(0.1, weight_decay=0.5)
    with pytest.raises(dbuf.TreeError, match=r"different structure.*\n  got:  grads: \S"):
        tx.update(grads, tx.init(PAIR), PAIR)


@pytest.mark.parametrize(
    "update",
    [
        lambda g, s: (g, {"columns": s["columns"], "rows": s["rows"]}),
        lambda g, s: (g, {"zzz": s["rows"], "columns": s["columns"]}),
        lambda g, s: (g.mT, s),
        lambda g, s: g,
    ],
)
def test_an_update_that_does_not_fit_is_refused_by_init(update: Callable[..., Any]) -> None:
    tx = optim.by_owner(lambda w: {"rows": w[:, 0], "columns": w[0]}, update)
    with pytest.raises(dbuf.TreeError, match="update does not fit"):
        tx.init(shard({"w": torch.ones(4, 6)}))


def test_state_of_another_selection_or_layout_is_refused() -> None:
    made, used = (
        optim.by_owner(torch.zeros_like, lambda g, s: (g, s), select=lambda path, shape, k=k: k in path)
        for k in ("['a']", "['b']")
    )
    with pytest.raises(dbuf.PlacementError, match="not with the owners"):
        used.update(PAIR, made.init(PAIR), PAIR)
    decay = optim.add_decayed_weights(0.1, optim.is_matrix)
    first, second = (
        shard({"w": torch.ones(4, 2), "b": torch.ones(8)}),
        shard({"b": torch.ones(8), "w": torch.ones(4, 2)}),
    )
    with pytest.raises(dbuf.PlacementError, match="mask in the state"):
        decay.update(second, decay.init(first), second)


def test_only_zero_rounds_to_zero_in_a_second_moment() -> None:
    tx = optim.quantized(optim.scale_by_adam(), select=lambda path, shape: True)
    buf = shard({"w": torch.tensor([[1.0, 1e-6, 0.0]])})
    codes = tx.update(buf, tx.init(buf), buf)[1]["quantized"].nu.codes.local
    assert codes.tolist() == [255, 1, 0]
    assert not is_second_moment(".mu['model.numeric']") and is_second_moment("[0].nu_max['w']")


def test_masks_and_scalars_in_quantized_state() -> None:
    buf = shard({"w": torch.ones(2, 2), "s": torch.tensor(1.0)})
    tx = optim.quantized(optim.adamw(0.1, mask=optim.is_matrix), select=lambda path, shape: True)
    tx.update(buf, tx.init(buf), buf)


def test_partition_joins_parts_of_two_dtypes() -> None:
    buf = shard({"w": torch.ones(2, 2).bfloat16(), "b": torch.ones(2).bfloat16()})
    rule = lambda path, shape: "m" if len(shape) == 2 else "a"  # noqa: E731
    tx = optim.partition({"m": optim.scale(-0.1), "a": optim.adamw(0.1)}, rule)
    assert tx.update(buf, tx.init(buf), buf)[0].dtype == torch.float32


def test_shampoo_takes_infinity_and_says_nan() -> None:
    buf = shard({"w": torch.tensor([[torch.inf, 1.0], [1.0, 1.0]])})
    tx = optim.shampoo(0.1)
    assert tx.update(buf, tx.init(buf), buf)[0].local.isnan().all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: optim.adamw(0.1, b1=1.0),
        lambda: optim.adamw(0.1, b2=-0.1),
        lambda: optim.sgd(0.1, nesterov=True),
        lambda: optim.sgd("0.1"),  # type: ignore[arg-type]
        lambda: optim.muon(0.1, steps=-1),
        lambda: optim.clip_by_global_norm(-1.0),
        lambda: optim.orthogonalize(torch.ones(3)),
        lambda: optim.orthogonalize(torch.ones(3, 3), 5, "newton"),
        lambda: optim.linear_warmup(1.0, 10.0),  # type: ignore[arg-type]
        lambda: optim.adamw(0.1, mask={"w": True}),  # type: ignore[arg-type]
        lambda: optim.chain([optim.sgd(0.1)]),  # type: ignore[arg-type]
        lambda: optim.set_learning_rate(optim.sgd(optim.constant(0.1)).init(PAIR), 0.1),
    ],
)
def test_arguments_out_of_range_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(dbuf.DbufError, match=r"(?s)dbuf\.optim\..*got:.*need:.*try:"):
        make()


def _clipped() -> list[float]:
    mesh = dbuf.init_mesh(("outer", "inner"), (2, 2))
    outer = mesh.get_coordinate()[0]
    grads = {
        "dense": dbuf.shard({"w": torch.ones(4, 2)}, mesh, (dbuf.Replicate(), RowAtomic()), dp_size=2),
        "experts": dbuf.shard({"w": torch.full((4, 2), 1.0 + 10 * outer)}, mesh["inner"], RowAtomic()),
    }
    clip = optim.clip_by_global_norm(1.0)
    return clip.update(grads, clip.init(grads), grads)[0]["dense"].local.tolist()


def test_ranks_clip_alike_where_buffers_live_on_slices() -> None:
    first, *rest = testing.run(_clipped, world_size=4)
    assert all(found == first for found in rest)


def test_neighbours_with_rows_of_one_length_are_one_matrix() -> None:
    assert len(_runs(shard({f"w{i}": torch.ones(2, 64) for i in range(8)}))) == 1
    assert len(_runs(shard({"w": torch.ones(2, 64), "v": torch.ones(2, 32)}))) == 2


def test_matrices_of_two_dtypes_are_not_one_batch() -> None:
    mixed = {"a": PAIR["a"], "b": shard({"w": torch.full((2, 2), 0.1, dtype=torch.float64)})}
    tx = optim.by_owner(lambda w: (), lambda g, s: (g / 3, s))
    updates = tx.update(mixed, tx.init(mixed), mixed)[0]
    testing.assert_bitwise(updates["a"].local, PAIR["a"].local / 3)


def test_the_start_of_adam_is_corrected_in_the_dtype_of_the_state() -> None:
    buf, tx = shard({"w": torch.ones(2, dtype=torch.float64)}), optim.scale_by_adam(eps=0.0)
    direction, _ = tx.update(buf, tx.init(buf), buf)
    assert (direction.local - 1).abs().max() < 1e-12
