"""Run functions on several ranks, compare what comes back, draw random inputs: for your own tests too."""

from dbuf.testing import strategies
from dbuf.testing.compare import assert_bitwise, assert_close, assert_same_on_all_ranks
from dbuf.testing.pool import run, shutdown
from dbuf.testing.protocol import WorkerError, WorkerTimeout

__all__ = [
    "WorkerError",
    "WorkerTimeout",
    "assert_bitwise",
    "assert_close",
    "assert_same_on_all_ranks",
    "run",
    "shutdown",
    "strategies",
]
