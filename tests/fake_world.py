"""Every rank of a simulated (2, 4) world in turn, in one process: prints the collectives of each rank's program.

    python tests/fake_world.py zero3

Under torch's fake process group nothing is sent; shapes, graphs and generated code are those of the rank.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import dbuf
import models
import programs
import test_schedule as schedule
from dbuf.train import Strategy

OUTER, INNER = 2, 4


def program_of(rank: int, name: str) -> list[tuple[str, str, int]]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=OUTER * INNER)
    mesh = dbuf.init_mesh(("outer", "inner"), (OUTER, INNER), device_type="cpu")
    strategy = Strategy.zero3(axes=2) if name == "zero3" else getattr(Strategy, name)()
    state, optimizer = schedule._state(strategy, mesh, ("padded", "unpadded", "owners"), blocks=1)
    tokens = models.share(models.batch(rows=16), rank, OUTER * INNER)
    code = programs.code_of(schedule._step(strategy, optimizer), state, tokens)
    axes = {mesh.get_group(axis).group_name: axis for axis in ("outer", "inner")}
    dist.destroy_process_group()
    return [(op, axes.get(group, "other"), size) for op, group, size in programs.collectives(code)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps([program_of(rank, sys.argv[1]) for rank in range(OUTER * INNER)]))
