"""Forward and backward of `dbuf.unpack` against one raw `split_with_sizes`, in one run, in turns.

    python examples/benchmarks/unpack.py

64 leaves of 65,536 floats. Prints each ratio of medians, and for comparison that of a slice a leaf; exits with 1 if
unpack takes more than BOUND times the raw split.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch

import dbuf

LEAVES, NUMEL = 64, 65_536
ROUNDS, WARMUP = 40, 5
BOUND = 1.5


def by_unpack(buf: dbuf.DBuffer, grads: list[torch.Tensor]) -> torch.Tensor:
    x = buf.local.detach().requires_grad_()
    leaves = list(dbuf.unpack(dbuf.DBuffer(x, buf.spec)).values())
    return torch.autograd.grad(leaves, x, grads)[0]


def by_split(buf: dbuf.DBuffer, grads: list[torch.Tensor]) -> torch.Tensor:
    x = buf.local.detach().requires_grad_()
    leaves = [part.view(256, -1) for part in x.split_with_sizes([NUMEL] * LEAVES)]
    return torch.autograd.grad(leaves, x, grads)[0]


def by_slices(buf: dbuf.DBuffer, grads: list[torch.Tensor]) -> torch.Tensor:
    x = buf.local.detach().requires_grad_()
    leaves = [x[i * NUMEL : (i + 1) * NUMEL].view(256, -1) for i in range(LEAVES)]
    return torch.autograd.grad(leaves, x, grads)[0]


def medians_ms(functions: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Every function once a round, in turns: what else the machine does hits all of them alike."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for i in range(WARMUP + ROUNDS):
        for name, fn in functions.items():
            start = time.perf_counter()
            fn()
            if i >= WARMUP:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> int:
    torch.set_num_threads(1)
    tensors = {f"w{i}": torch.rand(256, NUMEL // 256) for i in range(LEAVES)}
    buf = dbuf.shard(tensors, dbuf.init_mesh(("dp",), device_type="cpu"), dbuf.RowAtomic())
    grads = [torch.rand_like(leaf) for leaf in dbuf.unpack(buf).values()]
    worst = 0.0
    for mode in ("eager", "compiled"):
        ways = {"unpack": by_unpack, "split": by_split, "slices": by_slices}
        runs = {name: fn if mode == "eager" else dbuf.jit(fn) for name, fn in ways.items()}
        assert torch.equal(runs["unpack"](buf, grads), runs["split"](buf, grads))
        ms = medians_ms({name: lambda fn=fn: fn(buf, grads) for name, fn in runs.items()})
        ratio = ms["unpack"] / ms["split"]
        worst = max(worst, ratio)
        print(
            f"{mode:9} unpack {ms['unpack']:.2f} ms, split_with_sizes {ms['split']:.2f} ms: {ratio:.2f} x"
            f" (bound {BOUND}); a slice a leaf {ms['slices'] / ms['split']:.1f} x"
        )
    return int(worst > BOUND)


if __name__ == "__main__":
    sys.exit(main())
