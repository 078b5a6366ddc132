"""The ladder of examples: each file runs on ranks of the test pool, and some in a process of their own."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cheap_kernels
import dbuf.testing

ROOT = Path(__file__).resolve().parents[1]
LADDER = sorted((ROOT / "examples").glob("[0-9]*.py"))
# In a process of their own: one for all, and the one that starts a pool itself. Compiling there is shown by the sample
# of the README, and torchrun by train_lm.py, in their tests.
ALONE = ("01_buffer", "07_test_your_own")
RANKS = {"07_test_your_own": (), "09_matrix_optimizer": (2,), "10_owners": (1,)}
ON_RANKS = [(file, ranks) for file in LADDER for ranks in RANKS.get(file.stem, (1, 2, 3))]
COMPILED = ("05_zero3_step", "09_matrix_optimizer")


def _run_main(file: str) -> None:
    """Run an example in this process, as a module of its own name: compiled code looks its globals up there."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with cheap_kernels.graphs_alone():
        module.main()


def test_ladder_is_numbered_without_gaps() -> None:
    assert [int(file.name[:2]) for file in LADDER] == list(range(1, len(LADDER) + 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_alone_under_plain_python(name: str) -> None:
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout


@pytest.mark.parametrize(
    ("file", "ranks"),
    [
        pytest.param(file, ranks, marks=[pytest.mark.slow] if file.stem in COMPILED else [], id=f"{file.stem}-{ranks}")
        for file, ranks in ON_RANKS
    ],
)
def test_on_several_ranks(file: Path, ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Programs without kernels; where a page shows what is printed, it is that."""
    dbuf.testing.run(_run_main, str(file), world_size=ranks)
    out = capsys.readouterr().out.replace("[rank 0] ", "")
    assert out
    if (file.stem, ranks) == ("05_zero3_step", 2):
        (report,) = re.findall(
            r"^```\n(collective .*?)```$", (ROOT / "docs" / "jit.md").read_text(), re.MULTILINE | re.DOTALL
        )
        assert report.strip() in out
