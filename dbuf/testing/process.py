"""The processes of the pool as the parent sees them: start, talk, look at their stacks, end."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import BinaryIO

from dbuf.testing.protocol import Answer, Case, Leave, Stop, WorkerError
from dbuf.testing.sending import import_path

START_TIMEOUT_S = 180.0
_STACK_WAIT_S = 3.0
_KILL_WAIT_S = 10.0
_TAIL_BYTES = 4000
_SHARED = ("torch._inductor.compile_fx",)
_WORKER_ENV = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
_LAUNCHER_ENV = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Template:
    """The process that workers are forked from, as the parent sees it: they share what it has imported."""

    def __init__(self) -> None:
        """Start the process, in a session of its own: Ctrl-C in the terminal does not reach it."""
        self._control, theirs = socket.socketpair()
        env = {k: v for k, v in os.environ.items() if k not in _LAUNCHER_ENV} | _WORKER_ENV
        env["PYTHONPATH"] = os.pathsep.join([*import_path(), str(Path(__file__).parents[2])])
        self._err = tempfile.TemporaryFile()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-P", "-m", "dbuf.testing.template", str(theirs.fileno()), *_imported()],
                stdin=subprocess.DEVNULL,
                stdout=self._err,
                stderr=self._err,
                env=env,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def fork(self, stack_path: Path, fds: Sequence[int]) -> None:
        """Ask for a worker with these descriptors; see `dbuf.testing.template`."""
        try:
            socket.send_fds(self._control, [os.fsencode(stack_path)], list(fds))
        except OSError:
            raise self._error("is gone") from None

    def read_pid(self, news: Connection) -> int:
        """Wait for the worker that was asked for."""
        try:
            if news.poll(START_TIMEOUT_S):
                _, pid = news.recv()
                return int(pid)
        except (EOFError, OSError):
            raise self._error("is gone") from None
        raise self._error(f"is silent for {START_TIMEOUT_S:g} s")

    def _error(self, what: str) -> WorkerError:
        text = _last_words(self._err)
        return WorkerError(f"dbuf.testing: the process that starts the workers {what}. {text}", {})

    def has_exited(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """End the process; the workers are ended one by one."""
        self._control.close()
        self._process.kill()
        self._process.wait()
        self._err.close()


@dataclasses.dataclass
class Worker:
    """A process started by this pool."""

    index: int
    pid: int
    connection: Connection
    news: Connection
    folder: Path
    code: int | None = None  # once it has ended
    printed: int = 0

    @classmethod
    def start(cls, index: int, template: Template, folder: Path) -> Worker:
        """Start the process; it says hello over the connection."""
        ours, theirs = Pipe()
        news, pipe = Pipe(duplex=False)
        with theirs, pipe, open(folder / f"out-{index}", "wb") as out, open(folder / f"err-{index}", "wb") as err:
            fds = [end.fileno() for end in (theirs, out, err, pipe)]
            template.fork(folder / f"stacks-{index}", fds)
        return cls(index, template.read_pid(news), ours, news, folder)

    def send(self, message: Case | Leave | Stop) -> None:
        """Send a request; a process that is already gone shows when its answer is awaited."""
        try:
            self.connection.send(message)
        except (BrokenPipeError, ConnectionResetError):
            pass

    def receive(self) -> Answer | None:
        """Return the answer that is ready, or None if the process hung up."""
        try:
            answer = self.connection.recv() if self.connection.poll() else None
        except (EOFError, OSError):
            return None
        assert answer is None or isinstance(answer, Answer)
        return answer

    def has_exited(self) -> bool:
        """Whether the process is gone."""
        self.wait_exit(0.0)
        return self.code is not None

    def wait_exit(self, timeout_s: float) -> None:
        """Wait for the process to leave by itself, for a while."""
        if self.code is not None:
            return
        try:
            if self.news.poll(timeout_s):
                _, self.code = self.news.recv()
        except (EOFError, OSError):  # the process that forked it is gone, and with it the news
            if not self._is_running():
                self.code = 1

    def _is_running(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def describe_death(self) -> str:
        """Say how the process ended and what it last wrote to its standard error."""
        self.wait_exit(2.0)
        if self.code is None:
            cause = "hung up but is still there"
        elif self.code < 0:
            cause = f"was killed by {signal.Signals(-self.code).name}"
        else:
            cause = f"exited with code {self.code}"
        with open(self.folder / f"err-{self.index}", "rb") as err:
            return f"The process {cause}. {_last_words(err)}"

    def stacks(self) -> str:
        """Ask a running process for the stacks of its threads."""
        path = self.folder / f"stacks-{self.index}"
        before = path.stat().st_size if path.exists() else 0
        if self.has_exited():
            return self.describe_death()
        os.kill(self.pid, signal.SIGUSR1)
        text = _read_when_settled(path, before).decode(errors="replace")
        threads = [part for part in text.split("\n\n") if "_watch_parent" not in part]
        return "\n\n".join(threads) or "(no stack could be read)"

    def forward_output(self) -> None:
        """Print what the process printed since the last time, each line marked with its rank."""
        with open(self.folder / f"out-{self.index}", "rb") as out:
            out.seek(self.printed)
            text = out.read()
        self.printed += len(text)
        for line in text.decode(errors="replace").splitlines():
            print(f"[rank {self.index}] {line}")

    def kill(self) -> None:
        """End the process and everything it started (compilers), at once."""
        if not self.has_exited():
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self.wait_exit(_KILL_WAIT_S)
        self.connection.close()
        self.news.close()


def _imported() -> list[str]:
    """What takes ranks long to import and is in use here: they may as well share it."""
    return [name for name in _SHARED if name in sys.modules]


def _last_words(err: BinaryIO) -> str:
    err.seek(0)
    text = err.read()[-_TAIL_BYTES:].decode(errors="replace")
    return f"End of its standard error:\n{text.strip() or '(empty)'}"


def _read_when_settled(path: Path, start: int) -> bytes:
    """Return what was appended to `path` after `start`, once it stops growing."""
    deadline = time.monotonic() + _STACK_WAIT_S
    size = -1
    while time.monotonic() < deadline:
        time.sleep(0.1)
        now = path.stat().st_size if path.exists() else 0
        if now > start and now == size:
            break
        size = now
    return path.read_bytes()[start:] if path.exists() else b""
