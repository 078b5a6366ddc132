"""What the pool and its workers say to each other, and the errors the caller sees."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Mapping
from types import ModuleType

from dbuf.errors import explain

_WORKER_PID = "DBUF_TESTING_WORKER_PID"


@dataclasses.dataclass(frozen=True)
class Case:
    """Run one pickled `(fn, args)` as rank `rank` of `world_size`.

    Attributes:
        payload: Cloudpickle of `(fn, args)`.
        rank: The rank that the worker plays.
        world_size: Number of ranks in the default process group.
        store: Path of the file store that the ranks meet in; a new path means a new group.
        sys_path: The caller's import path, so that importable modules travel by name.
        cwd: The caller's working directory.
    """

    payload: bytes
    rank: int
    world_size: int
    store: str
    sys_path: tuple[str, ...]
    cwd: str


@dataclasses.dataclass(frozen=True)
class Leave:
    """Destroy the default process group, after a barrier when all its ranks are known to be in step."""

    in_step: bool


@dataclasses.dataclass(frozen=True)
class Stop:
    """Leave the process."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """A worker's reply: the pickled result, or the text of a traceback.

    Attributes:
        ok: Whether the request succeeded.
        payload: Cloudpickle of the result when `ok`, else the traceback in UTF-8.
    """

    ok: bool
    payload: bytes


def mark_worker() -> None:
    """Remember that this process is a rank of a pool."""
    os.environ[_WORKER_PID] = str(os.getpid())


def is_worker() -> bool:
    """Whether this process is a rank of a pool; one that a rank has started is none."""
    return os.environ.get(_WORKER_PID) == str(os.getpid())


class WorkerError(RuntimeError):
    """A function run on several ranks failed on at least one of them.

    Attributes:
        failures: Rank -> traceback, or the way the process died.
        unanswered: Rank -> stacks of a worker that was still running and was killed.
    """

    def __init__(self, headline: str, failures: Mapping[int, str], unanswered: Mapping[int, str] | None = None) -> None:
        """Compose the message from every failing and every silent rank."""
        self.failures = dict(failures)
        self.unanswered = dict(unanswered or {})
        parts = [headline]
        parts += [_section(f"rank {rank} failed", text) for rank, text in sorted(self.failures.items())]
        parts += [
            _section(f"rank {rank} did not answer, it was here", text) for rank, text in sorted(self.unanswered.items())
        ]
        super().__init__("\n".join(parts))


class WorkerTimeout(WorkerError, TimeoutError):
    """Some ranks were still running when the time was up; their stacks are in the message."""


def load_cloudpickle() -> ModuleType:
    """Import cloudpickle, or say how to get it.

    Raises:
        ImportError: If cloudpickle is not installed.
    """
    try:
        return importlib.import_module("cloudpickle")
    except ImportError as error:
        raise ImportError(
            explain(
                "dbuf.testing.run",
                "a function cannot be sent to the workers.",
                got="no module named 'cloudpickle'",
                need="cloudpickle, which the test extra installs",
                fix="pip install 'dbuf[test]'",
            )
        ) from error


def _section(title: str, text: str) -> str:
    return f"{'-' * 8} {title} {'-' * 8}\n{text.rstrip()}"
