"""One process of the pool: it waits for cases and plays a rank in each."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import random
import select
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from dbuf.compat import call_with_room, destroy_subgroups, forget_programs, release_groups
from dbuf.testing.protocol import Answer, Case, Leave, Stop, load_cloudpickle, mark_worker

_CASES_PER_SWEEP = 50


def main(connection_fd: int, stack_path: str) -> None:
    """Serve the parent over an inherited socket until it says stop or is gone.

    Args:
        connection_fd: File descriptor of the worker's end of the socket pair.
        stack_path: File that the stacks of all threads are dumped to on `SIGUSR1`.
    """
    os.set_inheritable(connection_fd, False)
    stacks = open(stack_path, "wb", buffering=0)  # open as long as the process lives
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    threading.Thread(target=_watch_parent, args=(connection_fd, stack_path), daemon=True).start()
    torch.set_num_threads(1)
    load_cloudpickle()
    mark_worker()
    environment = dict(os.environ)
    _tidy(sweep=False)
    with Connection(connection_fd) as connection:
        connection.send(Answer(True, b""))
        call_with_room(_serve, connection, environment)


def _watch_parent(connection_fd: int, stack_path: str) -> None:
    """Leave at once when the parent is gone, whatever the main thread is doing."""
    poller = select.poll()
    poller.register(connection_fd, 0)  # a hang-up is reported without being asked for
    poller.poll()
    shutil.rmtree(os.path.dirname(stack_path), ignore_errors=True)  # the pool's folder: nobody else is left to
    os._exit(1)


def _serve(connection: Connection, environment: dict[str, str]) -> None:
    cases = 0
    while True:
        try:
            message = connection.recv()
        except EOFError:
            return
        if isinstance(message, Stop):
            return
        if isinstance(message, Case):
            cases += 1
            reply = _run_case(message, environment, sweep=cases % _CASES_PER_SWEEP == 0)
        else:
            reply = _leave(message)
        connection.send(reply)


def _run_case(case: Case, environment: dict[str, str], sweep: bool) -> Answer:
    cloudpickle = load_cloudpickle()
    try:
        _enter(case, environment)
        fn, args = cloudpickle.loads(case.payload)
        _adopt_main(fn)
        return Answer(True, cloudpickle.dumps(fn(*args)))
    except BaseException:  # also SystemExit and a test library's own control flow: the caller decides
        return Answer(False, traceback.format_exc().encode())
    finally:
        _tidy(sweep)


def _adopt_main(fn: Callable[..., object]) -> None:
    """Give `__main__` the globals of a function that was sent by value: Dynamo looks them up there."""
    if getattr(fn, "__module__", None) == "__main__":
        main_names = vars(sys.modules["__main__"])
        main_names.update((k, v) for k, v in getattr(fn, "__globals__", {}).items() if not k.startswith("__"))


def _enter(case: Case, environment: dict[str, str]) -> None:
    """Make this process rank `case.rank`: paths, environment, torch's modes and seeds, the default process group."""
    sys.path[:] = case.sys_path
    importlib.invalidate_caches()
    os.chdir(case.cwd)
    os.environ.clear()
    os.environ.update(
        environment,
        RANK=str(case.rank),
        LOCAL_RANK=str(case.rank),
        WORLD_SIZE=str(case.world_size),
        LOCAL_WORLD_SIZE=str(case.world_size),
    )
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    random.seed(0)
    torch.manual_seed(0)
    if dist.is_initialized():
        destroy_subgroups()  # all ranks are through the case that made them; gloo's threads wake 100 times a second
    else:
        dist.init_process_group("gloo", init_method=f"file://{case.store}", world_size=case.world_size, rank=case.rank)


def _leave(message: Leave) -> Answer:
    try:
        if dist.is_initialized():
            if message.in_step:
                dist.barrier()
            dist.destroy_process_group()
        return Answer(True, b"")
    except Exception:
        return Answer(False, traceback.format_exc().encode())


def _tidy(sweep: bool) -> None:
    """Forget what the case compiled, so that recompile limits do not leak into the next, and drop garbage.

    What outlives a case is mostly the compiler's own: half a second to look through, as long as many cases take. So it
    is set aside, and looked through in a sweep.
    """
    forget_programs()
    if sweep:
        gc.unfreeze()
    gc.collect()
    release_groups()
    gc.freeze()
