from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given

from dbuf import testing
from dbuf.errors import DbufError
from dbuf.placement import Placements, is_sharded, normalize, num_sharded
from dbuf.testing import assert_bitwise, assert_close, assert_same_on_all_ranks, strategies

ROOT = Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True)
class Point:
    x: int


def _sum_over_ranks(offset: float) -> float:
    value = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(value)
    return float(value)


def _environment() -> tuple[str, ...]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
    return tuple(os.environ[name] for name in names)


def _fail_on(ranks: tuple[int, ...]) -> int:
    if dist.get_rank() in ranks:
        raise KeyError(f"no such thing on {dist.get_rank()}")
    return dist.get_rank()


def _fail_while_others_wait() -> None:
    if dist.get_rank() == 1:
        raise ValueError("left alone")
    time.sleep(600)


def _wait_for_nobody() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))  # rank 1 never joins
    else:
        time.sleep(600)


def _die(how: str) -> None:
    if dist.get_rank() == 1:
        print("last words", file=sys.stderr)
        os._exit(7) if how == "exit" else os.abort()
    time.sleep(600)


# --- what works -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_world_size_has_a_group_of_its_own(world_size: int) -> None:
    want = float(sum(range(world_size)) + 2 * world_size)
    assert testing.run(_sum_over_ranks, 2.0, world_size=world_size) == [want] * world_size


def test_ranks_have_their_environment() -> None:
    got = testing.run(_environment, world_size=2)
    assert got == [("0", "0", "2", "1", "1"), ("1", "1", "2", "1", "1")]


def _leave_modes_behind() -> Any:
    found = torch.get_default_dtype(), torch.is_grad_enabled(), os.environ.get("LEFT")
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    os.environ["LEFT"] = "here"
    return found


def test_modes_and_environment_of_one_case_do_not_reach_the_next() -> None:
    for _ in range(2):
        assert testing.run(_leave_modes_behind, world_size=2) == [(torch.float32, True, None)] * 2


def test_a_rank_cannot_start_a_pool_of_its_own() -> None:
    with pytest.raises(testing.WorkerError, match="a rank of the pool would start a pool of its own"):
        testing.run(lambda: testing.run(os.getpid, world_size=2), world_size=1)


def test_processes_are_used_again_when_the_world_shrinks_and_grows() -> None:
    wide = testing.run(os.getpid, world_size=3)
    assert testing.run(os.getpid, world_size=2) == wide[:2]
    assert testing.run(os.getpid, world_size=3) == wide


def test_lambdas_closures_and_tensors_travel() -> None:
    weight = torch.arange(3.0)

    def scaled(factor: float) -> torch.Tensor:
        return weight * factor + dist.get_rank()

    assert_bitwise(testing.run(scaled, 2.0, world_size=2), [weight * 2, weight * 2 + 1])
    assert testing.run(lambda: dist.get_world_size(), world_size=2) == [2, 2]


def test_classes_keep_their_identity() -> None:
    got = testing.run(lambda: Point(dist.get_rank()), world_size=2)
    assert got == [Point(0), Point(1)]
    assert testing.run(isinstance, Point(1), Point, world_size=2) == [True, True]


def test_a_module_that_workers_cannot_import_is_sent_by_value(tmp_path: Path) -> None:
    """As a test file outside of the import path, loaded by pytest's importlib mode."""
    module = _load(
        tmp_path / "hidden_module_of_a_test.py",
        """
        import dataclasses

        @dataclasses.dataclass
        class Pair:
            left: int

        def helper(x):
            return Pair(x + 1)

        def function(x):
            return helper(x)
        """,
    )
    try:
        got = testing.run(module.function, 4, world_size=2)
        assert got == [module.Pair(5)] * 2
        assert type(got[0]) is module.Pair
    finally:
        del sys.modules[module.__name__]


def test_seeds_do_not_depend_on_earlier_cases() -> None:
    first = testing.run(torch.rand, 3, world_size=2)
    assert_bitwise(testing.run(torch.rand, 3, world_size=2), first)
    assert_same_on_all_ranks(first)


def test_output_is_printed_with_its_rank(capsys: pytest.CaptureFixture[str]) -> None:
    testing.run(lambda: print(f"line\nof {dist.get_rank()}"), world_size=2)
    out = capsys.readouterr().out
    assert out == "[rank 0] line\n[rank 0] of 0\n[rank 1] line\n[rank 1] of 1\n"


@pytest.mark.slow
def test_groups_made_by_cases_do_not_pile_up() -> None:
    """A persistent pool once ran out of file descriptors: each case left its sub-groups open."""

    def open_files_of_a_new_group() -> tuple[int, int]:
        before = len(os.listdir("/proc/self/fd"))
        dist.new_group([0, 1])
        return before, len(os.listdir("/proc/self/fd"))

    counts = [testing.run(open_files_of_a_new_group, world_size=2)[0] for _ in range(8)]
    assert counts[0][1] > counts[0][0] and counts == counts[:1] * 8


@pytest.mark.slow
def test_recompile_limits_do_not_leak_between_cases() -> None:
    def compiled(n: int) -> int:
        step = torch.compile(_times_constant, fullgraph=True, backend="eager", dynamic=False)
        return int(step(torch.ones(n)).sum())

    for n in range(1, 20):  # more than the limit of 8 for one function
        assert testing.run(compiled, n, world_size=1) == [3 * n]


def _times_constant(x: torch.Tensor) -> torch.Tensor:
    return x * 3


# --- what fails -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [0, -1, True, 2.0])
def test_world_size_must_be_a_positive_int(world_size: int) -> None:
    with pytest.raises(DbufError, match="world_size is not a positive int"):
        testing.run(os.getpid, world_size=world_size)


def test_every_failing_rank_shows_its_full_traceback() -> None:
    with pytest.raises(testing.WorkerError, match="failed on rank 0, 2 of 3") as caught:
        testing.run(_fail_on, (0, 2), world_size=3)
    message = str(caught.value)
    assert "rank 0 failed" in message and "rank 2 failed" in message and "rank 1" not in message
    assert message.count("in _fail_on\n") == 2
    assert "KeyError: 'no such thing on 2'" in caught.value.failures[2]


def test_the_pool_survives_an_exception_on_some_ranks() -> None:
    before = testing.run(os.getpid, world_size=2)
    with pytest.raises(testing.WorkerError):
        testing.run(_fail_on, (1,), world_size=2)
    assert testing.run(_sum_over_ranks, 0.0, world_size=2) == [1.0, 1.0]
    assert testing.run(os.getpid, world_size=2) == before


def test_a_result_that_cannot_be_pickled_is_a_failure_of_its_rank() -> None:
    with pytest.raises(testing.WorkerError, match="rank 1 failed"):
        testing.run(lambda: threading.Lock() if dist.get_rank() else None, world_size=2)


def test_sys_exit_is_a_failure_and_not_the_end_of_a_worker() -> None:
    with pytest.raises(testing.WorkerError, match="SystemExit: 3"):
        testing.run(sys.exit, 3, world_size=1)


@pytest.mark.slow
def test_a_hang_is_a_timeout_with_the_stack_of_each_rank() -> None:
    pids = testing.run(os.getpid, world_size=2)
    with pytest.raises(testing.WorkerTimeout, match=r"rank 0, 1 still running after 2 s") as caught:
        testing.run(_wait_for_nobody, world_size=2, timeout_s=2.0)
    assert sorted(caught.value.unanswered) == [0, 1] and not caught.value.failures
    assert "all_reduce" in caught.value.unanswered[0] and "_wait_for_nobody" in caught.value.unanswered[1]
    assert isinstance(caught.value, TimeoutError)
    assert not any(_is_running(pid) for pid in pids)
    assert testing.run(_sum_over_ranks, 0.0, world_size=2) == [1.0, 1.0]


@pytest.mark.slow
def test_a_failure_ends_the_wait_for_ranks_that_hang() -> None:
    start = time.monotonic()
    with pytest.raises(testing.WorkerError, match="rank 1 failed, rank 0 did not answer") as caught:
        testing.run(_fail_while_others_wait, world_size=2)
    assert time.monotonic() - start < 60  # not the 120 s of the time-out
    assert "ValueError: left alone" in caught.value.failures[1]
    assert "_fail_while_others_wait" in caught.value.unanswered[0]


@pytest.mark.slow
@pytest.mark.parametrize("how, cause", [("exit", "exited with code 7"), ("abort", "was killed by SIGABRT")])
def test_a_dead_worker_is_reported_with_its_cause_and_last_words(how: str, cause: str) -> None:
    with pytest.raises(testing.WorkerError, match=cause) as caught:
        testing.run(_die, how, world_size=2)
    assert "last words" in caught.value.failures[1]


@pytest.mark.slow
def test_shutdown_ends_the_processes_and_the_next_run_starts_others() -> None:
    before = testing.run(os.getpid, world_size=2)
    testing.shutdown()
    assert not any(_is_running(pid) for pid in before)
    assert set(testing.run(os.getpid, world_size=2)).isdisjoint(before)


@pytest.mark.slow
def test_ranks_are_forked_from_one_process_and_outlive_it() -> None:
    testing.shutdown()
    before = testing.run(os.getpid, world_size=2)
    (template,) = set(testing.run(os.getppid, world_size=2))
    assert template != os.getpid()
    os.kill(template, signal.SIGKILL)
    while _is_running(template):
        time.sleep(0.01)
    assert testing.run(_sum_over_ranks, 0.0, world_size=3) == [3.0, 3.0, 3.0]  # the third comes from another process
    with pytest.raises(testing.WorkerError, match="last words"):
        testing.run(_die, "exit", world_size=2)
    deadline = time.monotonic() + 10  # nobody here waits for processes whose parent is gone
    while any(map(_is_running, before)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(_is_running, before))


@pytest.mark.slow
def test_a_pool_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    testing.shutdown()
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit('no torch today')")
    with monkeypatch.context() as patched:
        patched.syspath_prepend(tmp_path)
        with pytest.raises(testing.WorkerError, match=r"(?s)the workers is gone.*no torch today"):
            testing.run(os.getpid, world_size=2)
    assert testing.run(_sum_over_ranks, 0.0, world_size=2) == [1.0, 1.0]


# --- scripts ----------------------------------------------------------------------------------------------

SCRIPT = """
    import os, dbuf.testing, torch.distributed as dist

    class Local:
        def __init__(self, rank): self.rank = rank

    def fn():
        return Local(dist.get_rank()), os.getpid()

    results = dbuf.testing.run(fn, world_size=2)
    assert [type(local) for local, _ in results] == [Local, Local]
    print(*[pid for _, pid in results], flush=True)
"""


@pytest.mark.slow
def test_a_script_without_main_guard_works_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = _start(tmp_path, SCRIPT)
    out, err = done.communicate(timeout=120)
    assert done.returncode == 0 and err == ""  # not even `terminate called` at exit
    pids = [int(word) for word in out.split()]
    assert len(pids) == 2 and not any(_is_running(pid) for pid in pids)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_workers_do_not_outlive_an_interrupted_or_killed_parent(tmp_path: Path, number: int) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    hang = "    dbuf.testing.run(lambda: __import__('time').sleep(600), world_size=2)"
    process = _start(tmp_path, SCRIPT + hang, TMPDIR=str(scratch))
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2
    time.sleep(0.5)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT)
    deadline = time.monotonic() + 10
    while any(map(_is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(_is_running, pids))
    assert not any(scratch.glob("dbuf-testing-*"))


@pytest.mark.slow
def test_a_missing_cloudpickle_is_named(tmp_path: Path) -> None:
    process = _start(
        tmp_path,
        """
        import sys, dbuf.testing
        sys.modules["cloudpickle"] = None
        dbuf.testing.run(print)
        """,
    )
    _, err = process.communicate(timeout=120)
    assert "ImportError: dbuf.testing.run: a function cannot be sent to the workers." in err
    assert "try:  pip install 'dbuf[test]'" in err


# --- comparators ------------------------------------------------------------------------------------------

NAN = float("nan")
UNEQUAL = {
    "value": (
        {"w": torch.tensor([[1.0, 2.0]])},
        {"w": torch.tensor([[1.0, 3.0]])},
        r"\['w'\].*index \(0, 1\)",
    ),
    "shape": (torch.zeros(2), torch.zeros(2, 1), "shape or dtype"),
    "dtype": (torch.zeros(2), torch.zeros(2).double(), "shape or dtype"),
    "nan": (torch.tensor([0.0, NAN]), torch.tensor([0.0, 1.0]), r"index \(1,\)"),
    "infinity": (torch.tensor([math.inf, 1.0]), torch.tensor([-math.inf, 1.0]), r"index \(0,\)"),
    "int": (torch.tensor([1, 2]), torch.tensor([1, 3]), r"got:  2\n  need: 3"),
    "missing key": ({"a": 1}, {"a": 1, "b": 2}, r"missing:    \[\"\['b'\]\"\]"),
    "key order": ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "order of keys"),
    "container": ([1], (1,), "container types"),
    "plain": ({"n": 1}, {"n": 2}, r"\['n'\] differs.\n  got:  1\n  need: 2"),
    "plain type": ([1], [True], "differs"),
    "tensor against number": ([torch.tensor(1)], [1], "differs in kind"),
}


@pytest.mark.parametrize("name", UNEQUAL)
@pytest.mark.parametrize("check", [assert_bitwise, assert_close])
def test_comparators_can_fail(check, name: str) -> None:
    got, expected, message = UNEQUAL[name]
    check(got, got)
    check(expected, expected)
    with pytest.raises(AssertionError, match=f"(?s){check.__name__}: .*{message}"):
        check(got, expected)


def test_bitwise_sees_signed_zero_and_the_last_bit_and_close_does_not() -> None:
    one = torch.tensor([1.0])
    for got, expected in (
        (torch.nextafter(one, 2 * one), one),
        (torch.cat([one, -one * 0]), torch.cat([one, one * 0])),
    ):
        assert_close(got, expected)
        with pytest.raises(AssertionError, match="the same bits"):
            assert_bitwise(got, expected)


@pytest.mark.parametrize(
    "dtype, rtol",
    [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3), (torch.float64, 1e-12)],
)
def test_tolerance_is_a_fraction_of_the_largest_magnitude(dtype: torch.dtype, rtol: float) -> None:
    expected = torch.tensor([0.0, -100.0, NAN, math.inf], dtype=dtype)
    near, far = expected.clone(), expected.clone()
    near[0], far[0] = 50 * rtol, 200 * rtol
    assert_close(near, expected)
    with pytest.raises(AssertionError, match=r"index \(0,\)"):
        assert_close(far, expected)
    assert_close(far, expected, rtol=3 * rtol)


def test_float8_and_empty_tensors_compare_bitwise() -> None:
    eight = torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn)
    assert_bitwise([eight, torch.zeros(0, 3)], [eight.clone(), torch.zeros(0, 3)])
    with pytest.raises(AssertionError, match=r"index \(1,\)"):
        assert_bitwise(eight, torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn))


def test_the_rank_that_differs_is_named() -> None:
    assert_same_on_all_ranks([torch.ones(2)] * 3)
    with pytest.raises(AssertionError, match=r"rank 2 \(got\) and rank 0"):
        assert_same_on_all_ranks([torch.ones(2), torch.ones(2), torch.zeros(2)])


# --- strategies -------------------------------------------------------------------------------------------


@given(strategies.mesh_shapes(max_size=4))
def test_mesh_shapes_fit(shape: tuple[int, ...]) -> None:
    assert 1 <= len(shape) <= 3 and 1 <= math.prod(shape) <= 4


@given(strategies.placements(3, partial=True))
def test_placements_are_legal(placements: Placements) -> None:
    assert normalize(placements, 3, "test") == placements
    assert all(map(is_sharded, placements[3 - num_sharded(placements) :]))


@given(strategies.tensor_trees())
def test_trees_have_one_dtype_and_whole_numbers(tree: object) -> None:
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if leaf is not None]
    assert len({leaf.dtype for leaf in leaves}) <= 1
    assert all(bool((leaf.double() == leaf.double().round()).all()) for leaf in leaves)


def test_shape_groups_hold_scalars_empties_odd_sizes_and_nothing() -> None:
    from hypothesis import find

    assert find(strategies.shape_groups(), lambda group: not group) == ()
    assert find(strategies.shape_groups(), lambda group: () in group) == ((),)
    assert find(strategies.shape_groups(), lambda group: any(0 in shape for shape in group)) == ((0,),)
    assert find(strategies.shapes(), lambda shape: math.prod(shape) % 2 == 1 and math.prod(shape) > 1) == (3,)


def _load(path: Path, source: str) -> ModuleType:
    path.write_text(textwrap.dedent(source))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _start(folder: Path, source: str, **extra: str) -> subprocess.Popen[str]:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(source))
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"} | extra
    return subprocess.Popen(
        [sys.executable, str(script)],
        cwd=folder,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.exhaustive  # the examples compile on ranks as well, and scripts without compiling start a pool above
def test_script_function_that_is_compiled_and_reads_ops(tmp_path: Path) -> None:
    """A function of a script is sent by value: Dynamo must find its globals, and `.ops` must not mean `torch.ops`."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch
            import torch.nn.functional as F
            import dbuf
            import dbuf.testing

            def loss(p, x):
                return F.linear(x, p["w"]).sum()

            def work():
                mesh = dbuf.init_mesh(("dp",), device_type="cpu")
                buf = dbuf.shard({"w": torch.ones(4, 3)}, mesh, dbuf.RowAtomic())
                step = dbuf.jit(dbuf.value_and_grad(dbuf.gathered(loss)))
                return step(buf, torch.ones(2, 3))[0].item(), step.inspect(buf, torch.ones(2, 3)).ops["aten.mm"]

            print(dbuf.testing.run(work, world_size=2))
            """
        )
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip().endswith("[(24.0, 2), (24.0, 2)]"), done.stderr
