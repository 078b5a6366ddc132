"""What generated code does, line by line: collectives, their waits, gathered buffers alive."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch._inductor.graph import GraphLowering

import dbuf

_START = re.compile(r"(?:(\w+) = )?torch\.ops\._c10d_functional\.(\w+?)_?\.default\((.*)\)$")
_GATHERS = "_c10d_functional.all_gather"  # in the comment above an exchange that once was a gather
_WAIT = re.compile(r"torch\.ops\._c10d_functional\.wait_tensor\.default\((\w+)\)")
_NEW = re.compile(r"(\w+) = (?:empty_strided_\w+|reinterpret_tensor)\((?:\w+, )?\((.*?)\), ")
_ASSERT = re.compile(r"assert_(?:size_stride|tensor_metadata)\((\w+), \((.*?)\), ")
_SAME = re.compile(r"(\w+) = (\w+)(?:;|$)")


class _Written(Exception):
    """Ends a compilation whose code nobody runs."""


def code_of(fn: Callable[..., Any], *args: Any) -> str:
    """The program that Inductor writes for a jitted function, which is neither compiled further nor run."""
    found: list[str] = []

    def write(self: GraphLowering) -> None:
        found.append(self.codegen()[0].value)
        raise _Written

    with mock.patch.object(GraphLowering, "compile_to_module", write), inductor_config.patch(fx_graph_cache=False):
        try:
            fn(*args)
        except Exception:
            if not found:
                raise
    (code,) = found
    return code[code.index("    def call(") :]


def inspect_in_turns(calls: dict[str, tuple[Any, ...]]) -> dict[str, dbuf.Report]:
    """Reports of `(fn, *args)` whose graph is the same on every rank: each rank reads some, all of them read all."""
    out = {}
    for i, (name, (fn, *args)) in enumerate(calls.items()):
        if i % dist.get_world_size() == dist.get_rank():
            out[name] = dbuf.inspect(fn, *args)
        else:
            dbuf.check({f"argument {k}": arg for k, arg in enumerate(args)})  # the exchange of the rank that does look
    return out


def collectives(code: str) -> list[tuple[str, str, int]]:
    """Each collective in the order of its start: operation, process group, elements of its larger side."""
    numel: dict[str, int] = {}
    out: list[tuple[str, str, int]] = []
    lines = [line.strip() for line in code.splitlines()]
    for i, line in enumerate(lines):
        if new := _NEW.search(line):
            numel[new[1]] = _numel(new[2])
        elif same := _SAME.match(line):
            numel[same[1]] = numel.get(same[2], 0)
        elif check := _ASSERT.search(line):
            numel.setdefault(check[1], _numel(check[2]))
        if (start := _START.match(line)) and "wait" not in start[2]:
            given = re.match(r"\w+", start[3].replace("reinterpret_tensor(", ""))
            result = next((_numel(c[2]) for after in lines[i : i + 3] if (c := _ASSERT.search(after))), 0)
            assert given is not None
            ranks = [int(n) for n in re.findall(r", (\d+), '", start[3])]
            here = result if start[2].startswith("all_gather") else numel.get(given[0], 0)
            if start[2].startswith("reduce_scatter"):
                here = result * ranks[0]
            out.append((start[2], re.findall(r"'(\w+)'", start[3])[-1], here))
    return out


def gathered_alive(code: str) -> int:
    """The most all-gathered buffers that exist between their start and the last line that reads them."""
    lines = lines_of(code)
    spans = []
    for i, line in enumerate(lines):
        if starts_gather(line) and (start := _START.match(line)):
            name = re.compile(rf"\b{start[1]}\b")
            reads = [j for j, text in enumerate(lines) if name.search(text) and not _hands_over(text)]
            spans.append((i, max(reads)))
    return max(sum(first <= i <= last for first, last in spans) for i, _ in spans)


def behind(code: str) -> list[tuple[str, int]]:
    """For each collective that is waited for: operation, and calls of kernels between its start and its wait."""
    started: dict[str, tuple[str, int]] = {}
    out: list[tuple[str, int]] = []
    kernels = 0
    for line in lines_of(code):
        kernels += bool(re.match(r"cpp_fused|extern_kernels|buf\d+ = torch\.ops\.aten", line))
        if wait := _WAIT.search(line):
            if wait[1] in started:
                kind, at = started.pop(wait[1])
                out.append((kind, kernels - at))
        elif start := _START.match(line):
            name = start[1] or start[3].split(",")[0]
            started[name] = (start[2], kernels)
    return out


def under_way(code: str) -> int:
    """The most collectives between their start and their wait."""
    now: set[str] = set()
    most = 0
    for line in (line.strip() for line in code.splitlines()):
        if wait := _WAIT.search(line):
            now.discard(wait[1])
        elif start := _START.match(line):
            now.add(start[1] or start[3].split(",")[0])
            most = max(most, len(now))
    return most


def lines_of(code: str) -> list[str]:
    """The lines, in which an exchange that once was a gather (see `schedule.pieces`) is an `all_gather_in_pieces`."""
    out, comment = [], ""
    for line in (line.strip() for line in code.splitlines()):
        comment = line if line.startswith("# Topologically") else comment
        out.append(line.replace("all_to_all_single", "all_gather_in_pieces") if _GATHERS in comment else line)
    return out


def starts_gather(line: str) -> bool:
    """Whether one of `lines_of` starts a gather."""
    start = _START.match(line)
    return start is not None and start[2].startswith("all_gather")


def _hands_over(line: str) -> bool:
    """Whether a line only frees a buffer, or gives its memory to another."""
    return line.startswith("del ") or "; del " in line


def _numel(size: str) -> int:
    return math.prod(int(n) for n in size.replace(" ", "").split(",") if n)
