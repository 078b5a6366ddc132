"""Tiny models that several test files train: pure functions of a dict of tensors, and an nn.Module with attention."""

from __future__ import annotations

import functools
import json
import math
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import cheap_kernels  # noqa: F401
import dbuf
import programs
from dbuf import tree

WIDTH, HIDDEN, VOCAB = 6, 10, 11  # odd on purpose: at most world sizes rows do not divide and padding appears
CONTEXT, BATCH = 4, 12  # 12 rows can be shared out evenly over 1, 2, 3 and 4 ranks
Tensors = dict[str, torch.Tensor]


def embed(p: Tensors, tokens: torch.Tensor) -> torch.Tensor:
    return F.embedding(tokens, p["table"])


def block(p: Tensors, h: torch.Tensor) -> torch.Tensor:
    return h + F.linear(p["gain"] * torch.tanh(F.linear(h, p["up"], p["bias"])), p["down"])


def head(p: Tensors, h: torch.Tensor) -> torch.Tensor:
    return F.linear(h * p["scale"], p["out"])


def dropped(p: Tensors, h: torch.Tensor) -> torch.Tensor:
    """A block with dropout between its matmuls."""
    inner = F.dropout(torch.tanh(F.linear(h, p["up"], p["bias"])), 0.5)
    return h + F.linear(p["gain"] * inner, p["down"])


def weights(layers: int = 2, *, width: int = WIDTH, hidden: int = HIDDEN, seed: int = 0) -> dict[str, Tensors]:
    """Group -> name -> tensor; the same numbers on every rank."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.4

    blocks = {
        f"block{i}": {
            "up": normal(hidden, width),
            "bias": normal(hidden),
            "gain": normal() + 1,
            "down": normal(width, hidden),
        }
        for i in range(layers)
    }
    return {
        "embed": {"table": normal(VOCAB, width)},
        **blocks,
        "head": {"scale": normal(width) + 1, "out": normal(VOCAB, width)},
    }


def batch(step: int = 0, rows: int = BATCH, context: int = CONTEXT) -> torch.Tensor:
    """The whole batch of a step; `share` gives a rank's part."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(VOCAB, (rows, context + 1), generator=generator)


def share(whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    return whole.chunk(ranks)[rank].contiguous()


def plain(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Use a function as it is, on plain tensors."""
    return fn


def kept(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Gather once and keep the weights until the backward has used them: what `gathered` is compared with."""

    @functools.wraps(fn)
    def call(bufs: Any, *args: Any) -> Any:
        return fn(dbuf.unpack(dbuf.allgather(bufs)), *args)

    return call


def language_loss(use: Callable[..., Any] = dbuf.gathered, middle: Callable[..., Any] = block) -> Callable[..., Any]:
    """`loss(params, tokens)`: embedding, the blocks, head, cross entropy; `use` makes functions of buffers."""

    def loss_fn(params: Any, tokens: torch.Tensor) -> torch.Tensor:
        h = use(embed)(params["embed"], tokens[:, :-1])
        for name in params:
            if name.startswith("block"):
                h = use(middle)(params[name], h)
        logits = use(head)(params["head"], h)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return loss_fn


class Attention(torch.nn.Module):
    """A transformer block of nested modules, its attention torch's own."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width)
        )

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in self.qkv(self.norm(h)).chunk(3, -1))
        h = h + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return h + self.mlp(h)


def attention_weights(layers: int = 2, width: int = 8) -> tuple[dict[str, Tensors], Callable[..., torch.Tensor]]:
    """Groups of weights of module blocks, and `fn(weights, h)` that runs one of them."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        modules = [Attention(width) for _ in range(layers)]
    groups = {f"block{i}": {k: v.detach() for k, v in m.named_parameters()} for i, m in enumerate(modules)}
    module = modules[0]

    def run(p: Tensors, h: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, p, (h,))

    return groups, run


def shard_groups(groups: dict[str, Any], mesh: Any, placements: Any, **options: Any) -> dict[str, dbuf.DBuffer]:
    """One buffer a group."""
    return {name: dbuf.shard(tensors, mesh, placements, **options) for name, tensors in groups.items()}


def whole(bufs: Any) -> Any:
    """Full tensors of a tree of buffers, whatever their placements: reduced, gathered, unpacked."""
    return tree.map(
        lambda buf: dbuf.unpack(dbuf.allgather(dbuf.allreduce(buf))),
        bufs,
        is_leaf=lambda node: isinstance(node, dbuf.DBuffer),
    )


# Memory, as the allocator sees it.


def allocations(fn: Callable[..., Any]) -> list[int]:
    """Bytes of everything that `fn` allocates in this thread."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        fn()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    sizes = [event["args"]["Bytes"] for event in events if event.get("name") == "[memory]"]
    return [nbytes for nbytes in sizes if nbytes > 0]


class Gathers(TorchDispatchMode):
    """While it is open, remembers the memory of every all-gather's result, without holding it."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[int, StorageWeakRef]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "all_gather_into_tensor" in str(func):
            self.made.append((out.nbytes, StorageWeakRef(out.untyped_storage())))
        return out

    def alive(self, nbytes: int, patience_s: float = 0.5) -> int:
        """How many of that size still exist, once gloo's threads have let go of theirs."""
        deadline = time.monotonic() + patience_s
        while count := sum(size == nbytes and not ref.expired() for size, ref in self.made):
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        return count


_NEW = re.compile(r"(buf\d+) = empty_strided_cpu\(\((.*?)\), \(.*?\), torch\.(\w+)\)")
_COLLECTIVE = re.compile(r"(buf\d+) = torch\.ops\._c10d_functional\.(all_gather|all_to_all|reduce_scatter)\w*\.")
# torch 2.13 writes no dtype: `assert_size_stride(buf0, (8, ), (1, ), 'torch.ops...')`; 2.14 `assert_tensor_metadata`.
_RESULT = re.compile(r"assert_\w+\((buf\d+), \((.*?)\), \(.*?\), (?:torch\.(\w+), )?'torch\.ops\._c10d_functional\.")
_SAME = re.compile(r"(buf\d+) = (?:reinterpret_tensor\()?(buf\d+)\b")


def memory_of(code: str) -> list[dict[str, tuple[str, int]]]:
    """What the program holds after each line of its code: storage -> (kind, bytes).

    The kinds are `"empty"`, `"all_gather"`, `"all_to_all"` and `"reduce_scatter"`. A profiler would miss what
    gloo's threads free. Arguments are not counted. Code is Inductor's for one CPU program, whose collectives move fp32.
    """
    body = code[code.index("def call(") :]
    nbytes = {
        name: _numel(size) * getattr(torch, dtype or "float32").itemsize for name, size, dtype in _RESULT.findall(body)
    }
    storage_of: dict[str, str] = {}
    kind_of: dict[str, tuple[str, int]] = {}
    out = []
    for line in programs.lines_of(body):
        if new := _NEW.search(line):
            name, size, dtype = new.groups()
            storage_of[name], kind_of[name] = name, ("empty", _numel(size) * getattr(torch, dtype).itemsize)
        elif new := _COLLECTIVE.search(line):
            name, kind = new.groups()
            storage_of[name], kind_of[name] = name, (kind, nbytes[name])
        elif (same := _SAME.search(line)) and same.group(2) in storage_of:
            storage_of[same.group(1)] = storage_of[same.group(2)]
            if line.endswith("# reuse"):  # the memory goes on, what was in it does not
                storage = storage_of[same.group(1)]
                kind_of[storage] = ("empty", kind_of[storage][1])
        for name in re.findall(r"\bdel (buf\d+)", line):
            storage_of.pop(name, None)
        out.append({storage: kind_of[storage] for storage in set(storage_of.values())})
    return out


def peak_of_run(fn: Callable[[], object]) -> int:
    """The most bytes that the program `fn` calls holds at any of its lines: what `memory_of` reads from code, run."""
    peak = 0

    def line(frame: Any, event: str, arg: Any) -> Any:
        nonlocal peak
        held = [x.untyped_storage() for name, x in frame.f_locals.items() if name.startswith("buf")]
        peak = max(peak, sum({storage._cdata: storage.nbytes() for storage in held}.values()))
        return line

    def call(frame: Any, event: str, arg: Any) -> Any:
        generated = frame.f_code.co_name == "call" and frame.f_globals.get("empty_strided_cpu") is not None
        return line if generated else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        fn()
    finally:
        sys.settrace(before)
    return peak


def _numel(size: str) -> int:
    return math.prod(int(n) for n in size.replace(" ", "").split(",") if n)
