"""Steps on 1,024 ranks, compiled for one of these in one process: prints what each holds and sends.

    python tests/thousand_ranks.py

Under torch's fake process group nothing is sent; shapes, graphs and generated code are those of the rank.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import cheap_kernels
import dbuf
import programs
import test_reports_memory as memory

RANKS, RANK = 1024, 1022
MESHES = {"zero3": (RANKS,), "hsdp": (32, 32)}


def step_on(mesh: tuple[int, ...], strategy: str) -> dict[str, Any]:
    """What `test_reports_memory` measures, the collectives of the generated code, and seconds of tracing."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=RANKS)
    held, fn, *args = memory.prepare(memory.case(strategy, mesh))
    start = time.perf_counter()
    with cheap_kernels.graphs_alone():
        report = dbuf.inspect(fn, *args)
    seconds = time.perf_counter() - start
    fn, *args = memory.prepare(memory.case(strategy, mesh))[1:]
    written = [(op, numel) for op, _, numel in programs.collectives(programs.code_of(fn, *args))]
    dist.destroy_process_group()
    return held | memory.seen(report) | {"written": written, "seconds": seconds}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({strategy: step_on(mesh, strategy) for strategy, mesh in MESHES.items()}))
