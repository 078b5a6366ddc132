"""The ladder of examples: each file runs under plain python, on ranks of the test pool, and one under torchrun."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import dbuf.testing

ROOT = Path(__file__).resolve().parents[1]
LADDER = sorted((ROOT / "examples").glob("0*.py"))
NEEDS_RANKS_OF_ITS_OWN = {"07_test_your_own"}  # it starts a pool itself
COMPILES = {"05_zero3_step"}


def _run(command: list[str]) -> str:
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def _run_as_main(file: str) -> None:
    """Run an example in this process as `python` would; compiled code looks its globals up in the module's name."""
    runpy.run_path(file, run_name="__main__")


def _ids(file: Path) -> str:
    return file.stem


def test_ladder_is_numbered_without_gaps() -> None:
    assert [int(file.name[:2]) for file in LADDER] == list(range(1, len(LADDER) + 1))


@pytest.mark.slow
@pytest.mark.parametrize("file", LADDER, ids=_ids)
def test_alone_under_plain_python(file: Path) -> None:
    assert _run([sys.executable, str(file)])


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, marks=[pytest.mark.slow] if file.stem in COMPILES else [], id=file.stem)
        for file in LADDER
        if file.stem not in NEEDS_RANKS_OF_ITS_OWN
    ],
)
def test_on_several_ranks(file: Path, world_size: int) -> None:
    dbuf.testing.run(_run_as_main, str(file), world_size=world_size)


@pytest.mark.slow
def test_under_torchrun_it_prints_the_report_that_the_docs_show() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    out = _run([*torchrun, str(ROOT / "examples" / "05_zero3_step.py")])
    (report,) = re.findall(
        r"^```\n(collective .*?)```$", (ROOT / "docs" / "jit.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert report.strip() in out
