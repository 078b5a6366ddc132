"""A step of Muon on sharded matrices: each at its owner, against gathering all and repeating the work on every rank.

python examples/benchmarks/muon.py              # four ranks with one thread each, 32 square matrices
python examples/benchmarks/muon.py --width 64 --rounds 1
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

import dbuf
import dbuf.testing
from dbuf import RowAtomic, TensorAtomic, optim, plan_tensor_atomic

OUT = Path(__file__).parents[2] / "docs" / "benchmarks" / "muon.json"


def naive(grads: Any) -> Any:
    """What one writes first: gather every gradient, orthogonalise all of them on every rank, keep a part."""
    whole = dbuf.allgather(grads)
    matrices = dbuf.unpack(whole)
    batch = optim.orthogonalize(torch.stack(list(matrices.values())))
    done = dbuf.pack(dict(zip(matrices, batch.unbind(), strict=True)), like=whole)
    return dbuf.view(done, grads.placements)


def by_owner() -> Callable[[Any], Any]:
    tx = optim.by_owner(lambda w: (), lambda g, state: (optim.orthogonalize(g), state), cost="newton_schulz")
    return lambda grads: tx.update(grads, tx.init(grads), grads)[0]


def flops_of(fn: Callable[[Any], Any], grads: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        fn(grads)
    return counter.get_total_flops()


def bytes_of(step: Any, grads: Any, ranks: int) -> int:
    """What a rank receives from others: a gather (n - 1) / n of its result, an all-to-all as much of its own."""
    return sum(c.nbytes * (ranks - 1) // ranks for c in dbuf.inspect(step, grads).sequence)


def measure(matrices: int, width: int, rounds: int) -> dict[str, Any]:
    mesh = dbuf.init_mesh(("dp",))
    ranks = mesh.size()
    generator = torch.Generator().manual_seed(0)
    tensors = {f"w{i}": torch.randn(width, width, generator=generator) for i in range(matrices)}
    rows = dbuf.shard(tensors, mesh, RowAtomic())
    owners = plan_tensor_atomic([(width, width)] * matrices, ranks, tensor_owners=[i % ranks for i in range(matrices)])
    resting = dbuf.shard(tensors, mesh, TensorAtomic(), layout=owners)
    lines = {
        "gather and repeat": (naive, rows),
        "by owner": (by_owner(), rows),
        "by owner, resting TensorAtomic": (by_owner(), resting),
    }
    steps = {name: (dbuf.jit(fn), grads) for name, (fn, grads) in lines.items()}
    dbuf.testing.assert_close(steps["by owner"][0](rows).local, steps["gather and repeat"][0](rows).local, rtol=2e-2)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, (step, grads) in steps.items():
            torch.distributed.barrier()
            start = time.perf_counter()
            step(grads)
            torch.distributed.barrier()
            times[name].append(time.perf_counter() - start)
    base = times["gather and repeat"][1:]
    return {
        name: {
            "ms": 1e3 * statistics.median(times[name][1:]),
            "speedup": statistics.median(b / t for b, t in zip(base, times[name][1:], strict=True)),
            "flops": flops_of(lines[name][0], grads),
            "bytes": bytes_of(step, grads, ranks),
        }
        for name, (step, grads) in steps.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--matrices", type=int, default=32)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    of_rank = dbuf.testing.run(measure, args.matrices, args.width, args.rounds, world_size=args.ranks, timeout_s=900)
    total = args.matrices * args.width**2 * 4
    print(f"{args.matrices} matrices of {args.width} x {args.width}, {total / 1e6:.1f} MB, on {args.ranks} ranks")
    print(f"{'line':32} {'ms':>8} {'speedup':>8} {'GFLOP a rank':>13} {'MB a rank':>10} {'of 2 P / W':>11}")
    for name in of_rank[0]:
        found = [rank[name] for rank in of_rank]
        flops, nbytes = max(f["flops"] for f in found), max(f["bytes"] for f in found)
        times = f"{found[0]['ms']:8.1f} {found[0]['speedup']:8.2f}"
        part = nbytes / (2 * total / args.ranks)
        print(f"{name:32} {times} {flops / 1e9:13.2f} {nbytes / 1e6:10.2f} {part:11.2f}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"args": {**vars(args), "out": args.out.name}, "ranks": of_rank}, indent=1) + "\n")


if __name__ == "__main__":
    main()
