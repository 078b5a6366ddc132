"""The main job, run as a user runs it: in processes of its own, under plain python and under torchrun."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = str(ROOT / "examples" / "train_lm.py")
TINY = ["--steps=12", "--width=32", "--layers=1", "--heads=2", "--batch=4", "--context=32", "--lr=1e-2"]
KEYS = {
    "heldout_nats_per_byte",
    "first_heldout",
    "steps",
    "tokens_per_s",
    "collectives",
    "scalar_collectives",
    "graph_breaks",
    "compiles",
    "ranks",
    "parameters",
    "train_s",
    "first_step_s",
}


LOSES_ITS_PEERS_THEN_IS_INTERRUPTED = """
import os, signal, threading
from _report import run_until_interrupted

def main():
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    raise RuntimeError("Connection closed by peer")

run_until_interrupted(main)
"""


def _command(ranks: int) -> list[str]:
    if ranks == 1:
        return [sys.executable, SCRIPT]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*torchrun, SCRIPT]


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    quick = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "AOT_INDUCTOR_DEBUG_COMPILE": "1"}  # kernels are not optimised
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **quick}


def _train(*args: object, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    command = [*_command(ranks), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=_environment(), check=False)


def _check_run(done: subprocess.CompletedProcess[str], out: Path, ranks: int) -> dict[str, object]:
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.strip().splitlines()
    result = json.loads(lines[-1])
    assert set(result) >= KEYS
    assert (result["steps"], result["ranks"]) == (12, ranks)
    assert 5.3 < result["first_heldout"] < 5.8  # ln 256 = 5.545: nothing is known before the first step
    assert result["heldout_nats_per_byte"] < result["first_heldout"] - 0.5
    assert f"loss curve: {out / 'train_lm.png'}" in lines
    assert (out / "train_lm.png").read_bytes().startswith(b"\x89PNG")
    assert any("sample" in line for line in lines)
    assert "Traceback" not in done.stderr
    return result


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """A run in one process, uncompiled, and its result."""
    out = tmp_path_factory.mktemp("alone")
    done = _train(*TINY, "--eager", f"--out={out}")
    return done, _check_run(done, out, ranks=1)


@pytest.mark.slow
def test_eager_in_one_process(alone: Any) -> None:
    assert len(re.findall("held-out loss", alone[0].stderr)) == 13


@pytest.mark.slow
def test_compiled_by_two_processes_equals_one(alone: Any, tmp_path: Path) -> None:
    """One graph, compiled once; the batch is cut between ranks, so two ranks see the losses of one (uncompiled)."""
    both = _check_run(_train(*TINY, f"--out={tmp_path}", ranks=2), tmp_path, ranks=2)
    assert (both["graph_breaks"], both["compiles"]) == (0, 1)
    assert both["heldout_nats_per_byte"] == pytest.approx(alone[1]["heldout_nats_per_byte"], abs=1e-3)
    # Three groups: block and head are gathered twice; the embedding's backward reads no weight.
    assert both["collectives"] == {"all_gather": 5, "reduce_scatter": 3}
    assert both["scalar_collectives"] == {"all_reduce": 2}  # the loss and the gradients' norm


@pytest.mark.slow
def test_any_number_of_processes(tmp_path: Path) -> None:
    """Three ranks and two microbatches round the batch of 4 up to 6, so that their shares are equal."""
    options = ["--strategy=hfsdp", "--microbatches=2", "--dtype=bfloat16", "--clip=1", "--optimizer=muon"]
    done = _train(*TINY, *options, "--eager", f"--out={tmp_path}", ranks=3)
    _check_run(done, tmp_path, ranks=3)
    assert "3 ranks, 6 x 32 bytes a step" in done.stderr


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--data={tmp}/none.txt"], "train_lm: cannot read {tmp}/none.txt: No such file or directory"),
        (["--data={tmp}"], "train_lm: cannot read {tmp}: Is a directory"),
        (["--data={tmp}/empty.txt"], "train_lm: {tmp}/empty.txt is empty"),
        (
            ["--data={tmp}/short.txt", "--batch=4", "--context=32"],
            "train_lm: {tmp}/short.txt has 100 bytes, and one batch and one held-out window take 165",
        ),
        (["--out={tmp}/empty.txt"], "train_lm: cannot write to {tmp}/empty.txt: File exists"),
        (["--steps=0"], "train_lm: --steps is 0, and must be at least 1"),
        (["--width=36", "--heads=4"], "train_lm: --width is 36, and must be a multiple of twice --heads, 8"),
        (["--microbatches=0"], "train_lm: --microbatches is 0, and must be at least 1"),
        (["--epochs=3"], "train_lm: unrecognized arguments: --epochs=3"),
    ],
)
def test_one_line_says_what_is_wrong(
    args: list[str],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_bytes(b"x" * 100)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(sys, "argv", ["train_lm.py", *(arg.format(tmp=tmp_path) for arg in args)])
    with pytest.raises(SystemExit) as end:
        importlib.import_module("train_lm").main()
    assert end.value.code == 2
    printed = capsys.readouterr()
    assert printed.err == line.format(tmp=tmp_path) + "\n"
    assert printed.out == ""


def test_a_missing_file_ends_the_process_with_one_line(tmp_path: Path) -> None:
    done = _train(f"--data={tmp_path}/none.txt")
    line = f"train_lm: cannot read {tmp_path}/none.txt: No such file or directory\n"
    assert (done.returncode, done.stderr, done.stdout) == (2, line, "")


@pytest.mark.slow
def test_shortest_text_that_trains(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(165)))
    done = _train(*TINY, "--steps=1", "--eager", f"--data={text}", f"--out={tmp_path}")
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 1


@pytest.mark.slow
def test_one_line_from_two_processes(tmp_path: Path) -> None:
    """torchrun adds its own report of the failed processes; the script's line comes once."""
    done = _train(f"--data={tmp_path}/none.txt", ranks=2)
    assert done.returncode != 0
    assert re.findall("^train_lm: .*", done.stderr, re.MULTILINE) == [
        f"train_lm: cannot read {tmp_path}/none.txt: No such file or directory"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_ends_at_once_with_one_line(ranks: int, tmp_path: Path) -> None:
    command = [*_command(ranks), *TINY, "--steps=1000000", "--eager", f"--out={tmp_path}"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=_environment(), start_new_session=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "held-out loss" in line:
            break
    time.sleep(1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: every process of the job
    _, err = process.communicate(timeout=60)
    assert re.findall("^train_lm: .*", err, re.MULTILINE) == ["train_lm: interrupted, nothing saved"]
    assert process.returncode != 0
    assert "train_lm.py" not in re.sub("(?m)^.*examples/train_lm.py FAILED$", "", err)  # no frames of ours
    assert ranks > 1 or process.returncode == 130


def test_ctrl_c_that_comes_after_what_it_did_to_another_rank() -> None:
    command = [sys.executable, "-c", LOSES_ITS_PEERS_THEN_IS_INTERRUPTED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT / "examples", check=False)
    assert done.stderr == "\ntrain_lm: interrupted, nothing saved\n"
    assert done.returncode == 130
