"""The one door to torch's private or renamed names, and to optree's.

Every name here says which version it was read in and what will let it go. Nothing else in the library imports a
private part of torch; `tests/test_compat.py` names each of these and fails when one moves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, cast

import torch
import torch._dynamo.config as dynamo_config
import torch._dynamo.utils as dynamo_utils
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from optree.registry import __GLOBAL_NAMESPACE as OPTREE_GLOBAL
from torch._dynamo.exc import BackendCompilerFailed as BackendFailed
from torch._library import opaque_object
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.traceback import annotate, get_current_meta
from torch.utils._pytree import GetAttrKey, TreeSpec

__all__ = [
    "OPTREE_GLOBAL",
    "BackendFailed",
    "FakeTensor",
    "FakeTensorMode",
    "GetAttrKey",
    "NeedsRealTensors",
    "ScheduledOp",
    "TreeSpec",
    "allow_in_graph",
    "annotate",
    "call_with_side_effects",
    "compile_inductor",
    "compile_once",
    "compile_program",
    "flatten_mesh",
    "graph_breaks",
    "group_backend",
    "inside_func_transform",
    "kept_in_backward",
    "merging_trace_length",
    "node_draws_random",
    "node_is_backward",
    "node_is_inlined",
    "node_is_recomputed",
    "node_is_region",
    "node_mark",
    "node_region",
    "register_constant",
    "trace_autograd",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")

# What an operation raises on fake tensors when its result depends on values (2.13, 2.14).
NeedsRealTensors = (DataDependentOutputException, DynamicOutputShapeException)


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
    """What generated code may ask for by name; a program keeps its constants as long as it lives."""
    return {}


def constant(name: str) -> Any:
    """The object that `_name_constant` gave this name; torch's caches can import this function, but no instance."""
    return _constants()[name]


def _name_constant(self: Any) -> tuple[str, dict[str, Any]]:
    name = f"{type(self).__name__}_{hash(self) & 0xFFFFFFFFFFFFFFFF:x}"
    while _constants().setdefault(name, self) != self:
        name += "_"
    return f"constant({name!r})", {"constant": constant}


class trace_autograd:
    """While it is open, Dynamo traces `torch.autograd.grad` into the graph (2.13: off, and not patchable inside).

    Every call of a compiled step enters it; torch's own `config.patch` takes 18 us for what is 3 us by hand.
    """

    def __enter__(self) -> None:
        self._before = dynamo_config.trace_autograd_ops
        dynamo_config.trace_autograd_ops = True

    def __exit__(self, *_: object) -> None:
        dynamo_config.trace_autograd_ops = self._before


def _same_order() -> dict[str, Any]:
    """Settings under which every rank issues its collectives in the order of the graph.

    torch 2.14 moves collectives by the sizes that a rank sees, on by default; ranks with uneven or empty segments
    then wait for each other in different places.
    """
    name = "aten_distributed_optimizations.enable_simple_overlap"
    return {name: False} if hasattr(inductor_config.aten_distributed_optimizations, "enable_simple_overlap") else {}


@dataclasses.dataclass(frozen=True)
class ScheduledOp:
    """One operation of a program that Inductor is about to write down.

    Attributes:
        kind: `"gather"` and `"reduction"` (any collective but an all-gather) start a transfer, `"wait"` ends one.
        needs: Positions of the operations that have to come earlier, for whatever reason.
        reads: Those of them whose result it reads.
        heavy: Whether it calls a kernel that Inductor did not write: a matrix product, attention.
    """

    kind: Literal["compute", "gather", "reduction", "wait"]
    needs: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    heavy: bool = False


Place = Callable[[list[ScheduledOp]], list[int]]


@dataclasses.dataclass(frozen=True)
class _Placing:
    """The last pass of Inductor's scheduler (2.13, 2.14); part of its cache's key, so it pickles."""

    place: Place
    source: bytes  # a hash of what decides

    def __call__(self, nodes: list[Any]) -> list[Any]:
        _keep_shared_memory(nodes)
        return [nodes[i] for i in self.place(_scheduled_ops(nodes))]


def _keep_shared_memory(nodes: list[Any]) -> None:
    """Have no buffer written over whose memory another result, or an argument, of a region looks at as well.

    `schedule.take_aliases_outside` leaves none that a graph shows; what lowering makes, such as the parts of a
    concatenation that are written in their place right away, only Inductor's own program shows (2.13, 2.14).
    """
    from torch._inductor.ir import InvokeSubgraph
    from torch._inductor.virtualized import V

    calls: list[Any] = [node.node for node in nodes if isinstance(node.node, InvokeSubgraph)]
    for call in calls:
        region = call.subgraph.graph
        given = dict(zip(region.graph_input_names, call.inputs, strict=True))
        sharing: dict[str, list[Any]] = {name: [source] for name, source in given.items()}
        for result, inner in zip(call.outputs, region.graph_outputs, strict=True):
            for name in _memory_of(inner, region):
                sharing.setdefault(name, []).append(result)
        for buffers in sharing.values():
            if len(buffers) > 1:
                V.graph.never_reuse_buffers.update(name for b in buffers for name in _memory_of(b, V.graph))


def _memory_of(value: Any, graph: Any) -> set[str]:
    """The buffers that a value of Inductor's looks at: itself, or what it is a view of."""
    from torch._inductor.ir import BaseView, Buffer, MutableBox, MutationLayoutSHOULDREMOVE, NonOwningLayout

    while isinstance(value, MutableBox | BaseView):
        value = value.data
    if not isinstance(value, Buffer):
        return set()
    found = {value.get_name()}
    layout = value.layout
    if isinstance(layout, NonOwningLayout):
        found |= _memory_of(layout.view, graph)
    elif isinstance(layout, MutationLayoutSHOULDREMOVE):
        found |= _memory_of(layout.target, graph)
    for name in value.get_inputs_that_alias_output():
        found |= _memory_of(graph.get_buffer(name), graph)
    return found


def _scheduled_ops(nodes: list[Any]) -> list[ScheduledOp]:
    from torch._inductor.dependencies import WeakDep
    from torch._inductor.utils import contains_collective, contains_wait

    maker = {name: i for i, node in enumerate(nodes) for name in node.get_buffer_names()}
    ops = []
    for i, node in enumerate(nodes):
        deps = [(maker[d.name], d) for d in node.unmet_dependencies if maker.get(d.name, i) != i]
        needs = tuple(sorted({j for j, _ in deps}))
        reads = tuple(sorted({j for j, dep in deps if not isinstance(dep, WeakDep)}))
        if contains_collective(node):
            kind = "gather" if "all_gather" in str(node.node.op_overload) else "reduction"
        else:
            kind = "wait" if contains_wait(node) else "compute"
        ops.append(ScheduledOp(kind, needs, reads, heavy=node.is_extern()))  # type: ignore[arg-type]
    return ops


def _placing(place: Place) -> dict[str, Any]:
    from torch._inductor.custom_graph_pass import get_hash_for_files

    files = sorted(str(file) for file in Path(inspect.getfile(place)).parent.glob("*.py"))
    passes = [_Placing(place, get_hash_for_files((*files, __file__)))]
    return {"reorder_for_compute_comm_overlap": True, "reorder_for_compute_comm_overlap_passes": passes}


def compile_inductor(
    gm: torch.fx.GraphModule,
    inputs: list[Any],
    graph_pass: Callable[[torch.fx.Graph], None],
    options: Mapping[str, Any],
    place: Place | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph by Inductor, with `graph_pass` run on the flat graph of forward and backward.

    `place` decides the order of the program after all else; it does not run for a program from Inductor's cache.

    The pass runs before Inductor looks into its cache, so it always sees the graph. torch's own pass that repeats
    tagged nodes in the backward handles one backward region and no random ops (2.13, 2.14); ours takes any number,
    so torch's is off. AOTAutograd's own cache cannot hold our one opaque call, and complains about our constants
    before it finds out, so it is off too; Inductor's cache is not.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner  # late: half a second to import

    def inner(graph_module: torch.fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        graph_pass(graph_module.graph)
        graph_module.recompile()
        return compile_fx_inner(graph_module, example_inputs, **kwargs)

    patches = _same_order() | (_placing(place) if place else {}) | dict(options)
    settings = {"remat_using_tags_for_fwd_loss_bwd_graph": False, "enable_autograd_cache": False, "cse": False}
    with functorch_config.patch(settings):
        return cast(Callable[..., Any], compile_fx(gm, inputs, inner_compile=inner, config_patches=patches))


def inside_func_transform() -> bool:
    """Whether a `torch.func` transform (grad, vjp, vmap) is running around the caller."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def compile_program(fn: Callable[..., _R], *, dynamic: bool | None, backend: Callable[..., Any]) -> Callable[..., _R]:
    """`torch.compile(fullgraph=True)` with a cache and a recompile limit of its own (2.13: absent from the stubs)."""
    return cast(
        Callable[..., _R],
        torch.compile(fn, fullgraph=True, dynamic=dynamic, backend=backend, isolate_recompiles=True),  # type: ignore[call-overload]
    )


def allow_in_graph(fn: Callable[_P, _R]) -> Callable[_P, _R]:
    """`torch.compiler.allow_in_graph`, which is untyped: Dynamo puts calls of `fn` into its graph whole."""
    return cast(Callable[_P, _R], torch.compiler.allow_in_graph(fn))  # type: ignore[no-untyped-call]


def call_with_side_effects(fn: Callable[..., _R], *args: Any) -> _R:
    """Call `fn`, which changes objects from outside of a traced `checkpoint` and changes them back (2.13, 2.14).

    Dynamo refuses such changes, as it cannot repeat them when it recomputes; here nothing is left to repeat.
    """
    return dynamo_utils._disable_side_effect_safety_checks_for_current_subtracer(fn, *args)


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


def flatten_mesh(mesh: DeviceMesh, axis_names: tuple[str, ...], name: str) -> None:
    """Make the process group over several axes of `mesh`; `mesh.get_group(name)` finds it from then on."""
    mesh[axis_names]._flatten(name)


def group_backend(name: str) -> str:
    """`"gloo"`, `"nccl"`, ... of the process group that a collective in a graph names (2.13, 2.14)."""
    return torch.distributed.get_backend(_resolve_process_group(name))  # type: ignore[arg-type]


def graph_breaks() -> int:
    """Graph breaks that Dynamo has counted in this process."""
    return sum(dynamo_utils.counters["graph_break"].values())


def node_is_backward(node: torch.fx.Node) -> bool:
    """Whether a graph node was made while `torch.autograd.grad` was traced (2.13, 2.14)."""
    return bool(node.meta.get("autograd_backward", False))


def node_mark(node: torch.fx.Node, key: str) -> Any:
    """What `annotate` put on a graph node, or None."""
    return node.meta.get("custom", {}).get(key)


def node_draws_random(node: torch.fx.Node) -> bool:
    """Whether a graph node takes random numbers from a generator: doing it again would give others.

    Inductor's own `inductor_random` does not: it is a function of a seed. Attention only does with dropout.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    if "dropout_p" not in names:
        return True
    position = names.index("dropout_p")
    return bool((node.args[position] if len(node.args) > position else node.kwargs.get("dropout_p", 0.0)) != 0.0)


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


def node_is_region(node: torch.fx.Node) -> bool:
    """Whether a graph node calls a graph of its own that stands for several equal ones (2.13, 2.14)."""
    return node.target is torch.ops.higher_order.invoke_subgraph


def node_is_recomputed(node: torch.fx.Node) -> bool:
    """Whether `torch.utils.checkpoint` tagged a graph node for recomputation in the backward."""
    from torch.utils.checkpoint import CheckpointPolicy

    tag = node.meta.get("recompute")
    return tag in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def node_is_inlined(node: torch.fx.Node) -> bool:
    """Whether Inductor computes a graph node where it is read, element by element (2.13, 2.14)."""
    aten = torch.ops.aten
    gathers = (aten.embedding.default, aten.index.Tensor, aten.gather.default, aten.index_select.default)
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in (
        *gathers,
        torch.ops.prims.convert_element_type.default,
    )


def node_region(node: torch.fx.Node) -> int | None:
    """Which call of `torch.utils.checkpoint` a graph node was made in (2.13, 2.14), or None."""
    return cast(int | None, node.meta.get("ac_graph_id"))
