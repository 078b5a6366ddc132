"""`python -m dbuf`: what it prints, as text and JSON, and what it refuses with exit code 2."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dbuf
from dbuf.cli import main
from dbuf.models import read_model
from dbuf.reports.memory import plan_memory
from dbuf.train import Strategy

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp")


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    assert main(arguments) == code
    return capsys.readouterr()


def columns(line: str) -> list[str]:
    return [cell for cell in line.split("  ") if cell.strip()]


def test_layout_prints_a_line_a_unit(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = run(capsys, "layout", "--model", "deepseek-v3", "--ranks", "256")
    lines = out.splitlines()
    assert err == "" and "671,026,419,200 parameters on 256 ranks" in lines[0]
    (dense,) = [line for line in lines if line.startswith("dense_block")]
    assert [cell.strip() for cell in columns(dense)] == [
        "dense_block", "3", "583,483,392", "792,723,456", "35.861%", "1.0000", "67", "5.91 MiB", "512",
    ]  # fmt: skip
    assert lines[-1].startswith("total") and len({len(line) for line in lines[2:-1]}) == 1


@pytest.mark.parametrize("how", ["padded", "compact", "unpadded"])
def test_json_is_what_the_report_says(capsys: pytest.CaptureFixture[str], how: str) -> None:
    out, _ = run(
        capsys, "layout", "--model", "gpt-oss-20b", "--mesh", "4x16", "--row-dims", "2", "--layout", how, "--json"
    )
    found = json.loads(out)
    for unit, one in zip(read_model("gpt-oss-20b").units, found["units"], strict=True):
        layout = (
            dbuf.plan_compact(unit.shapes, 64, row_dims=2).layout
            if how == "compact"
            else dbuf.plan_row_atomic(unit.shapes, 64, row_dims=2, shard_layout=dbuf.ShardLayout(how))
        )
        assert one["report"] == dbuf.report(layout, itemsize=2).as_dict()
        assert (one["name"], one["count"], one["dtype"]) == (unit.name, unit.count, "bfloat16")
    sizes = sum(one["count"] * one["report"]["size"] for one in found["units"])
    assert found["total"]["size"] == sizes and found["mesh"] == [4, 16]


def test_placements_say_how_many_segments(capsys: pytest.CaptureFixture[str]) -> None:
    def segments(*options: str) -> int:
        out, _ = run(capsys, "layout", "--model", "qwen3-8b", "--mesh", "4x8", "--json", *options)
        return int(json.loads(out)["units"][0]["report"]["segments"])

    assert segments() == 32
    assert segments("--placement", "replicate,row") == 8
    assert segments("--placement", "replicate,tensor") == 8
    assert segments("--placement", "block,block", "--block", "32") == 32


def test_a_block_that_does_not_divide_prints_na_and_names_the_tensor(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = run(capsys, "layout", "--model", "gpt-oss-20b", "--ranks", "8", "--block", "128", code=2)
    (block,) = [line for line in out.splitlines() if line.startswith("block")]
    (embed,) = [line for line in out.splitlines() if line.startswith("embed")]
    assert block.count("n/a") == 6 and "n/a" not in embed
    assert "tensor block.sinks of shape (64,)" in err and "block_size=64" in err


def test_text_and_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, _ = run(capsys, "layout", "--model", "llama3-8b", "--ranks", "4", "--plot")
    assert "rank 0 |aaa" in out and "a  q (4096, 4096)" in out
    out, _ = run(capsys, "layout", "--model", "llama3-8b", "--ranks", "4", "--plot", "--unit", "head")
    assert "b  head (128256, 4096)" in out or "head (128256, 4096)" in out
    file = tmp_path / "layout.png"
    out, err = run(capsys, "layout", "--model", "llama3-8b", "--ranks", "4", "--plot", str(file), "--json")
    assert file.read_bytes().startswith(b"\x89PNG") and json.loads(out)["total"]["units"] == 34
    assert str(file) in err
    _, err = run(capsys, "layout", "--model", "llama3-8b", "--ranks", "4", "--plot", "--unit", "tail", code=2)
    assert "no such unit" in err and "block, embed, head" in err


def test_plan_prints_a_line_a_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("plan", "--model", "llama3-8b", "--mesh", "8x8", "--optimizer", "lion", "--microbatches", "2")
    out, _ = run(capsys, *options)
    names = [line.split()[0] for line in out.splitlines() if line.startswith(STRATEGIES)]
    assert names == list(STRATEGIES)
    found = json.loads(run(capsys, *options, "--json")[0])["strategies"]
    plan = plan_memory(
        read_model("llama3-8b").units,
        (8, 8),
        Strategy.hsdp(),
        optimizer="lion",
        microbatches=2,
        compute_dtype=torch.bfloat16,
    )
    assert list(found) == names and found["hsdp"] == plan.as_dict()
    assert list(json.loads(run(capsys, *options[:3], "--ranks", "8", "--json")[0])["strategies"]) == names[:4]


BAD = {
    "unknown model": (("--model", "lama3-8b", "--ranks", "8"), "no such model.*deepseek-v3"),
    "zero ranks": (("--model", "llama3-8b", "--ranks", "0"), "--ranks is not a positive int"),
    "no ranks": (("--model", "llama3-8b"), "how many ranks"),
    "a mesh of other ranks": (("--model", "llama3-8b", "--ranks", "8", "--mesh", "3x3"), "does not have that many"),
    "a mesh of words": (("--model", "llama3-8b", "--mesh", "4xtwo"), "not given by numbers"),
    "a mesh with nothing": (("--model", "llama3-8b", "--mesh", "4x0"), "--mesh is not a positive int"),
    "no rows in a block": (("--model", "llama3-8b", "--ranks", "8", "--block", "0"), "--block is not a positive int"),
    "no dimension": (("--model", "llama3-8b", "--ranks", "8", "--row-dims", "0"), "row_dims is not a positive int"),
    "no such file": (("--model", "nowhere/config.json", "--ranks", "8"), "cannot build nowhere/config.json"),
    "no such group": (("--model", "llama3-8b", "--ranks", "8", "--group-by", "x*"), "matches no module"),
}
BAD_LAYOUT = {
    "unknown placement": (("--model", "llama3-8b", "--ranks", "8", "--placement", "col"), "no such placement"),
    "a block of what": (("--model", "llama3-8b", "--ranks", "8", "--placement", "block"), "a block has how many rows"),
    "one placement of two": (
        ("--model", "llama3-8b", "--mesh", "2x4", "--placement", "row"),
        "one placement for a mesh",
    ),
    "a cut inside": (("--model", "llama3-8b", "--mesh", "2x4", "--placement", "row,replicate"), "suffix|inner"),
}
BAD_PLAN = {
    "unknown optimizer": (("--model", "llama3-8b", "--ranks", "8", "--optimizer", "adam"), "no such optimizer"),
    "no microbatch": (
        ("--model", "llama3-8b", "--ranks", "8", "--microbatches", "0"),
        "microbatches is not",
    ),
    "an odd block": (("--model", "gpt-oss-20b", "--ranks", "8", "--block", "128"), "does not divide"),
}
CASES = [(c, *v) for c in ("layout", "plan") for v in BAD.values()]
CASES += [("layout", *v) for v in BAD_LAYOUT.values()] + [("plan", *v) for v in BAD_PLAN.values()]


@pytest.mark.parametrize("command, options, message", CASES)
def test_bad_input_is_one_clear_error(
    capsys: pytest.CaptureFixture[str], command: str, options: tuple[str, ...], message: str
) -> None:
    out, err = run(capsys, command, *options, code=2)
    assert re.search(message, err, re.DOTALL) and "try:" in err and "Traceback" not in err
    assert err.count("got:") == 1 or "n/a" in out


def test_a_corrupt_header(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(b"\x10")
    _, err = run(capsys, "layout", "--model", str(tmp_path / "m.safetensors"), "--ranks", "8", code=2)
    assert "m.safetensors is no safetensors file" in err


@pytest.mark.parametrize("arguments", [(), ("draw",), ("layout", "--ranks", "8"), ("layout", "--ranks", "many")])
def test_what_argparse_refuses(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2 and "usage:" in capsys.readouterr().err


@pytest.mark.slow
def test_it_runs_as_a_module_and_survives_head() -> None:
    command = [sys.executable, "-m", "dbuf", "layout", "--model", "llama3-8b", "--ranks"]
    done = subprocess.run([*command, "8"], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[-1].startswith("total") and done.stderr == ""
    assert subprocess.run([*command, "0"], capture_output=True, timeout=120).returncode == 2
    text = " ".join([*command, "4096", "--plot"])
    piped = subprocess.run(f"{text} | head -1", shell=True, capture_output=True, text=True, timeout=120)
    assert piped.stderr == "" and piped.stdout.startswith("llama3-8b")
