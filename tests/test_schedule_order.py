"""The order of a program, in integers: laws for any program, and a step worked out by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dbuf.compat import ScheduledOp as Op
from dbuf.schedule import order_ops


def _step(blocks: int, ahead: int = 1, parts: int = 1, alone: bool = False) -> tuple[list[Op], list[str]]:
    """Forward and backward of a chain of blocks: gathers `ahead` uses before their own, all else next to its use."""
    ops: list[Op] = []
    names: list[str] = []
    chain: list[int] = []

    def add(name: str, kind: str, *reads: str, heavy: bool = False) -> None:
        places = [names.index(read) for read in reads]
        needs = [*places, *(chain[-1:] if kind in ("gather", "reduction") else [])]
        if kind in ("gather", "reduction"):
            chain.append(len(ops))
        alone_here = alone and kind in ("gather", "reduction")
        ops.append(Op(kind, tuple(sorted(set(needs))), tuple(places), heavy, alone_here))  # type: ignore[arg-type]
        names.append(name)

    forward = [f"f{i}" for i in range(blocks)]
    backward = [f"b{i}" for i in reversed(range(blocks))]
    uses = forward + backward
    for at, use in enumerate(uses):
        for later in uses[at : at + ahead + 1]:
            if f"gather {later}" not in names:
                add(f"gather {later}", "gather")
        add(f"wait {use}", "wait", f"gather {use}")
        for part in range(parts):
            before = [f"{use}.{part - 1}"] if part else uses[max(at - 1, 0) : at]
            name = use if part == parts - 1 else f"{use}.{part}"
            add(name, "compute", f"wait {use}", *before, heavy=True)
        if use in backward:
            add(f"pack {use}", "compute", use)
            add(f"reduce {use}", "reduction", f"pack {use}")
            add(f"reduced {use}", "wait", f"reduce {use}")
            add(f"update {use}", "compute", f"reduced {use}")
    return ops, names


def _names(blocks: int, ahead: int = 1, parts: int = 1, alone: bool = False, **options: object) -> list[str]:
    ops, names = _step(blocks, ahead, parts, alone)
    return [names[i] for i in order_ops(ops, **options).positions]  # type: ignore[arg-type]


def test_a_step_of_two_blocks_worked_out_by_hand() -> None:
    assert _names(2) == [
        *("gather f0", "gather f1", "wait f0", "f0"),
        *("gather b1", "wait f1", "f1"),
        *("gather b0", "wait b1", "b1", "pack b1", "reduce b1"),
        *("wait b0", "b0", "pack b0", "reduce b0", "reduced b1", "update b1"),
        *("reduced b0", "update b0"),
    ]


def test_one_transfer_at_a_time_worked_out_by_hand() -> None:
    """Each block's backward has two halves, and a transfer runs behind each of them."""
    names = _names(3, parts=2, alone=True)
    assert names[names.index("f2") + 1 :] == [
        *("wait b2", "gather b1", "b2.0", "b2"),
        *("pack b2", "wait b1", "reduce b2", "b1.0", "reduced b2", "gather b0", "update b2", "b1"),
        *("pack b1", "wait b0", "reduce b1", "b0.0", "b0", "reduced b1"),
        *("pack b0", "reduce b0", "update b1", "reduced b0", "update b0"),
    ]


def test_a_wait_may_read_what_its_transfer_was_started_from() -> None:
    """As Inductor's do. What else reads that waits for nothing: here it needs a collective that comes later."""
    grads, flag, start, wait = Op("compute", (), (), True), Op("compute", (0,), (0,)), *_transfer()
    also = Op("reduction", (1, 2), (1,)), Op("wait", (1, 4), (1, 4)), Op("compute", (0, 5), (0, 5))
    assert order_ops([grads, flag, start, wait, *also]).positions == (0, 2, 1, 4, 3, 5, 6)


def _transfer() -> tuple[Op, Op]:
    return Op("reduction", (0,), (0,)), Op("wait", (0, 2), (0, 2))


def test_each_part_can_be_switched_off() -> None:
    still = _names(3, 0, gathers=False, reductions=False)
    at = still.index
    assert all(at(f"wait {use}") - at(f"gather {use}") == 1 for use in ("f0", "f1", "f2", "b2", "b1", "b0"))
    assert all(at(f"update b{i}") == at(f"reduced b{i}") + 1 for i in range(3))
    only_gathers, only_reductions = _names(3, reductions=False), _names(3, 0, gathers=False)
    assert only_gathers.index("update b2") < only_gathers.index("b1")
    assert only_reductions.index("update b2") > only_reductions.index("b1")


def test_gathered_buffers_stay_within_the_bound() -> None:
    ops, _ = _step(6)
    for bound in (1, 2, 3):
        order = order_ops(ops, groups_in_flight=bound)
        assert order.gathered_alive <= max(bound, 2)  # the graph asks for two
    assert order_ops(ops).gathered_alive == 2


def test_what_depends_on_nothing_waits_for_its_reader() -> None:
    """Zeros for an embedding's gradient were written at the start of a step and lived to its end."""
    ops = [Op("compute"), Op("compute", heavy=True), Op("compute", (1,), (1,)), Op("compute", (0, 2), (0, 2))]
    assert order_ops(ops).positions == (1, 2, 0, 3)


def test_a_part_of_gathered_weights_waits_for_its_reader() -> None:
    """Tensors of all groups were put together first, and all groups gathered for it."""
    first, second = [Op("gather"), Op("wait", (0,), (0,))], [Op("gather", (0,)), Op("wait", (2,), (2,))]
    parts = [Op("compute", (1,), (1,)), Op("compute", (3,), (3,))]
    uses = [Op("compute", (4,), (4,), heavy=True), Op("compute", (5, 6), (5, 6), heavy=True)]
    order = order_ops([*first, *second, *parts, *uses], groups_in_flight=1)
    assert order.positions == (0, 1, 4, 2, 6, 3, 5, 7) and order.gathered_alive == 1


def test_light_work_for_a_reduction_comes_first() -> None:
    """A copy of 64 numbers stood behind the next block's backward, and the reduction with it."""
    ops = [
        Op("compute", heavy=True),
        Op("compute", (0,), (0,), heavy=True),
        Op("compute", (1,), (1,), heavy=True),
        Op("compute", (1,), (1,)),
        Op("reduction", (3,), (3,)),
        Op("wait", (4,), (4,)),
    ]
    assert order_ops(ops).positions == (0, 1, 3, 4, 2, 5)


def test_memory_is_not_written_while_a_transfer_reads_it() -> None:
    """A weight's update has to follow the start of its gather; it follows the end as well."""
    ops = [Op("gather"), Op("compute", (0,)), Op("wait", (0,), (0,)), Op("compute", (2,), (2,))]
    assert order_ops(ops).positions == (0, 2, 1, 3)


@st.composite
def programs(draw: st.DrawFn) -> list[Op]:
    """Any program: every collective is waited for, and collectives stand in a chain."""
    ops: list[Op] = []
    last: int | None = None
    for _ in range(draw(st.integers(1, 25))):
        readable = [i for i, op in enumerate(ops) if op.kind in ("compute", "wait")]
        reads = tuple(sorted(draw(st.sets(st.sampled_from(readable), max_size=3)))) if readable else ()
        kind = draw(st.sampled_from(["compute", "compute", "gather", "reduction"]))
        if kind == "compute":
            ops.append(Op("compute", reads, reads, draw(st.booleans())))
            continue
        needs = tuple(sorted({*reads, *([] if last is None else [last])}))
        ops.append(Op(kind, needs, reads, alone=draw(st.booleans())))  # type: ignore[arg-type]
        last = len(ops) - 1
        ops.append(Op("wait", (last,), (last,)))
    return ops


@given(programs(), st.integers(1, 3), st.booleans(), st.booleans())
def test_laws_of_any_order(ops: list[Op], groups: int, gathers: bool, reductions: bool) -> None:
    order = order_ops(ops, groups_in_flight=groups, gathers=gathers, reductions=reductions)
    place = {op: at for at, op in enumerate(order.positions)}
    assert sorted(order.positions) == list(range(len(ops)))
    assert all(place[need] < place[i] for i, op in enumerate(ops) for need in op.needs)
    starts = [i for i, op in enumerate(ops) if op.kind in ("gather", "reduction")]
    assert sorted(starts, key=place.__getitem__) == starts, "two collectives were exchanged"
    alone = [place[i] for i in starts if ops[i].alone]
    ends = [place[i] for i, op in enumerate(ops) if op.kind == "wait" and ops[op.reads[0]].alone]
    assert all(end < start for end, start in zip(sorted(ends), alone[1:], strict=False)), "two were under way"
