"""`import dbuf` is silent, cheap, and touches neither process groups nor a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGET_S = 0.15
ATTEMPTS = 4  # even CPU time grows on a busy machine: the claim is about the best run

TIMED = """
import time
import torch, torch.distributed.tensor, torch._dynamo
start = time.process_time()
import dbuf
print(time.process_time() - start)
"""

QUIET = """
import torch
import dbuf
assert not torch.distributed.is_initialized(), "a process group"
assert not torch.cuda.is_initialized(), "CUDA"
"""


def _python(source: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_import_is_silent_and_starts_nothing() -> None:
    done = _python(QUIET)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_import_costs_little_over_torch() -> None:
    times_s: list[float] = []
    while len(times_s) < ATTEMPTS and min(times_s, default=BUDGET_S) >= BUDGET_S:
        done = _python(TIMED)
        assert done.returncode == 0, done.stderr
        times_s.append(float(done.stdout))
    assert min(times_s) < BUDGET_S, f"seconds over torch in {ATTEMPTS} runs: {times_s}"
