"""Of Inductor: a pass over the flat graph, and the order of the program that it writes."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config

from dbuf.compat.nodes import GATHER_START, node_mark
from dbuf.compat.runtime import group_backend

__all__ = ["ScheduledOp", "compile_inductor"]


@dataclasses.dataclass(frozen=True)
class ScheduledOp:
    """One operation of a program that Inductor is about to write down.

    Attributes:
        kind: `"gather"` and `"reduction"` (any collective but an all-gather) start a transfer, `"wait"` ends one.
        needs: Positions of the operations that have to come earlier, for whatever reason.
        reads: Those of them whose result it reads.
        heavy: Whether it calls a kernel that neither Inductor nor dbuf wrote: a matrix product, attention.
        alone: Whether it starts a transfer over gloo, during which no other may be under way.
    """

    kind: Literal["compute", "gather", "reduction", "wait"]
    needs: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    heavy: bool = False
    alone: bool = False


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
    from torch._inductor.ir import MultiOutput
    from torch._inductor.utils import contains_collective, contains_wait

    maker = {name: i for i, node in enumerate(nodes) for name in node.get_buffer_names()}
    ops = []
    for i, node in enumerate(nodes):
        deps = [(maker[d.name], d) for d in node.unmet_dependencies if maker.get(d.name, i) != i]
        needs = tuple(sorted({j for j, _ in deps}))
        reads = tuple(sorted({j for j, dep in deps if not isinstance(dep, WeakDep)}))
        if contains_collective(node):
            alone = group_backend(node.node.constant_args[-1]) == "gloo"
            gathers = "all_gather" in str(node.node.op_overload) or any(
                node_mark(origin, GATHER_START) for origin in node.node.origins
            )
            kind = "gather" if gathers else "reduction"
            ops.append(ScheduledOp(kind, needs, reads, alone=alone))  # type: ignore[arg-type]
        elif contains_wait(node):
            ops.append(ScheduledOp("wait", needs, reads))
        else:
            light = isinstance(node.node, MultiOutput) or str(getattr(node.node, "op_overload", "")).startswith("dbuf.")
            ops.append(ScheduledOp("compute", needs, reads, heavy=node.is_extern() and not light))
    return ops


def _placing(place: Place) -> dict[str, Any]:
    from torch._inductor.custom_graph_pass import get_hash_for_files

    files = sorted(str(file) for file in Path(inspect.getfile(place)).parent.glob("*.py"))
    passes = [_Placing(place, get_hash_for_files((*files, __file__)))]
    return {"reorder_for_compute_comm_overlap": True, "reorder_for_compute_comm_overlap_passes": passes}


def _same_order() -> dict[str, Any]:
    """Settings under which every rank issues its collectives in the order of the graph.

    torch 2.14 moves collectives by the sizes that a rank sees, on by default; ranks with uneven or empty segments
    then wait for each other in different places.
    """
    name = "aten_distributed_optimizations.enable_simple_overlap"
    return {name: False} if hasattr(inductor_config.aten_distributed_optimizations, "enable_simple_overlap") else {}


def compile_inductor(
    gm: torch.fx.GraphModule,
    inputs: list[Any],
    graph_pass: Callable[[torch.fx.Graph], object],
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
