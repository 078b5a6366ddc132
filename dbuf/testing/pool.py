"""The caller's side: a persistent pool of gloo ranks that runs a function on all of them at once."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TypeVar

from dbuf.errors import DbufError, explain, require_positive
from dbuf.testing.process import START_TIMEOUT_S, Template, Worker
from dbuf.testing.protocol import (
    Answer,
    Case,
    Leave,
    Stop,
    WorkerError,
    WorkerTimeout,
    is_worker,
    load_cloudpickle,
)
from dbuf.testing.sending import Sender, import_path

T = TypeVar("T")

_LEAVE_TIMEOUT_S = 20.0
_GRACE_S = 5.0  # after one rank failed: the others may still report, or hang in a collective
_POLL_S = 0.25


def run(fn: Callable[..., T], *args: object, world_size: int = 4, timeout_s: float = 120.0) -> list[T]:
    """Run `fn(*args)` on `world_size` gloo ranks and return what each rank returned.

    The ranks are processes of one pool, forked at the first call from a process that has imported torch for all of
    them, grown when a bigger world is asked for, used again by every later call and ended when the interpreter exits;
    they see the environment as it was at the first call. Inside `fn` the default process group
    has exactly `world_size` ranks, `RANK`, `WORLD_SIZE` and `LOCAL_RANK` are set, torch uses one thread and
    its random seed is 0. Nothing made from a process group (a mesh, a buffer) may be kept for a later call.

    Functions, classes and data travel by name when the workers can import their module and by value otherwise
    (scripts without a main guard, notebooks, lambdas, closures, test files outside the import path). Workers
    keep imported modules: after editing one in a notebook call `shutdown()`. What `fn` prints is printed
    here, marked with its rank.

    Args:
        fn: Called once on every rank. Its result must be picklable.
        *args: Passed to `fn` on every rank alike.
        world_size: Number of ranks.
        timeout_s: Seconds that all ranks together may take; starting the workers is not counted.

    Returns:
        One result a rank, in rank order.

    Raises:
        WorkerError: If a rank raised or died, with the traceback of every failing rank.
        WorkerTimeout: If ranks were still running after `timeout_s`, with the stacks of each.
        DbufError: If `world_size` is not a positive int, or the caller is itself a rank of a pool.
        ImportError: If cloudpickle is missing.

    Example:
        >>> from torch.distributed import get_rank
        >>> run(lambda x: x + get_rank(), 10, world_size=2)
        [10, 11]
    """
    require_positive(world_size, "world_size", "dbuf.testing.run", DbufError)
    if is_worker():
        raise DbufError(
            explain(
                "dbuf.testing.run",
                "a rank of the pool would start a pool of its own.",
                got=f"a call in process {os.getpid()}, a rank; often one at the top of a module that it imports",
                need="calls from the process that the pool belongs to",
                fix="put the call into a test, or under `if __name__ == '__main__':`",
            )
        )
    return _pool_of(os.getpid()).run(fn, args, world_size, timeout_s)


def shutdown() -> None:
    """End the pool's processes; the next `run` starts new ones."""
    _pool_of(os.getpid()).shutdown()


@functools.cache
def _pool_of(pid: int) -> Pool:
    """The pool of this process: a forked child shares its parent's memory but must not use its workers."""
    pool = Pool()

    def end() -> None:
        if os.getpid() == pid:
            pool.shutdown()

    atexit.register(end)
    return pool


class Pool:
    """Worker processes and the process group that a prefix of them is in."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._lock = threading.Lock()
        self._template: Template | None = None
        self._workers: list[Worker] = []
        self._folder = ""
        self._sender = Sender()
        self._group_size = 0  # ranks in the current default group; 0 when there is none
        self._in_step = True  # whether those ranks have issued the same collectives
        self._cases = 0

    def run(self, fn: Callable[..., T], args: Sequence[object], world_size: int, timeout_s: float) -> list[T]:
        """Run one case; see `dbuf.testing.run`."""
        cloudpickle = load_cloudpickle()
        payload = self._sender.dumps((fn, tuple(args)))
        with self._lock:
            try:
                self._grow(world_size)
                self._regroup(world_size)
                answers = self._run_case(payload, world_size, timeout_s)
            except BaseException:  # a rank hangs or died, or the caller was interrupted: start afresh next time
                self._kill()
                raise
        failures = {rank: a.payload.decode() for rank, a in enumerate(answers) if not a.ok}
        if failures:
            ranks = ", ".join(map(str, failures))
            raise WorkerError(f"{_name(fn)} failed on rank {ranks} of {world_size}.", failures)
        return [cloudpickle.loads(answer.payload) for answer in answers]

    def shutdown(self) -> None:
        """End the workers in step: groups are destroyed after a barrier, then the processes leave."""
        with self._lock:
            try:
                self._leave_group()
                for worker in self._workers:
                    worker.send(Stop())
                for worker in self._workers:
                    worker.wait_exit(_GRACE_S)
            except (WorkerError, OSError):
                pass  # a worker is gone already; the rest is ended below
            finally:
                self._kill()
                self._end_template()

    def _grow(self, world_size: int) -> None:
        """Start workers until there are `world_size`."""
        if not self._folder:
            self._folder = tempfile.mkdtemp(prefix="dbuf-testing-")
        if self._template is not None and self._template.has_exited():
            self._end_template()
        if self._template is None:
            self._template = Template()
        new = range(len(self._workers), world_size)
        try:
            for index in new:
                self._workers.append(Worker.start(index, self._template, Path(self._folder)))
        except WorkerError:
            self._end_template()
            raise
        _collect(self._workers[new.start : world_size], START_TIMEOUT_S, "starting the workers")

    def _regroup(self, world_size: int) -> None:
        """Drop the default group when it does not fit the next case; its ranks make a new one on entry."""
        if self._group_size != world_size or not self._in_step:
            self._leave_group()
            self._group_size = world_size

    def _leave_group(self) -> None:
        members = self._workers[: self._group_size]
        for worker in members:
            worker.send(Leave(self._in_step))
        answers = _collect(members, _LEAVE_TIMEOUT_S, "destroying the process group")
        failures = {rank: a.payload.decode() for rank, a in enumerate(answers) if not a.ok}
        if failures:
            raise WorkerError("dbuf.testing: the process group could not be destroyed.", failures)
        self._group_size, self._in_step = 0, True

    def _run_case(self, payload: bytes, world_size: int, timeout_s: float) -> list[Answer]:
        self._cases += 1
        store = os.path.join(self._folder, f"store-{self._cases}")
        path, cwd = import_path(), os.getcwd()
        workers = self._workers[:world_size]
        for rank, worker in enumerate(workers):
            worker.send(Case(payload, rank, world_size, store, path, cwd))
        try:
            answers = _collect(workers, timeout_s, f"a case on {world_size} ranks")
        finally:
            for worker in workers:
                worker.forward_output()
        self._in_step = all(answer.ok for answer in answers)
        return answers

    def _kill(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers = []
        self._group_size, self._in_step = 0, True
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""

    def _end_template(self) -> None:
        if self._template is not None:
            self._template.kill()
            self._template = None


def _collect(workers: Sequence[Worker], timeout_s: float, what: str) -> list[Answer]:
    """Wait for one answer from each worker.

    Returns when all have answered, well or badly. A worker that died, or that is silent after the time-out or
    after another's failure and a few seconds' grace, is an error.
    """
    answers: dict[int, Answer] = {}
    deaths: dict[int, str] = {}
    waiting: dict[Connection, tuple[int, Worker]] = {w.connection: (i, w) for i, w in enumerate(workers)}
    deadline = time.monotonic() + timeout_s
    failed = False
    while waiting and (left_s := deadline - time.monotonic()) > 0:
        ready = wait(list(waiting), timeout=min(left_s, _POLL_S))
        dead = [c for c, (_, worker) in waiting.items() if c not in ready and worker.has_exited()]
        for connection in [*(c for c in waiting if c in ready), *dead]:
            rank, worker = waiting.pop(connection)
            answer = worker.receive()
            if answer is None:
                deaths[rank] = worker.describe_death()
            else:
                answers[rank] = answer
            if not failed and (answer is None or not answer.ok):
                failed, deadline = True, min(deadline, time.monotonic() + _GRACE_S)
    if not waiting and not deaths:
        return [answers[rank] for rank in range(len(workers))]
    stacks = {rank: worker.stacks() for rank, worker in waiting.values()}
    failures = deaths | {rank: a.payload.decode() for rank, a in answers.items() if not a.ok}
    raise _error(what, timeout_s, failures, stacks)


def _error(what: str, timeout_s: float, failures: dict[int, str], stacks: dict[int, str]) -> WorkerError:
    silent = ", ".join(map(str, sorted(stacks)))
    if not failures:
        return WorkerTimeout(f"dbuf.testing: {what}: rank {silent} still running after {timeout_s:g} s.", {}, stacks)
    headline = f"dbuf.testing: {what}: rank {', '.join(map(str, sorted(failures)))} failed"
    headline += f", rank {silent} did not answer within {_GRACE_S:g} s of it." if stacks else "."
    return WorkerError(headline, failures, stacks)


def _name(fn: Callable[..., object]) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)
