"""A training step by every way there is to shard it, in one run, in turns.

    python examples/benchmarks/step.py                    # two ranks with one thread each, all lines, then scaling
    python examples/benchmarks/step.py --quick            # a small model, few lines, few rounds
    python examples/benchmarks/step.py --lines floor "FSDP2 fused" "dbuf zero3" --scaling

Every line trains the same model from the same weights on the same data with the same AdamW, so all end at the same
loss. The lines run in turns, a few steps each a round, in the same processes: whatever else the machine does hits all
of them alike, and ratios are medians of ratios within a round. On GPUs it is one rank a GPU, NCCL and bf16.

Writes step.json and step.png into docs/benchmarks, and prints a table:

    ms         a step: median, least and most over the rounds
    x floor    against the model's compute and the optimizer's work on a rank's share, in one compiled program on all
               ranks at once with no communication
    x FSDP2    how many times faster than the fastest FSDP2 line
    cpu ms     processor time of a step on all threads of rank 0, waiting left out: what a loaded machine cannot blur
    peak MB    the most bytes of tensors that the line needs, its weights and optimizer state included: torch's own
               allocations, counted where they are made (see _memory.py)
    compile s  from building the line to the end of its second step
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _lines_dbuf import LINES as OURS
from _lines_torch import LINES as THEIRS
from _lines_torch import Setup
from _memory import Memory, build
from _model import Size, batches
from _pictures import picture
from torch.distributed.device_mesh import init_device_mesh

LINES: dict[str, Callable[[Setup], Any]] = {**THEIRS, **OURS}
QUICK = ["floor", "FSDP2 fused", "dbuf zero3"]
SCALING = ["floor", "DDP fused", "FSDP2 fused", "FSDP2 blocks fused", "dbuf ddp", "dbuf zero3"]
OUT = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"


def main() -> None:
    args = arguments()
    gpus = torch.cuda.device_count()
    if not gpus:
        build()
    size = Size(layers=2, width=64) if args.quick else Size(layers=args.layers)
    result: dict[str, Any] = {"machine": machine(gpus), "size": vars(size), "command": command()}
    result["step"] = launch(args.ranks or (gpus or 2), args, size, args.lines)
    print(table(result["step"]), flush=True)
    if args.scaling:
        lines = [line for line in SCALING if line in args.lines]
        result["scaling"] = {}
        for ranks in [n for n in (1, 2, 4, 8) if n <= (gpus or 4)]:
            result["scaling"][ranks] = launch(ranks, args, size, lines)
            print(f"{ranks} ranks\n{table(result['scaling'][ranks])}", flush=True)
    if not args.quick:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "step.json").write_text(json.dumps(result, indent=1) + "\n")
        picture(result, args.out / "step.png")


def launch(ranks: int, args: argparse.Namespace, size: Size, lines: list[str]) -> list[dict[str, Any]]:
    """Run the lines on that many processes and return rank 0's rows."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        rows = Path(folder) / "rows.json"
        mp.spawn(worker, (ranks, port, args, size, lines, rows), ranks)
        return json.loads(rows.read_text())


def worker(rank: int, ranks: int, port: int, args: Any, size: Size, lines: list[str], rows: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    cuda = torch.cuda.is_available()
    device = f"cuda:{rank}" if cuda else "cpu"
    torch._inductor.config.compile_threads = 1  # or its threads of the one rank slow the other
    torch._dynamo.config.recompile_limit = 64
    if cuda:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    memory = Memory(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=20))
    mesh = init_device_mesh("cuda" if cuda else "cpu", (ranks,), mesh_dim_names=("dp",))
    setup = Setup(size, mesh, device, torch.bfloat16 if cuda else torch.float32)
    race = Race(setup, memory, args.steps)
    for name in lines:
        race.enter(name, LINES[name])
    for i in range(args.rounds):
        race.round(i, args.rounds)
    if rank == 0:
        rows.write_text(json.dumps(race.rows()))
    dist.barrier()
    dist.destroy_process_group()


class Race:
    """The lines of one process, and what was measured of them."""

    def __init__(self, setup: Setup, memory: Memory, steps: int) -> None:
        self.setup, self.memory, self.steps = setup, memory, steps
        self.data = batches(setup.size, setup.rank, setup.device)
        self.runs: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
        self.found: dict[str, dict[str, Any]] = {}
        self.failed: dict[str, str] = {}

    def enter(self, name: str, build: Callable[[Setup], Any]) -> None:
        """Build a line, let it compile, and measure its memory alone."""
        gc.collect()
        before, start = self.memory.in_use(), time.perf_counter()
        try:
            run = build(self.setup)
            for batch in self.data[:2]:
                run(batch)
        except Exception as error:  # a line that this torch cannot run is listed as such; all ranks fail alike
            self.failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
            self._say(f"{name}: {self.failed[name]}")
            return
        self.wait()
        compile_s = time.perf_counter() - start
        gc.collect()
        self.memory.forget()
        for batch in self.data[2:4]:
            run(batch)
        self.wait()
        self.runs[name] = run
        peak = (self.memory.most() - before) / 1e6
        self.found[name] = {"ms": [], "cpu_ms": [], "peak_mb": peak, "compile_s": compile_s}
        self._say(f"{name}: ready after {compile_s:.0f} s")

    def round(self, i: int, rounds: int) -> None:
        """A few steps of each line; every other round backwards, so that no line always follows the same one."""
        for name in list(self.runs)[:: 1 if i % 2 else -1]:
            self.wait()
            start, cpu_start = time.perf_counter(), time.process_time()
            for k in range(self.steps):
                loss = self.runs[name](self.data[(i * self.steps + k) % len(self.data)])
            self.synchronize()
            cpu = time.process_time() - cpu_start
            self.wait()
            self.found[name]["ms"].append((time.perf_counter() - start) / self.steps * 1e3)
            self.found[name]["cpu_ms"].append(cpu / self.steps * 1e3)
            if i == rounds - 1:  # the mean over ranks, which some lines return already
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                self.found[name]["loss"] = mean.item() / self.setup.ranks

    def synchronize(self) -> None:
        if self.setup.device != "cpu":
            torch.cuda.synchronize()

    def wait(self) -> None:
        self.synchronize()
        dist.barrier()

    def rows(self) -> list[dict[str, Any]]:
        floor = self.found.get("floor", {"ms": []})["ms"]
        peers = [name for name in self.found if name.startswith("FSDP2")]
        best = min(peers, key=lambda name: statistics.median(self.found[name]["ms"]), default=None)
        return [{"line": name, **self._row(name, floor, best)} for name in self.found] + [
            {"line": name, "failed": why} for name, why in self.failed.items()
        ]

    def _row(self, name: str, floor: list[float], best: str | None) -> dict[str, Any]:
        row = self.found[name]
        return {
            "ms": [statistics.median(row["ms"]), min(row["ms"]), max(row["ms"])],
            "to_floor": ratio(row["ms"], floor),
            "to_fsdp2": ratio(self.found[best]["ms"], row["ms"]) if best else None,
            "cpu_ms": statistics.median(row["cpu_ms"]),
            "peak_mb": row["peak_mb"],
            "compile_s": row["compile_s"],
            "loss": row["loss"],
            "rounds": row["ms"],
        }

    def _say(self, text: str) -> None:
        if self.setup.rank == 0:
            print(text, flush=True)


def ratio(ones: list[float], others: list[float]) -> float | None:
    return statistics.median(a / b for a, b in zip(ones, others, strict=True)) if others else None


def table(rows: list[dict[str, Any]]) -> str:
    head = f"{'':26} {'ms':>7} {'least':>7} {'most':>7} {'x floor':>8} {'x FSDP2':>8} {'cpu ms':>7}"
    lines = [f"{head} {'peak MB':>8} {'compile s':>9} {'loss':>7}"]
    for row in rows:
        if "failed" in row:
            lines.append(f"{row['line']:26} {row['failed']}")
            continue
        ms = " ".join(f"{x:7.1f}" for x in row["ms"])
        ratios = " ".join(f"{row[key]:8.3f}" if row[key] else f"{'':8}" for key in ("to_floor", "to_fsdp2"))
        rest = f"{row['cpu_ms']:7.1f} {row['peak_mb']:8.1f} {row['compile_s']:9.1f} {row['loss']:7.4f}"
        lines.append(f"{row['line']:26} {ms} {ratios} {rest}")
    return "\n".join(lines)


def machine(gpus: int) -> dict[str, Any]:
    names = [torch.cuda.get_device_name(i) for i in range(gpus)]
    return {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "gpus": names} | {
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def command() -> str:
    import sys

    return " ".join(["python examples/benchmarks/step.py", *sys.argv[1:]])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A training step by every way there is to shard it.")
    add = parser.add_argument
    add("--lines", nargs="+", metavar="LINE", help=f"which; all of: {', '.join(LINES)}")
    add("--rounds", type=int, help="of turns, by default 20")
    add("--steps", type=int, default=3, help="a line takes a turn")
    add("--layers", type=int, default=Size.layers, help="of the model, by default %(default)s")
    add("--ranks", type=int, help="processes, by default 2, or one a GPU")
    add("--scaling", action="store_true", help="then the same batch a rank on 1, 2, 4 ranks")
    add("--quick", action="store_true", help="a small model, few lines and rounds; writes nothing")
    add("--out", type=Path, default=OUT, metavar="DIR", help="for step.json and step.png")
    args = parser.parse_args()
    args.lines = args.lines or (QUICK if args.quick else list(LINES))
    args.rounds = args.rounds or (2 if args.quick else 20)
    unknown = set(args.lines) - set(LINES)
    if unknown:
        parser.error(f"no such line: {', '.join(sorted(unknown))}; there are {', '.join(LINES)}")
    return args


if __name__ == "__main__":
    main()
