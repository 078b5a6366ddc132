"""The benchmark of a step runs, its lines train alike, and it counts memory exactly."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "benchmarks"


@pytest.mark.slow
@pytest.mark.exhaustive  # the benchmark itself prints the losses
def test_lines_that_need_no_compiler_end_at_one_loss() -> None:
    lines = ["DDP fused", "FSDP2 fused", "dbuf zero3 eager"]
    command = [sys.executable, str(FOLDER / "step.py"), "--quick", "--lines", *lines]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(re.search(rf"^{line} .* ([\d.]+)$", done.stdout, re.MULTILINE)[1]) for line in lines]  # type: ignore[index]
    assert max(losses) - min(losses) < 1e-4


@pytest.mark.slow
def test_memory_is_counted_where_it_is_allocated() -> None:
    program = """
import torch
from _memory import Memory
memory = Memory("cpu")
before = memory.in_use()
x = torch.zeros(1000)
y = torch.zeros(500)
del y
print(memory.in_use() - before, memory.most() - before)
memory.forget()
del x
print(memory.in_use() - before, memory.most() - before)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=FOLDER, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["4000", "6000", "0", "4000"]
