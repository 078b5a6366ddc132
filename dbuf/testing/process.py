"""One worker process as the parent sees it: start, talk, look at its stacks, end."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from dbuf.testing.protocol import Answer, Case, Leave, Stop
from dbuf.testing.sending import import_path

_STACK_WAIT_S = 3.0
_TAIL_BYTES = 4000
_WORKER_ENV = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
_LAUNCHER_ENV = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclasses.dataclass
class Worker:
    """A process started by this pool, in a session of its own: Ctrl-C in the terminal does not reach it."""

    index: int
    process: subprocess.Popen[bytes]
    connection: Connection
    folder: Path
    printed: int = 0

    @classmethod
    def start(cls, index: int, folder: str) -> Worker:
        """Start the process; it says hello over the connection once it has imported torch."""
        ours, theirs = Pipe()
        home = Path(folder)
        env = {k: v for k, v in os.environ.items() if k not in _LAUNCHER_ENV} | _WORKER_ENV
        env["PYTHONPATH"] = os.pathsep.join([*import_path(), str(Path(__file__).parents[2])])
        command = [sys.executable, "-u", "-P", "-m", "dbuf.testing.worker"]
        with open(home / f"out-{index}", "wb") as out, open(home / f"err-{index}", "wb") as err:
            process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(home / f"stacks-{index}")],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=env,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        theirs.close()
        return cls(index, process, ours, home)

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
        return self.process.poll() is not None

    def wait_exit(self, timeout_s: float) -> None:
        """Wait for the process to leave by itself, for a while."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass

    def describe_death(self) -> str:
        """Say how the process ended and what it last wrote to its standard error."""
        self.wait_exit(2.0)
        code = self.process.returncode
        if code is None:
            cause = "hung up but is still there"
        elif code < 0:
            cause = f"was killed by {signal.Signals(-code).name}"
        else:
            cause = f"exited with code {code}"
        text = (self.folder / f"err-{self.index}").read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
        return f"The process {cause}. End of its standard error:\n{text.strip() or '(empty)'}"

    def stacks(self) -> str:
        """Ask a running process for the stacks of its threads."""
        path = self.folder / f"stacks-{self.index}"
        before = path.stat().st_size if path.exists() else 0
        try:
            self.process.send_signal(signal.SIGUSR1)
        except ProcessLookupError:
            return self.describe_death()
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
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self.process.wait()
        self.connection.close()


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
