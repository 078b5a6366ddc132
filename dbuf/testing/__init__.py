"""Run functions on several ranks, compare what comes back, draw random inputs: a test kit, for your code too."""

from dbuf.testing.pool import run, shutdown
from dbuf.testing.protocol import WorkerError, WorkerTimeout

__all__ = ["WorkerError", "WorkerTimeout", "run", "shutdown"]
