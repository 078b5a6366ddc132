"""Of Dynamo and AOTAutograd: what is traced, as what, and with which constants."""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar, cast

import torch
import torch._dynamo.config as dynamo_config
import torch._dynamo.utils as dynamo_utils
import torch._functorch.config as functorch_config
from torch._dynamo.exc import BackendCompilerFailed as BackendFailed
from torch._dynamo.exc import TorchRuntimeError, Unsupported
from torch._library import opaque_object
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.traceback import get_current_meta

__all__ = [
    "BackendFailed",
    "TracingFailed",
    "allow_in_graph",
    "call_with_side_effects",
    "compile_once",
    "compile_program",
    "forget_programs",
    "graph_breaks",
    "kept_in_backward",
    "merging_trace_length",
    "register_constant",
    "trace_autograd",
]

TracingFailed = (Unsupported, TorchRuntimeError)
"""What a trace ends with when the function cannot be traced, or an operation of it fails (2.13, 2.14)."""

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")


def register_constant(cls: type[_T], members: tuple[str, ...]) -> type[_T]:
    """Make instances of `cls` compile-time constants that Dynamo guards by one `__eq__`.

    The named methods run for real while tracing, and their results are constants of the program. torch 2.13 calls
    this `register_opaque_type(typ="value")`, 2.14 `register_custom_class(typ="constant")`. A class without an
    `__fx_repr__` of its own, the expression that stands for it in generated code, is found again by its hash.
    """
    if not hasattr(cls, "__fx_repr__"):
        cls.__fx_repr__ = _name_constant  # type: ignore[attr-defined]
    table = {name: opaque_object.MemberType.USE_REAL for name in members}
    if hasattr(opaque_object, "register_custom_class"):
        opaque_object.register_custom_class(cls, typ="constant", members=table)
    else:
        opaque_object.register_opaque_type(cls, typ="value", members=table)
    return cls


@functools.cache
def _constants() -> dict[str, Any]:
    """What generated code may ask for by name, until `forget_programs`."""
    return {}


def constant(name: str) -> Any:
    """The object that `_name_constant` gave this name; torch's caches can import this function, but no instance."""
    return _constants()[name]


def _name_constant(self: Any) -> tuple[str, dict[str, Any]]:
    name = f"{type(self).__name__}_{hash(self) & 0xFFFFFFFFFFFFFFFF:x}"
    while _constants().get(name, self) != self:
        name += "_"
    _constants()[name] = self  # the last of equal ones: a mesh equals one whose groups have been destroyed
    return f"constant({name!r})", {"constant": constant}


def forget_programs() -> None:
    """Drop what was compiled, by `torch.compiler.reset`, and the constants of it, which keep meshes and groups."""
    torch.compiler.reset()
    _constants().clear()


class trace_autograd:
    """While it is open, Dynamo traces `torch.autograd.grad` into the graph (2.13: off, and not patchable inside).

    Every call of a compiled step enters it; torch's own `config.patch` takes 18 us for what is 3 us by hand.
    """

    def __enter__(self) -> None:
        self._before = dynamo_config.trace_autograd_ops
        dynamo_config.trace_autograd_ops = True

    def __exit__(self, *_: object) -> None:
        dynamo_config.trace_autograd_ops = self._before


def compile_program(fn: Callable[..., _R], *, dynamic: bool | None, backend: Callable[..., Any]) -> Callable[..., _R]:
    """`torch.compile(fullgraph=True)` with a cache and a recompile limit of its own (2.13: absent from the stubs).

    Dynamo remembers which sizes have changed by the file, line and name of a function (2.13, 2.14), so that of two
    closures the second would be compiled for sizes that changed in the first. Each gets a name of its own.
    """
    assert isinstance(fn, types.FunctionType)
    code = fn.__code__.replace(co_name=f"{fn.__name__}_{next(_NUMBERS)}")
    own = types.FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    own.__kwdefaults__ = fn.__kwdefaults__
    return cast(
        Callable[..., _R],
        torch.compile(own, fullgraph=True, dynamic=dynamic, backend=backend, isolate_recompiles=True),  # type: ignore[call-overload]
    )


_NUMBERS = itertools.count()


def allow_in_graph(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """`torch.compiler.allow_in_graph`, which is untyped: Dynamo puts calls of `fn` into its graph whole."""
    return cast(Callable[_P, _R], torch.compiler.allow_in_graph(fn))  # type: ignore[no-untyped-call]


def call_with_side_effects(fn: Callable[..., _R], *args: Any) -> _R:
    """Call `fn`, which changes objects from outside of a traced `checkpoint` and changes them back (2.13, 2.14).

    Dynamo refuses such changes, as it cannot repeat them when it recomputes; here nothing is left to repeat.
    """
    return dynamo_utils._disable_side_effect_safety_checks_for_current_subtracer(fn, *args)


def compile_once(fn: Callable[..., _R], *args: Any) -> _R:
    """Call `fn` as a `torch.compiler.nested_compile_region`, each call of which is traced (2.13, 2.14).

    AOTAutograd merges equal regions. Dynamo would do so earlier: from the third call on it would copy the graph of an
    earlier one, with results that no gradient passes through, so that `autograd.grad` found its inputs unused. It
    does not copy where a result is no tensor; so one is none. Dynamo takes a function of a module only, not a closure.
    """
    return cast(_R, _REGION(fn, *args)[0])


def _region(fn: Callable[..., _R], *args: Any) -> tuple[_R, int]:
    return fn(*args), 0


_REGION = torch.compiler.nested_compile_region(_region)


def merging_trace_length() -> int | None:
    """The nodes so far of the graph that is traced, if equal ones are merged later (2.13, 2.14); otherwise None.

    AOTAutograd merges equal nodes before it cuts a graph into forward and backward.
    """
    mode = get_proxy_mode()
    return None if mode is None or not functorch_config.cse else len(mode.tracer.graph.nodes)


@contextlib.contextmanager
def kept_in_backward() -> Iterator[None]:
    """What AOTAutograd traces meanwhile in a backward stays in the backward graph, whatever it depends on.

    It goes by data flow: what no incoming gradient reaches would run in the forward, or in both. The tag is its own
    (2.13, 2.14). In a forward, or where nothing is traced, this does nothing.
    """
    meta = get_current_meta()
    in_backward = meta.get("partitioner_tag") == "is_backward"
    if in_backward:
        meta["partitioner_tag"] = "must_be_in_backward"
    try:
        yield
    finally:
        if in_backward:
            meta["partitioner_tag"] = "is_backward"


def graph_breaks() -> int:
    """Graph breaks that Dynamo has counted in this process."""
    return sum(dynamo_utils.counters["graph_break"].values())
