"""`python -m dbuf.testing.template`: imports torch once for all, and forks a worker of the pool when asked for one."""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection

from dbuf.testing import worker

_BYTES = 65_536
_FDS = 4


def main(control_fd: int, modules: Sequence[str]) -> None:
    """Serve the pool until it hangs up.

    A request is the path of a file for stacks, with four descriptors: the worker's end of its connection, its standard
    output and error, and a pipe. The pipe says `("started", pid)`, and `("ended", code)` once the process is gone.

    Args:
        control_fd: File descriptor of this process's end of a socket pair.
        modules: What the workers shall have imported as well.
    """
    for name in modules:
        importlib.import_module(name)
    os.set_inheritable(control_fd, False)
    control = socket.socket(fileno=control_fd)
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    pipes: dict[int, Connection] = {}
    gc.freeze()  # memory that all share is not touched by their collections
    while True:
        ready, _, _ = select.select([control, wake], [], [])
        if wake in ready:
            wake.recv(_BYTES)
            _report_ended(pipes)
        if control in ready:
            request, fds, _, _ = socket.recv_fds(control, _BYTES, _FDS)
            if not request:
                return
            connection, out, err, pipe = fds
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for end in (control, wake, woken):
                    end.close()
                for other in pipes.values():
                    other.close()
                _become_worker(connection, out, err, Connection(pipe, readable=False), request.decode())
            pipes[pid] = Connection(pipe, readable=False)
            for fd in (connection, out, err):
                os.close(fd)


def _become_worker(connection: int, out: int, err: int, pipe: Connection, stack_path: str) -> None:
    """Serve as a rank, in a session of its own: Ctrl-C in the terminal does not reach it."""
    code = 1
    try:
        os.setsid()
        for fd, stream in ((out, sys.stdout), (err, sys.stderr)):
            os.dup2(fd, stream.fileno())
            os.close(fd)
        with pipe:
            pipe.send(("started", os.getpid()))
        worker.main(connection, stack_path)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # no static destructors: a library thread still alive would end in `terminate called`


def _report_ended(pipes: dict[int, Connection]) -> None:
    while pipes:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with pipes.pop(pid) as pipe:
            try:
                pipe.send(("ended", os.waitstatus_to_exitcode(status)))
            except BrokenPipeError:
                pass  # the pool has ended this worker and did not wait for the news


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
