"""What calling a compiled step costs the host: a buffer of 300 tensors against one tensor of equal bytes.

    python examples/benchmarks/host_cost.py

Times whole calls of a compiled element-wise update on buffers so small that the kernel costs next to nothing, in
turns. Prints ratios of medians; exits with 1 if a call on 300 tensors takes more than BOUND times one on 1 tensor,
or if an equal spec that is another object does.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch

import dbuf
from dbuf import tree

TENSORS, NUMEL = 300, 16
ROUNDS, WARMUP, CALLS = 60, 5, 20
BOUND = 2.0


def buffer(tensors: int) -> dbuf.DBuffer:
    values = {f"w{i}": torch.ones(TENSORS * NUMEL // tensors) for i in range(tensors)}
    return dbuf.shard(values, dbuf.init_mesh(("dp",), device_type="cpu"), dbuf.RowAtomic())


def update(params: dbuf.DBuffer, grads: dbuf.DBuffer) -> dbuf.DBuffer:
    return tree.map(lambda p, g: p - 0.1 * g, params, grads)


def update_unpacked(params: dbuf.DBuffer, grads: dbuf.DBuffer) -> list[torch.Tensor]:
    """Takes every tensor out: what a step pays a tensor when it touches them one by one."""
    return [p - 0.1 * g for p, g in zip(tree.leaves(dbuf.unpack(params)), tree.leaves(dbuf.unpack(grads)), strict=True)]


def medians_us(functions: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Microseconds a call; every function in every round, in turns."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for i in range(WARMUP + ROUNDS):
        for name, fn in functions.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                fn()
            if i >= WARMUP:
                times[name].append((time.perf_counter() - start) / CALLS * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> int:
    torch.set_num_threads(1)
    one, many, again = buffer(1), buffer(TENSORS), buffer(TENSORS)
    one_grads, many_grads = buffer(1), buffer(TENSORS)
    assert again.spec == many.spec and again.spec is not many.spec
    # A program for each: Dynamo tries the programs of one function in turn.
    of_one, of_many, unpacked = dbuf.jit(update), dbuf.jit(update), dbuf.jit(update_unpacked)
    us = medians_us(
        {
            "one": lambda: of_one(one, one_grads),
            "many": lambda: of_many(many, many_grads),
            "again": lambda: of_many(again, many_grads),
            "unpacked": lambda: unpacked(many, many_grads),
            "plain": lambda: update(many, many_grads),
        }
    )
    assert (of_one.compiles, of_many.compiles) == (1, 1)
    many_ratio, again_ratio = us["many"] / us["one"], us["again"] / us["one"]
    print(f"1 tensor {us['one']:.0f} us a call; the same uncompiled {us['plain']:.0f} us")
    print(f"{TENSORS} tensors {us['many']:.0f} us: {many_ratio:.2f} x (bound {BOUND})")
    print(f"{TENSORS} tensors, equal spec, another object {us['again']:.0f} us: {again_ratio:.2f} x (bound {BOUND})")
    each = (us["unpacked"] - us["many"]) / TENSORS
    print(f"all {TENSORS} unpacked and updated one by one {us['unpacked']:.0f} us: {each:.2f} us a tensor more")
    return int(max(many_ratio, again_ratio) > BOUND)


if __name__ == "__main__":
    sys.exit(main())
