"""What compiling a step costs as the model gets deeper, or the ranks more: unrolled, compiled once, a block at a time.

    python examples/benchmarks/compile_time.py                       # 2, 4, 8, 16, 32 blocks, three lines
    python examples/benchmarks/compile_time.py --layers 4 32 --lines "compiled once"
    python examples/benchmarks/compile_time.py --layers 2 --lines unrolled --ranks 2 64 1024 16384 --name compile_ranks

A ZeRO-3 step with AdamW of the model of `step.py`, as rank 0 of 2, or of any number, under torch's fake process group:
the program is that of so many ranks, and one process compiles it. Each point is a process of its own with an empty
cache and one compile thread. `cpu_s` is the processor time of the first step, that of the C++ compiler included;
`wall_s` depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LINES = ("unrolled", "compiled once", "block loop")
LAYERS = (2, 4, 8, 16, 32)
OUT = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"


def cpu_s() -> float:
    """Processor time of this process and of those it waited for."""
    used = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in used)


def measure(line: str, layers: int, ranks: int) -> dict[str, Any]:
    """Build a model of `layers` blocks and time its first step."""
    import _model
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import dbuf

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    mesh = dbuf.init_mesh(("dp",), device_type="cpu")
    size = _model.Size(layers=layers, width=64, heads=4, batch=2, context=16)
    params = {name: dbuf.shard(group, mesh, dbuf.RowAtomic()) for name, group in _model.weights(size, "cpu").items()}
    optimizer = dbuf.optim.adamw(1e-3)
    state = optimizer.init(params)
    window = torch.zeros(size.batch, size.context + 1, dtype=torch.int64)
    ways: dict[str, Callable[..., Any]] = {
        "unrolled": lambda fn: fn,
        "compiled once": dbuf.compiled_once,
        "block loop": lambda fn: torch.compile(fn, fullgraph=True),
    }
    block = ways[line](_model.block)

    def loss_fn(params: Any, window: torch.Tensor) -> torch.Tensor:
        use = lambda fn: dbuf.gathered(block if fn is _model.block else fn)  # noqa: E731
        return _model.loss_fn(params, window, size.heads, use)

    def update(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return dbuf.optim.apply_updates(params, updates), state

    def step(params: Any, state: Any, window: torch.Tensor) -> Any:
        loss, grads = dbuf.value_and_grad(loss_fn)(params, window)
        return *update(params, state, grads), loss

    jitted = dbuf.jit(update if line == "block loop" else step, donate_argnums=(0, 1))
    start, start_cpu = time.perf_counter(), cpu_s()
    if line == "block loop":
        _, grads = dbuf.value_and_grad(loss_fn)(params, window)
        jitted(params, state, grads)
    else:
        jitted(params, state, window)
    found = {"cpu_s": round(cpu_s() - start_cpu, 1), "wall_s": round(time.perf_counter() - start, 1)}
    report = None if line == "block loop" else jitted.inspect(params, state, window).collectives
    return {"line": line, "layers": layers, "ranks": ranks, **found, "collectives": report}


def point(line: str, layers: int, ranks: int) -> dict[str, Any]:
    """`measure` in a process of its own, with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        env = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, __file__, "--point", line, str(layers), str(ranks)]
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--lines", nargs="+", default=LINES, choices=LINES)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--name", default="compile_time", help="of the JSON in docs/benchmarks")
    parser.add_argument("--point", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.point:
        print(json.dumps(measure(args.point[0], *map(int, args.point[1:]))))
        return
    import torch

    machine = {"torch": torch.__version__, "cores": os.cpu_count(), "machine": platform.machine()}
    out = OUT / f"{args.name}.json"
    points = []
    print(f"{'blocks':>6} {'ranks':>6} {'line':14} {'cpu s':>7} {'wall s':>7}")
    for layers, ranks, line in itertools.product(args.layers, args.ranks, args.lines):
        found = point(line, layers, ranks)
        points.append(found)
        print(f"{layers:6} {ranks:6} {line:14} {found['cpu_s']:7} {found['wall_s']:7}", flush=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({**machine, "points": points}, indent=1) + "\n")
    cpu = {(p["line"], p["layers"]): p["cpu_s"] for p in points}
    few, many = min(args.layers, key=lambda n: abs(n - 4)), max(args.layers)
    if few != many:
        for line in args.lines:
            print(f"{line}: {many} blocks take {cpu[line, many] / cpu[line, few]:.2f} x the time of {few}")


if __name__ == "__main__":
    main()
