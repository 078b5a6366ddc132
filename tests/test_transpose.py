"""The transpose law on real ranks: `<A x, y> == <x, A* y>` summed over ranks, for values that differ on every rank.

`A` is a public movement, `A*` what differentiation makes of it, found in three ways: `torch.func.vjp`, `.backward()`
and `dbuf.grad`. Values are whole numbers in fp64, so sums are exact; an average over 3 ranks has a tolerance.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dbuf
from dbuf import BlockAtomic, DBuffer, GlobalLayout, Partial, Replicate, RowAtomic, ShardLayout, TensorAtomic
from dbuf.errors import DbufError
from dbuf.placement import Placements, dual_placements, num_sharded
from dbuf.testing import run

R, SUM, AVG = Replicate(), Partial("sum"), Partial("avg")
SHAPES = ((6, 2), (), (0, 3), (4,), (2, 1, 3))
OWNERS = (0, 0, 0, -1, 0)  # of 3 or 4 ranks, some own nothing
NAMED = (dbuf.allgather, dbuf.reduce_scatter, dbuf.allreduce, dbuf.view)

Case = tuple[Placements, GlobalLayout, Placements, GlobalLayout]


def layouts(dp_size: int) -> list[tuple[Any, GlobalLayout]]:
    blocks = ((6, 2), (0, 3), (4,), (2, 1, 3))
    assert all(shape[0] % 2 == 0 for shape in blocks)
    owners = [owner % dp_size for owner in OWNERS]
    return [
        (RowAtomic(), dbuf.plan_row_atomic(SHAPES, dp_size, shard_layout=ShardLayout.UNPADDED)),
        (RowAtomic(), dbuf.plan_row_atomic(SHAPES, dp_size, align=4)),
        (TensorAtomic(), dbuf.plan_tensor_atomic(SHAPES, dp_size, tensor_owners=owners)),
        (BlockAtomic(1), dbuf.plan_row_atomic(SHAPES, dp_size, block_size=1)),
    ]


def placements(ndim: int, shard: Any, wholes: tuple[Any, ...]) -> Iterator[Placements]:
    for count in range(ndim + 1):
        for prefix in itertools.product(wholes, repeat=ndim - count):
            yield (*prefix, *([shard] * count))


def is_legal(source: Placements, target: Placements, layout: GlobalLayout, mesh: tuple[int, ...]) -> bool:
    changes = zip(source, target, strict=True)
    if any(isinstance(a, Partial) and isinstance(b, Partial) and a != b for a, b in changes):
        return False
    return layout.dp_size % math.prod(mesh[len(mesh) - num_sharded(target) :]) == 0


def cases_within_a_layout(mesh: tuple[int, ...]) -> list[Case]:
    out: list[Case] = []
    several = layouts(math.prod(mesh))
    for i, (kind, layout) in enumerate(several if len(mesh) == 1 else [several[0], several[2]]):
        wholes = (R, SUM, AVG) if i == 0 else (R, SUM)
        for a, b in itertools.product(placements(len(mesh), kind, wholes), repeat=2):
            if is_legal(a, b, layout, mesh):
                out.append((a, layout, b, layout))
    return out


def cases_between_layouts(mesh: tuple[int, ...]) -> list[Case]:
    """Every kind of layout to every other, and to others of fewer and of more segments."""
    out: list[Case] = []
    sources = layouts(math.prod(mesh))
    targets = [*sources[:3], layouts(mesh[-1])[0], layouts(2 * math.prod(mesh))[1]]
    for (kind, layout), (new_kind, new_layout) in itertools.product([sources[0], sources[2]], targets):
        for a, b in itertools.product(placements(len(mesh), kind, (R, SUM)), placements(len(mesh), new_kind, (R,))):
            if layout != new_layout and is_legal(a, b, new_layout, mesh):
                out.append((a, layout, b, new_layout))
    return out


def start(mesh_shape: tuple[int, ...]) -> Any:
    return dbuf.init_mesh(("outer", "inner")[-len(mesh_shape) :], mesh_shape)


def buffer_at(mesh: Any, at: Placements, layout: GlobalLayout) -> DBuffer:
    """A buffer of random whole numbers in all of its local tensor, gaps and padding included, other on each rank."""
    zeros = {str(i): torch.zeros(shape, dtype=torch.float64) for i, shape in enumerate(SHAPES)}
    buf = dbuf.shard(zeros, mesh, at, layout=layout)
    return DBuffer(torch.randint(-8, 9, buf.local.shape).double(), buf.spec)


def three_pullbacks(fn: Callable[[DBuffer], DBuffer], buf: DBuffer, y: torch.Tensor) -> list[torch.Tensor]:
    out, pull = torch.func.vjp(fn, buf)
    (by_vjp,) = pull(DBuffer(y, out.spec))
    leaf = DBuffer(buf.local.clone().requires_grad_(), buf.spec)
    moved = fn(leaf)
    moved.local.backward(y)
    by_dbuf = dbuf.grad(lambda b: (fn(b).local * y).sum(), reduction="sum")(buf)
    assert by_dbuf.spec == buf.spec.dual()
    assert by_dbuf.placements == dual_placements(buf.placements)
    assert type(by_dbuf.local) is type(by_vjp.local) is type(leaf.local.grad) is torch.Tensor
    return [by_vjp.local, leaf.local.grad, by_dbuf.local]


def check_all(mesh_shape: tuple[int, ...], within: bool) -> dict[str, int]:
    """Both sides of the law for every case and way, summed over ranks in one all-reduce at the end."""
    mesh = start(mesh_shape)
    torch.manual_seed(dist.get_rank())
    lefts, rights, labels = [], [], []
    used: dict[str, int] = {}
    for a, layout, b, new_layout in (cases_within_a_layout if within else cases_between_layouts)(mesh_shape):
        x = buffer_at(mesh, a, layout)
        ways: dict[str, Callable[[DBuffer], DBuffer]] = {
            "redistribute": lambda buf, b=b, n=new_layout: dbuf.redistribute(buf, b, layout=n)
        }
        if within and a != b:
            for fn in NAMED:
                try:
                    fn(x, b)
                except DbufError:
                    continue
                ways[fn.__name__] = lambda buf, b=b, fn=fn: fn(buf, b)
        moved = dbuf.redistribute(x, b, layout=new_layout)
        y = torch.randint(-8, 9, moved.local.shape).double()
        for name, way in ways.items():
            used[name] = used.get(name, 0) + 1
            assert torch.equal(way(x).local, moved.local), f"{name} differs from redistribute: {a} -> {b}"
            for pulled in three_pullbacks(way, x, y):
                lefts.append((moved.local * y).sum())
                rights.append((x.local * pulled).sum())
                labels.append(f"{name} {a} -> {b}, {layout} -> {new_layout}")
    both = torch.stack([torch.stack(lefts), torch.stack(rights)])
    dist.all_reduce(both)
    exact = 3 not in mesh_shape
    for label, left, right in zip(labels, *both.tolist(), strict=True):
        assert left == right if exact else abs(left - right) < 1e-9, f"{label}: <Ax, y> = {left}, <x, A*y> = {right}"
    assert any(left != 0 for left in both[0].tolist())
    return used


SLOW = [(4,), (2, 2), (1, 2), (2, 1)]
MESHES = [(1,), (2,), (3,), *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in SLOW)]


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_law_every_row_within_a_layout(mesh_shape: tuple[int, ...]) -> None:
    for used in run(check_all, mesh_shape, True, world_size=math.prod(mesh_shape)):
        assert set(used) == {"redistribute", *(fn.__name__ for fn in NAMED)}


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_law_every_pair_between_layouts(mesh_shape: tuple[int, ...]) -> None:
    for used in run(check_all, mesh_shape, False, world_size=math.prod(mesh_shape)):
        assert used["redistribute"] >= 20


# --- compiled: one program for a covering subset ----------------------------------------------------------


def covering(mesh_shape: tuple[int, ...]) -> list[Case]:
    """Every row of the table, both averages, every kind of layout change, two sharded axes where there are two."""
    (row, uneven), (_, equal), (atomic, owned), _ = layouts(math.prod(mesh_shape))
    if len(mesh_shape) == 1:
        pairs: list[Case] = [((p,), uneven, (q,), uneven) for p, q in [(row, R), (SUM, R), (R, row), (R, SUM)]]
        pairs += [((AVG,), uneven, (row,), uneven), ((row,), equal, (AVG,), equal)]
        return [*pairs, ((row,), equal, (atomic,), owned), ((atomic,), owned, (row,), uneven)]
    return [
        ((row, row), uneven, (R, R), uneven),
        ((SUM, AVG), uneven, (row, row), uneven),
        ((R, row), equal, (row, row), equal),
        ((SUM, row), uneven, (R, row), uneven),
        ((row, row), uneven, (atomic, atomic), owned),
        ((atomic, atomic), owned, (row, row), equal),
        ((R, atomic), owned, (row, row), uneven),
        ((row, row), equal, (R, row), layouts(mesh_shape[-1])[0][1]),
    ]


def check_compiled(mesh_shape: tuple[int, ...]) -> int:
    mesh = start(mesh_shape)
    torch.manual_seed(dist.get_rank())
    cases = covering(mesh_shape)
    xs = [buffer_at(mesh, a, layout) for a, layout, _, _ in cases]

    def forward(bufs: list[DBuffer]) -> list[DBuffer]:
        return [dbuf.redistribute(buf, b, layout=n) for buf, (_, _, b, n) in zip(bufs, cases, strict=True)]

    def pull(bufs: list[DBuffer], ys: list[torch.Tensor]) -> tuple[list[DBuffer], list[DBuffer]]:
        outs, pullback = torch.func.vjp(forward, bufs)
        cotangents = [DBuffer(y, out.spec) for y, out in zip(ys, outs, strict=True)]
        return outs, pullback(cotangents)[0]

    want = forward(xs)
    ys = [torch.randint(-8, 9, buf.local.shape).double() for buf in want]
    # Without kernels: test_table.py makes those of every movement.
    outs, pulled = torch.compile(pull, fullgraph=True, backend="aot_eager")(xs, ys)
    leaves = [DBuffer(buf.local.clone().requires_grad_(), buf.spec) for buf in xs]
    moved = torch.compile(forward, fullgraph=True, backend="aot_eager")(leaves)
    torch.autograd.backward([buf.local for buf in moved], ys)
    _, eager = pull(xs, ys)
    for got in (outs, moved):
        assert [buf.spec for buf in got] == [buf.spec for buf in want]
    dbuf.testing.assert_bitwise([b.local for b in outs], [b.local for b in want])
    dbuf.testing.assert_bitwise([b.local.detach() for b in moved], [b.local for b in want])
    dbuf.testing.assert_bitwise([b.local for b in pulled], [b.local for b in eager])
    dbuf.testing.assert_bitwise([b.local.grad for b in leaves], [b.local for b in eager])
    left = torch.stack([(out.local * y).sum() for out, y in zip(outs, ys, strict=True)])
    right = torch.stack([(x.local * p.local).sum() for x, p in zip(xs, pulled, strict=True)])
    sides = torch.stack([left, right])
    dist.all_reduce(sides)
    assert torch.allclose(sides[0], sides[1], rtol=0, atol=1e-9), sides
    return len(cases)


@pytest.mark.slow
@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2)], ids=str)
def test_law_compiled_equals_eager(mesh_shape: tuple[int, ...]) -> None:
    assert min(run(check_compiled, mesh_shape, world_size=math.prod(mesh_shape))) >= 8


# --- padding ----------------------------------------------------------------------------------------------


def check_padding() -> tuple[int, int]:
    """Gaps hold junk, cotangents on gaps are junk: no content, and no gradient of content, may feel it."""
    mesh = start((3,))
    padded = 0
    tensors = {str(i): torch.arange(math.prod(s), dtype=torch.float64).reshape(s) for i, s in enumerate(SHAPES)}
    layout = dbuf.plan_row_atomic(SHAPES, 3, align=8)
    uneven = layouts(3)[0][1]
    owned = layouts(3)[2][1]
    clean = dbuf.shard(tensors, mesh, RowAtomic(), layout=layout)
    gaps = torch.ones_like(clean.local, dtype=torch.bool)
    for at, numel in clean.spec.content_runs():
        gaps[at : at + numel] = False
    padded = int(gaps.sum())
    dirty = DBuffer(torch.where(gaps, torch.nan, clean.local), clean.spec)

    checked = 0
    moves: list[Callable[[DBuffer], DBuffer]] = [
        dbuf.allgather,
        lambda b: dbuf.redistribute(b, RowAtomic(), layout=uneven),
        lambda b: dbuf.redistribute(b, TensorAtomic(), layout=owned),
        lambda b: dbuf.redistribute(b, Replicate(), layout=uneven),
    ]
    for fn in moves:
        dbuf.testing.assert_bitwise(dbuf.unpack(fn(dirty)), dbuf.unpack(fn(clean)))
        out, pull = torch.func.vjp(fn, clean)
        y = torch.randint(-8, 9, out.local.shape).double()
        hit = torch.full_like(y, torch.nan)
        for at, numel in out.spec.content_runs():
            hit[at : at + numel] = y[at : at + numel]
        (quiet,), (loud,) = pull(DBuffer(y, out.spec)), pull(DBuffer(hit, out.spec))
        dbuf.testing.assert_bitwise(dbuf.unpack(loud), dbuf.unpack(quiet))
        checked += 1
    # From tensors to tensors: gaps have no gradient, and unpack reads none.
    full = {k: v.clone().requires_grad_() for k, v in tensors.items()}
    out = dbuf.unpack(dbuf.allgather(dbuf.shard(full, mesh, RowAtomic(), layout=layout)))
    sum((leaf**2).sum() for leaf in out.values()).backward()
    for key, leaf in full.items():
        total = leaf.grad.clone() if leaf.grad is not None else torch.zeros_like(leaf)
        dist.all_reduce(total)
        assert torch.equal(total, 3 * 2 * tensors[key]), key  # three ranks, each with the full loss
    return padded, checked


def test_padding_reaches_neither_content_nor_gradients() -> None:
    results = run(check_padding, world_size=3)
    assert sum(padded for padded, _ in results) > 0
    assert {checked for _, checked in results} == {4}
