"""The kernels of compiled programs in tests: a file that compiles imports this, by way of `models` or alone.

g++ does not optimise them, and they are built in the process that asks: the same programs in half the time. What a test
reads from a program (its graph, code, memory) does not depend on it; test_parity.py also compiles as users do.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch._dynamo.config
from functorch.compile import make_boxed_func
from torch._inductor import compile_fx, cpp_builder
from torch._inductor import config as inductor_config

from dbuf.collectives import WAIT_FOR, is_collective

AS_USERS_DO = {"aot_inductor.debug_compile": False, "cpp.simdlen": None}

torch._dynamo.config.run_gc_after_compile = False  # a twentieth of a compile; ranks collect between cases
inductor_config.aot_inductor.debug_compile = True
inductor_config.cpp.simdlen = 1
inductor_config.compile_threads = 1
cpp_builder._get_inductor_debug_symbol_cflags = lambda: ([], [])  # it asks for symbols as well, a quarter of the time


@contextlib.contextmanager
def graphs_alone() -> Iterator[None]:
    """While it is open, programs of `dbuf.jit` run operation by operation what Inductor would make kernels of.

    Everything that dbuf does to a program has been done by then, but for its order. Kernels are two thirds of a
    compile, and the same at any number of ranks: tests that go through many numbers make them at some. With
    DBUF_TEST_KERNELS, as `make exhaustive` sets it, they are made everywhere.
    """
    if os.environ.get("DBUF_TEST_KERNELS"):
        yield
        return

    def run(gm: torch.fx.GraphModule, inputs: Any, **_: Any) -> Callable[[list[Any]], Any]:
        for node in gm.graph.nodes:
            if is_collective(node.target):  # the order of a program has one under way, a graph does not say
                node.append(next(user for user in node.users if user.target is WAIT_FOR))
        gm.recompile()
        return make_boxed_func(gm)

    with mock.patch.object(compile_fx, "compile_fx_inner", run):
        yield
