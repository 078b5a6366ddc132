"""Routes as integers: every rank's steps played in one process, against an expectation that knows no step.

The interpreter below runs the steps of all ranks of a mesh in lockstep on lists of exact fractions. It also holds what
real ranks rely on: at each collective every rank of the mesh stands at the same one, with the same size on the wire.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Iterator, Mapping
from fractions import Fraction
from types import FrameType
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dbuf.layout import GlobalLayout
from dbuf.placement import (
    BlockAtomic,
    Partial,
    Placements,
    Replicate,
    RowAtomic,
    ShardLayout,
    TensorAtomic,
    is_sharded,
    num_sharded,
)
from dbuf.plan import plan_row_atomic, plan_tensor_atomic
from dbuf.plan.route import TRANSITIONS, WAIT, Hop, Steps, coalesce, plan_route, rearrange, split, transpose
from dbuf.plan.selection import merge_steps, select_layout, selection_steps
from dbuf.testing import strategies

Shape = tuple[int, ...]
Coordinate = tuple[int, ...]
Locals = dict[Coordinate, list[Fraction]]

R, SUM, AVG, S = Replicate(), Partial("sum"), Partial("avg"), RowAtomic()
LOCAL = ("rearrange", "scale")


# --- the ranks of a mesh, in one process ------------------------------------------------------------------


def ranks_of(mesh: Shape) -> list[Coordinate]:
    return list(itertools.product(*map(range, mesh)))


def play(steps_of: Mapping[Coordinate, Steps], inputs: Locals, mesh: Shape) -> tuple[Locals, list[tuple[Any, ...]]]:
    """Run every rank's steps; return what each holds at the end, and the collectives with their wire sizes."""
    data = {c: list(x) for c, x in inputs.items()}
    todo = {c: list(steps) for c, steps in steps_of.items()}
    log: list[tuple[Any, ...]] = []
    while True:
        for c, steps in todo.items():
            while steps and steps[0][0] in LOCAL:
                data[c] = run_local(steps.pop(0), data[c])
        if not any(todo.values()):
            return data, log
        heads = {steps.pop(0) if steps else ("nothing",) for steps in todo.values()}
        assert all(steps and steps.pop(0) == WAIT for steps in todo.values()), "a collective is read before its wait"
        log.append(collective(heads, data, mesh, steps_of))


def run_local(step: tuple[Any, ...], x: list[Fraction]) -> list[Fraction]:
    if step[0] == "scale":
        factor = Fraction(step[1]).limit_denominator(64)  # 1 / 3 as meant, not as a float holds it
        return [factor * value for value in x]
    _, numel_in, pieces = step
    assert len(x) == numel_in, f"a step for {numel_in} elements met {len(x)}"
    assert all(numel > 0 and (start == -1 or 0 <= start <= numel_in - numel) for start, numel in pieces)
    return [value for start, numel in pieces for value in ([Fraction(0)] * numel if start == -1 else x[start:][:numel])]


def collective(heads: set[tuple[Any, ...]], data: Locals, mesh: Shape, steps_of: object) -> tuple[Any, ...]:
    kinds = {head[0] for head in heads}
    assert len(kinds) == 1, f"ranks stand at different collectives: {kinds}"
    (kind,) = kinds
    if kind == "all_to_all":
        return all_to_all(heads, data, mesh, steps_of)
    assert len(heads) == 1, f"ranks disagree: {heads}"
    ((_, n, axis),) = heads
    assert n == mesh[axis] > 1, "an axis of size 1 communicates nothing"
    # An all-reduce next to a sharded axis differs from group to group; gathers and scatters are alike everywhere.
    groups = {tuple(c[:axis] + c[axis + 1 :]) if kind == "all_reduce" else () for c in data}
    sizes = {(g, len(data[c])) for c in data for g in groups if g in ((), c[:axis] + c[axis + 1 :])}
    assert len(sizes) == len(groups), f"{kind}: different sizes on the wire: {sizes}"
    before = dict(data)
    for c in data:
        everyone = [before[*c[:axis], i, *c[axis + 1 :]] for i in range(n)]
        total = [sum(values, Fraction(0)) for values in zip(*everyone, strict=True)]
        if kind == "all_gather":
            data[c] = list(itertools.chain(*everyone))
        elif kind == "all_reduce":
            data[c] = total
        else:
            assert kind == "reduce_scatter" and len(total) % n == 0
            share = len(total) // n
            data[c] = total[c[axis] * share :][:share]
    return kind, axis, max(size for _, size in sizes)


def all_to_all(heads: set[tuple[Any, ...]], data: Locals, mesh: Shape, steps_of: Any) -> tuple[Any, ...]:
    ((count, ranks),) = {(head[3], len(head[1])) for head in heads}
    assert ranks == math.prod(mesh[-count:]) > 1
    # The plain head does not say whose it is: find each rank's own all_to_all in its steps (there is one a route).
    own = {c: next(s for s in steps if s[0] == "all_to_all") for c, steps in steps_of.items()}
    sent: dict[tuple[Coordinate, Coordinate], list[Fraction]] = {}
    for c, (_, _, sends, _) in own.items():
        assert sum(sends) == len(data[c])
        cursor = 0
        for member, numel in zip(members(c, mesh, count), sends, strict=True):
            sent[c, member] = data[c][cursor : cursor + numel]
            cursor += numel
    for c, (_, receives, _, _) in own.items():
        group = members(c, mesh, count)
        assert [len(sent[member, c]) for member in group] == list(receives), "a message of another length than expected"
        data[c] = [value for member in group for value in sent[member, c]]
    return "all_to_all", count, None


def members(c: Coordinate, mesh: Shape, count: int) -> list[Coordinate]:
    fixed = c[: len(mesh) - count]
    return [(*fixed, *rest) for rest in itertools.product(*map(range, mesh[len(mesh) - count :]))]


# --- what should come out ---------------------------------------------------------------------------------


def own_range(layout: GlobalLayout, placements: Placements, mesh: Shape, c: Coordinate) -> tuple[int, int]:
    """`[start, stop)` by cutting the list of segments, innermost axis first."""
    segments = list(range(layout.dp_size))
    for axis in reversed(range(len(mesh))):
        if is_sharded(placements[axis]):
            share, rest = divmod(len(segments), mesh[axis])
            assert not rest
            segments = segments[c[axis] * share :][:share]
    bounds = [*layout.rank_to_offset, layout.size]
    return bounds[segments[0]], bounds[segments[-1] + 1]


def reduce_axis(full: dict[Coordinate, list[Fraction]], axis: int, op: str) -> dict[Coordinate, list[Fraction]]:
    """Sum or average over one axis; the coordinate on it becomes 0."""
    groups: dict[Coordinate, list[list[Fraction]]] = {}
    for c, values in full.items():
        groups.setdefault((*c[:axis], 0, *c[axis + 1 :]), []).append(values)
    weight = {c: Fraction(1, len(rows)) if op == "avg" else Fraction(1) for c, rows in groups.items()}
    return {c: [weight[c] * sum(v) for v in zip(*rows, strict=True)] for c, rows in groups.items()}


def content_of(layout: GlobalLayout, flat: list[Fraction]) -> list[list[Fraction]]:
    pairs = zip(layout.tensor_to_offset, layout.tensor_numels, strict=True)
    return [flat[offset:][:numel] for offset, numel in pairs]


def flat_of(layout: GlobalLayout, tensors: list[list[Fraction]]) -> list[Fraction]:
    flat = [Fraction(0)] * layout.size
    for offset, values in zip(layout.tensor_to_offset, tensors, strict=True):
        flat[offset : offset + len(values)] = values
    assert len(flat) == layout.size
    return flat


def draw(numel: int, rng: random.Random) -> list[Fraction]:
    return [Fraction(rng.randint(-9, 9) or 10) for _ in range(numel)]  # never 0: zeros come from steps alone


class Case:
    """A pair of placements and layouts on a mesh, and the routes of all ranks."""

    def __init__(
        self, mesh: Shape, source: Placements, target: Placements, layout: GlobalLayout, target_layout: GlobalLayout
    ) -> None:
        self.mesh, self.source, self.target = mesh, source, target
        self.layout, self.target_layout = layout, target_layout
        self.ranks = ranks_of(mesh)
        self.hops: dict[Coordinate, tuple[Hop, ...]] = {
            c: plan_route(source, layout, target, target_layout, mesh, c) for c in self.ranks
        }
        self.steps = {c: tuple(step for hop in hops for step in hop.steps) for c, hops in self.hops.items()}
        self.back = {c: transpose(steps) for c, steps in self.steps.items()}

    def __repr__(self) -> str:
        return f"{self.mesh}: {self.source} {self.layout} -> {self.target} {self.target_layout}"

    def numel_in(self, c: Coordinate) -> int:
        start, stop = own_range(self.layout, self.source, self.mesh, c)
        return stop - start

    def numel_out(self, c: Coordinate) -> int:
        start, stop = own_range(self.target_layout, self.target, self.mesh, c)
        return stop - start

    def check_result(self, rng: random.Random) -> None:
        """Contributions in, moved, reduced: the same value as contributions reduced."""
        own = {c: draw(self.layout.size, rng) for c in self.ranks}
        partial = [isinstance(p, Partial) for p in self.source]
        full = {c: own[tuple(i * is_partial for i, is_partial in zip(c, partial, strict=True))] for c in self.ranks}
        inputs = {}
        for c in self.ranks:
            start, stop = own_range(self.layout, self.source, self.mesh, c)
            inputs[c] = full[c][start:stop]
        got, _ = play(self.steps, inputs, self.mesh)

        kept = [a for a, p in enumerate(self.source) if isinstance(p, Partial) and p == self.target[a]]
        want = {c: v for c, v in full.items() if all(i == 0 or partial[a] for a, i in enumerate(c))}
        for axis, p in enumerate(self.source):
            if isinstance(p, Partial) and axis not in kept:
                want = reduce_axis(want, axis, p.reduce_op)
        if self.layout != self.target_layout:
            want = {c: flat_of(self.target_layout, content_of(self.layout, v)) for c, v in want.items()}
        for axis, p in enumerate(self.target):
            if isinstance(p, Partial) and axis not in kept:
                got = reduce_axis(got, axis, p.reduce_op)
        for c, values in got.items():
            start, stop = own_range(self.target_layout, self.target, self.mesh, c)
            origin = tuple(i if a in kept else 0 for a, i in enumerate(c))
            assert values == want[origin][start:stop], f"rank {c} of {self!r}"

    def check_transpose(self, rng: random.Random) -> None:
        """`<A x, y> == <x, A* y>` over all ranks, exactly, for values that differ on every rank."""
        x = {c: draw(self.numel_in(c), rng) for c in self.ranks}
        y = {c: draw(self.numel_out(c), rng) for c in self.ranks}
        ax, there = play(self.steps, x, self.mesh)
        aty, back = play(self.back, y, self.mesh)
        assert {c: len(v) for c, v in aty.items()} == {c: len(v) for c, v in x.items()}
        assert dot(ax, y) == dot(x, aty), repr(self)
        duals = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}
        assert [k for k, *_ in back] == [duals.get(k, k) for k, *_ in reversed(there)]
        twice, _ = play({c: transpose(steps) for c, steps in self.back.items()}, x, self.mesh)
        assert twice == ax, repr(self)

    def check_split(self) -> None:
        """`split` cuts behind the start of the last collective; what follows is local, and so is its transpose."""
        for steps in self.steps.values():
            first, second = split(steps)
            assert (*first, *second) == steps
            assert {step[0] for step in second} <= {"wait", *LOCAL}
            assert {step[0] for step in transpose(second)} <= {*LOCAL}
            assert not second or first[-1][0] in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def dot(a: Locals, b: Locals) -> Fraction:
    return sum((u * v for c in a for u, v in zip(a[c], b[c], strict=True)), Fraction(0))


# --- which pairs ------------------------------------------------------------------------------------------


def all_placements(ndim: int, shard: Any, wholes: tuple[Any, ...] = (R, SUM, AVG)) -> Iterator[Placements]:
    for count in range(ndim + 1):
        for prefix in itertools.product(wholes, repeat=ndim - count):
            yield (*prefix, *([shard] * count))


def is_legal(source: Placements, target: Placements) -> bool:
    """A partial axis never changes its reduction."""
    pairs = zip(source, target, strict=True)
    return not any(isinstance(a, Partial) and isinstance(b, Partial) and a != b for a, b in pairs)


def fits(layout: GlobalLayout, placements: Placements, mesh: Shape) -> bool:
    return layout.dp_size % math.prod(mesh[len(mesh) - num_sharded(placements) :]) == 0


SHAPES: tuple[Shape, ...] = ((3, 2), (), (0, 3), (2, 4), (1,), (4, 1))


def layouts_for(dp_size: int) -> list[tuple[Any, GlobalLayout]]:
    """A shard placement with each kind of layout: equal and uneven segments, empty ones, owners, blocks."""
    owners = [dp_size - 1, 0, 0, dp_size - 1, 0, dp_size // 2]
    blocks = tuple((2 * s[0], *s[1:]) if s else () for s in SHAPES if s)
    assert all(s[0] % 2 == 0 for s in blocks)
    return [
        (RowAtomic(), plan_row_atomic(SHAPES, dp_size)),
        (RowAtomic(), plan_row_atomic(SHAPES, dp_size, shard_layout=ShardLayout.UNPADDED, align=4)),
        (TensorAtomic(), plan_tensor_atomic(SHAPES, dp_size, tensor_owners=owners)),
        (TensorAtomic(), plan_tensor_atomic(SHAPES, dp_size, tensor_owners=owners, shard_layout=ShardLayout.PADDED)),
    ]


MESHES = [(1,), (2,), (3,), (2, 2), (1, 2), (2, 1), (3, 2), (2, 3), (1, 1)]
MESHES_3D = [(2, 2, 2), (1, 2, 3), (2, 1, 2), (3, 2, 1), (1, 1, 2)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_pair_within_a_layout(mesh: Shape) -> None:
    rng = random.Random(0)
    layouts = layouts_for(math.prod(mesh))
    for kind, layout in layouts if math.prod(mesh) <= 4 else layouts[1:3]:
        for source, target in itertools.product(all_placements(len(mesh), kind), repeat=2):
            if is_legal(source, target):
                case = Case(mesh, source, target, layout, layout)
                case.check_result(rng)
                case.check_transpose(rng)
                case.check_split()


@pytest.mark.parametrize("mesh", MESHES_3D, ids=str)
def test_every_pair_within_a_layout_on_three_axes(mesh: Shape) -> None:
    rng = random.Random(1)
    _, layout = layouts_for(math.prod(mesh))[1]
    for source, target in itertools.product(all_placements(3, S, (R, SUM)), repeat=2):
        case = Case(mesh, source, target, layout, layout)
        case.check_result(rng)
        case.check_transpose(rng)


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2), (1, 2), (2, 1)], ids=str)
def test_every_pair_between_layouts(mesh: Shape) -> None:
    """Other kinds of shard and other numbers of segments, shard to shard on two sharded axes among them."""
    rng = random.Random(2)
    sources = layouts_for(math.prod(mesh))
    targets = [*sources, *layouts_for(mesh[-1]), *layouts_for(2 * math.prod(mesh)), *layouts_for(1)]
    played = 0
    for (kind, layout), (new_kind, new_layout) in itertools.product(sources[1:3], targets):
        if layout == new_layout:
            continue
        pairs = itertools.product(
            all_placements(len(mesh), kind, (R, SUM)), all_placements(len(mesh), new_kind, (R, AVG))
        )
        for source, target in pairs:
            if is_legal(source, target) and fits(new_layout, target, mesh):
                case = Case(mesh, source, target, layout, new_layout)
                case.check_result(rng)
                case.check_transpose(rng)
                played += 1
    assert played > 50


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, random.Random]:
    shapes = draw(strategies.shape_groups(max_tensors=5, max_dim=4))
    mesh = draw(strategies.mesh_shapes(max_size=8))

    def side() -> tuple[Placements, GlobalLayout]:
        placements = draw(strategies.placements(len(mesh), partial=True).filter(lambda p: p[-1] != BlockAtomic(3)))
        sharded = math.prod(mesh[len(mesh) - num_sharded(placements) :])
        dp_size = sharded * draw(st.sampled_from([1, 2, 3]))
        align, layout = draw(st.sampled_from([1, 4])), draw(st.sampled_from(ShardLayout))
        if placements[-1] == TensorAtomic():
            owner = st.integers(0, dp_size - 1)
            owners = draw(st.lists(owner, min_size=len(shapes), max_size=len(shapes)))
            return placements, plan_tensor_atomic(
                shapes, dp_size, tensor_owners=owners, shard_layout=layout, align=align
            )
        block = placements[-1].block_size if isinstance(placements[-1], BlockAtomic) else 1
        assume(all(not s or s[0] % block == 0 for s in shapes) and (block == 1 or all(shapes)))
        return placements, plan_row_atomic(shapes, dp_size, block_size=block, shard_layout=layout, align=align)

    source, layout = side()
    target, target_layout = side()
    if draw(st.booleans()) and fits(layout, target, mesh):
        target_layout = layout
    assume(is_legal(source, target))
    return Case(mesh, source, target, layout, target_layout), random.Random(draw(st.integers(0, 999)))


@given(cases())
def test_law_result_and_transpose_on_random_problems(problem: tuple[Case, random.Random]) -> None:
    case, rng = problem
    case.check_result(rng)
    case.check_transpose(rng)
    case.check_split()


@pytest.mark.parametrize("mesh", [(3,), (2, 2), (2, 1), (1, 3)], ids=str)
def test_law_a_to_b_to_c_is_a_to_c(mesh: Shape) -> None:
    """Over every b between that loses nothing: no axis that is partial at its end starts there."""
    rng = random.Random(3)
    stops = [
        (p, layout) for kind, layout in layouts_for(math.prod(mesh))[:3] for p in all_placements(len(mesh), kind, (R,))
    ]
    starts = [(p, layout) for p, layout in stops] + [((SUM,) * len(mesh), stops[0][1])]
    for (a, la), (b, lb), (c, lc) in itertools.product(starts, stops, stops):
        direct, first, second = Case(mesh, a, c, la, lc), Case(mesh, a, b, la, lb), Case(mesh, b, c, lb, lc)
        content = flat_of(la, content_of(la, draw(la.size, rng)))  # gaps are zero, as in a new buffer
        x = {k: content[slice(*own_range(la, a, mesh, k))] for k in direct.ranks}
        middle, _ = play(first.steps, x, mesh)
        assert play(second.steps, middle, mesh)[0] == play(direct.steps, x, mesh)[0], (a, b, c, la, lb, lc)


# --- numbers, read by eye ---------------------------------------------------------------------------------


def test_replicate_to_partial_keeps_the_sum_on_the_first_rank_and_relabels_the_average() -> None:
    layout = plan_row_atomic([(4,)], 3)
    x = {c: [Fraction(v) for v in (1, 2, 3, 4, 0, 0)] for c in ranks_of((3,))}
    to_sum, _ = play(Case((3,), (R,), (SUM,), layout, layout).steps, x, (3,))
    assert [to_sum[k,] for k in range(3)] == [[1, 2, 3, 4, 0, 0], [0] * 6, [0] * 6]
    assert set(Case((3,), (R,), (AVG,), layout, layout).steps.values()) == {()}


def test_shard_to_partial_is_the_transpose_of_view() -> None:
    layout = plan_row_atomic([(4,)], 2)
    view, embed = Case((2,), (R,), (S,), layout, layout), Case((2,), (S,), (SUM,), layout, layout)
    assert view.back == embed.steps
    assert embed.steps[1,] == (("rearrange", 2, ((-1, 2), (0, 2))),)


def test_each_row_on_one_axis_as_steps() -> None:
    """Uneven segments of 1 and 3 rows: padded on the wire to the larger, cut after."""
    layout = GlobalLayout(((4,),), (0,), 4, (0, 1)).validate()
    steps = {(a, b): Case((2,), (a,), (b,), layout, layout).steps for a in (R, SUM, S) for b in (R, SUM, S)}
    assert steps[S, R][0,] == (
        ("rearrange", 1, ((0, 1), (-1, 2))),
        ("all_gather", 2, 0),
        WAIT,
        ("rearrange", 6, ((0, 1), (3, 3))),
    )
    assert steps[S, R][1,] == (("all_gather", 2, 0), WAIT, ("rearrange", 6, ((0, 1), (3, 3))))
    assert steps[SUM, S][0,] == (
        ("rearrange", 4, ((0, 1), (-1, 2), (1, 3))),
        ("reduce_scatter", 2, 0),
        WAIT,
        ("rearrange", 3, ((0, 1),)),
    )
    assert steps[SUM, R][0,] == (("all_reduce", 2, 0), WAIT)
    assert steps[R, S][1,] == (("rearrange", 4, ((1, 3),)),)
    assert steps[R, R][0,] == steps[S, S][0,] == steps[SUM, SUM][0,] == ()


def test_the_table_is_complete_and_names_public_functions() -> None:
    kinds = ("shard", "replicate", "partial")
    assert set(TRANSITIONS) == {(a, b) for a in kinds for b in kinds if a != b}
    assert {row.function for row in TRANSITIONS.values()} == {
        "allgather", "reduce_scatter", "allreduce", "view", "redistribute",
    }  # fmt: skip
    duals = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather", "all_reduce": "all_reduce", None: None}
    dual = {"shard": "shard", "replicate": "partial", "partial": "replicate"}
    for (a, b), row in TRANSITIONS.items():
        assert TRANSITIONS[dual[b], dual[a]].collective == duals[row.collective]


def test_hops_go_reductions_and_views_inner_first_then_gathers_outer_first() -> None:
    layout = plan_row_atomic([(8,)], 8)
    for source, target, axes in [
        ((S, S, S), (R, R, R), [0, 1, 2]),
        ((SUM, SUM, SUM), (S, S, S), [2, 1, 0]),
        ((R, R, R), (S, S, S), [2, 1, 0]),
        ((SUM, R, SUM), (R, S, S), [2, 1, 0]),
        ((SUM, S, S), (R, R, R), [0, 1, 2]),
    ]:
        hops = plan_route(source, layout, target, layout, (2, 2, 2), (0, 1, 0))
        assert [hop.axis for hop in hops] == axes


def test_gather_of_equal_segments_copies_nothing() -> None:
    """With equal segments there is no copy before or after a gather: unpacked weights are views of it."""
    layout = plan_row_atomic([(5, 3), (7,)], 4)
    for c in ranks_of((2, 2)):
        hops = plan_route((S, S), layout, (R, R), layout, (2, 2), c)
        assert [step[0] for hop in hops for step in hop.steps] == ["all_gather", "wait"] * 2


def test_align_rounds_what_uneven_segments_put_on_the_wire() -> None:
    layout = plan_row_atomic([(7, 3)], 2, shard_layout=ShardLayout.UNPADDED, align=16)
    case = Case((2,), (S,), (R,), layout, layout)
    assert sorted(case.numel_in(c) for c in case.ranks) == [9, 12]
    _, log = play(case.steps, {c: [Fraction(1)] * case.numel_in(c) for c in case.ranks}, (2,))
    assert log == [("all_gather", 0, 16)]


def test_ranks_that_own_nothing_join_every_collective() -> None:
    """One tensor on one owner of four: three ranks hold nothing, and issue the same collectives."""
    owned = plan_tensor_atomic([(3, 2)], 4, tensor_owners=[2])
    rows = plan_row_atomic([(3, 2)], 4, shard_layout=ShardLayout.UNPADDED)
    mesh = (2, 2)
    atomic = (TensorAtomic(),) * 2
    gather = Case(mesh, atomic, (R, R), owned, owned)
    assert sorted(gather.numel_in(c) for c in gather.ranks) == [0, 0, 0, 6]
    _, log = play(gather.steps, {c: [Fraction(1)] * gather.numel_in(c) for c in gather.ranks}, mesh)
    assert log == [("all_gather", 0, 6), ("all_gather", 1, 6)]
    move = Case(mesh, atomic, (S, S), owned, rows)
    assert {sum(s[0] == "all_to_all" for s in steps) for steps in move.steps.values()} == {1}


def test_nothing_at_all_sends_nothing() -> None:
    for layout in (plan_row_atomic([], 2), plan_row_atomic([(0, 4), (3, 0)], 2)):
        assert set(Case((2,), (S,), (R,), layout, layout).steps.values()) == {()}


def test_a_layout_of_fewer_segments_is_gathered_first() -> None:
    """Target planned for the inner axis alone: the outer one is gathered before the exchange over the inner."""
    fine, coarse = plan_row_atomic(SHAPES, 4), plan_row_atomic(SHAPES, 2, shard_layout=ShardLayout.UNPADDED)
    case = Case((2, 2), (S, S), (R, S), fine, coarse)
    kinds = [[s[0] for s in steps if s[0].startswith("all")] for steps in case.steps.values()]
    assert kinds == [["all_gather", "all_to_all"]] * 4


def test_exchange_sends_at_most_what_a_rank_holds() -> None:
    a, b = plan_row_atomic(SHAPES, 3), plan_tensor_atomic(SHAPES, 3, tensor_owners=[2, 1, 0, 0, 1, 2])
    for c, steps in Case((3,), (S,), (TensorAtomic(),), a, b).steps.items():
        (swap,) = [s for s in steps if s[0] == "all_to_all"]
        start, stop = own_range(a, (S,), (3,), c)
        assert sum(swap[2]) <= stop - start


# --- small parts ------------------------------------------------------------------------------------------


def test_rearrange_leaves_out_a_step_that_changes_nothing() -> None:
    assert rearrange(5, [(0, 2), (2, 3)]) == ()
    assert rearrange(0, []) == ()
    assert rearrange(5, [(0, 4)]) == (("rearrange", 5, ((0, 4),)),)
    assert rearrange(5, []) == (("rearrange", 5, ()),)
    assert rearrange(0, [(-1, 3)]) == (("rearrange", 0, ((-1, 3),)),)


@given(st.lists(st.tuples(st.integers(-1, 9), st.integers(0, 4)), max_size=8))
def test_law_coalesce_copies_the_same_elements_in_fewer_pieces(pieces: list[tuple[int, int]]) -> None:
    def spell(runs: Any) -> list[int]:
        return [-1 if start == -1 else start + i for start, numel in runs for i in range(numel)]

    joined = coalesce(pieces)
    assert spell(joined) == spell(pieces)
    assert coalesce(joined) == joined
    assert len(joined) <= sum(numel > 0 for _, numel in pieces)


# --- selections -------------------------------------------------------------------------------------------


@given(strategies.shape_groups(max_tensors=5), st.integers(1, 4), st.sampled_from(ShardLayout), st.data())
def test_law_selecting_moves_nothing_and_merging_puts_it_back(
    shapes: tuple[Shape, ...], dp_size: int, shard_layout: ShardLayout, data: st.DataObject
) -> None:
    layout = plan_row_atomic(shapes, dp_size, shard_layout=shard_layout)
    mask = tuple(data.draw(st.lists(st.booleans(), min_size=len(shapes), max_size=len(shapes))))
    part = select_layout(layout, mask).validate()
    assert part.tensor_shapes == tuple(itertools.compress(shapes, mask)) and part.admits(RowAtomic())
    kept = [t for t, keep in enumerate(mask) if keep]
    for k in range(dp_size):
        start, numel = layout.segment(k)
        places = [(place, n) for t, _, n, place in layout.pieces(start, numel) if t in kept]
        local = [Fraction(i + 1) for i in range(numel)]
        chosen = run_all(selection_steps(places, numel), local)
        # The same rows of the same tensors, by the part's own layout.
        mine = [(kept[t], s, n) for t, s, n, _ in part.pieces(*part.segment(k))]
        assert mine == [(t, s, n) for t, s, n, _ in layout.pieces(start, numel) if t in kept]
        assert chosen == [value for place, n in places for value in local[place : place + n]]
        assert run_all(merge_steps(places, numel), local + chosen) == local
        negated = run_all(merge_steps(places, numel), local + [-value for value in chosen])
        inside = {i for place, n in places for i in range(place, place + n)}
        assert negated == [-v if i in inside else v for i, v in enumerate(local)]
        assert run_all(transpose(selection_steps(places, numel)), chosen) == [
            v if i in inside else 0 for i, v in enumerate(local)
        ]


def test_cuts_of_a_selection_are_not_measured_from_empty_tensors() -> None:
    """Was wrong: an empty tensor at offset 0 hid the one that really starts there, and rank 0 lost its rows."""
    layout = GlobalLayout(((2, 2), (0, 7), (2,)), (0, 0, 4), 6, (0, 2)).validate()
    part = select_layout(layout, (True, True, False)).validate()
    assert (part.tensor_to_offset, part.size, part.rank_to_offset) == ((0, 0), 4, (0, 2))


def run_all(steps: Steps, x: list[Fraction]) -> list[Fraction]:
    for step in steps:
        x = run_local(step, x)
    return x


# --- growth -----------------------------------------------------------------------------------------------


def count_opcodes(call: Any) -> int:
    """Python instructions that a call executes in this library."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if "dbuf" not in frame.f_code.co_filename or "tests" in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def plan_one(ranks: int, tensors: int, owner: int | None) -> Any:
    """One rank's route from rows to owners, with everything it needs freshly made."""
    shapes = [(1 + t % 7, 3) for t in range(tensors)]
    rows = plan_row_atomic(shapes, ranks, shard_layout=ShardLayout.UNPADDED)
    owners = [owner if owner is not None else t * 7 % ranks for t in range(tensors)]
    owned = plan_tensor_atomic(shapes, ranks, tensor_owners=owners)
    plan_route.cache_clear()
    rows._order, owned._order  # noqa: B018 - cached once a layout, n log n
    return lambda: plan_route((S,), rows, (TensorAtomic(),), owned, (ranks,), (owner or 0,))


@pytest.mark.parametrize("owner", [None, 3], ids=["spread", "one owner"])
def test_planning_grows_with_ranks_and_tensors_not_with_their_product(owner: int | None) -> None:
    """Counted in instructions: four times the ranks and tensors take about four times as many, not sixteen."""
    small = count_opcodes(plan_one(256, 512, owner))
    large = count_opcodes(plan_one(1024, 2048, owner))
    assert small > 1000
    assert large < 5 * small, f"{small} -> {large}"


def test_gathers_and_reductions_grow_with_the_axis_alone() -> None:
    """What one rank does for a gather over the inner axis does not know how many outer ranks there are."""

    def work(outer: int) -> int:
        layout = plan_row_atomic([(64, 3)] * 50, outer * 8)
        plan_route((R, S), layout, (R, R), layout, (outer, 8), (0, 0))  # counts the layout's own caches once
        plan_route.cache_clear()
        return count_opcodes(lambda: plan_route((R, S), layout, (R, R), layout, (outer, 8), (0, 0)))

    assert work(2048) <= work(8) + 100


def test_a_route_among_sixteen_thousand_ranks() -> None:
    hops = plan_one(16_384, 20_000, None)()
    ((_, received, sent, count),) = [step for hop in hops for step in hop.steps if step[0] == "all_to_all"]
    assert len(received) == len(sent) == 16_384 and count == 1 and sum(sent) > 0
