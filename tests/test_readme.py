"""What the README and the pages under docs/ claim by code or by link: samples run, links lead somewhere."""

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
README = ROOT / "README.md"
PAGES = sorted(page for page in (ROOT / "docs").rglob("*.md") if "benchmarks" not in page.parts)
BLOCK = re.compile(r"^(<!-- runnable -->\n)?```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(\s*([^)\s]+)\s*\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def _blocks(page: Path, runnable: bool = False) -> list[str]:
    return [code for mark, code in BLOCK.findall(page.read_text()) if mark or not runnable]


def _id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _run_file(file: str, name: str) -> None:
    # A name of its own, and not `__main__`: Dynamo remembers the module that it first found by a name.
    runpy.run_path(file, run_name=name)


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = HEADING.findall(FENCED.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.slow  # a process of its own that compiles
def test_first_sample_runs_in_one_plain_process_and_its_loss_falls(tmp_path: Path) -> None:
    sample = _blocks(README)[0]
    assert sample.count("\n") < 40
    file = tmp_path / "step.py"
    file.write_text(sample)
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    losses = [float(loss) for loss in re.findall(r"^step +\d+: loss (\d+\.\d+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 4 and losses[-1] < losses[0] / 2, done.stdout


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "testing.md"], ids=_id)
def test_samples_of_tests_pass(page: Path, tmp_path: Path) -> None:
    (code,) = [block for block in _blocks(page) if "def test_" in block]
    file = tmp_path / "sample.py"
    file.write_text(code)
    names = runpy.run_path(str(file))
    (test,) = [name for name in names if name.startswith("test_")]
    names[test]()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if page.stem in ("jit", "testing") else [], id=_id(page))
        for page in PAGES
        if _blocks(page, runnable=True)
    ],
)
def test_marked_samples_run(page: Path, ranks: int, tmp_path: Path) -> None:
    for i, code in enumerate(_blocks(page, runnable=True)):
        file = tmp_path / f"sample_{i}.py"
        file.write_text(code)
        dbuf.testing.run(_run_file, str(file), f"{page.stem}_{i}_on_{ranks}", world_size=ranks)


def test_whole_samples_are_run() -> None:
    """A block that begins with an import claims to run; without the mark only a sample of a test may."""
    for page in PAGES:
        for mark, code in BLOCK.findall(page.read_text()):
            assert mark or "def test_" in code or not code.startswith("import"), f"{_id(page)}: unmarked\n{code}"


@pytest.mark.parametrize("page", [README, *PAGES], ids=_id)
def test_local_links_exist(page: Path) -> None:
    for link in LINK.findall(FENCED.sub("", page.read_text())):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{_id(page)} links to {link}"
        if anchor:
            assert anchor in _anchors(target), f"{_id(page)} links to {link}, and there is no such heading"
