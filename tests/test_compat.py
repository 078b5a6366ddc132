"""Every private or renamed name that `dbuf.compat` stands on: it exists in this torch, and does what dbuf needs.

A torch or optree release that moves one fails the test that carries its name.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import cheap_kernels  # noqa: F401
import dbuf
from dbuf import compat
from dbuf.compat import tracing
from dbuf.testing import run

HERE = Path(__file__)


def test_every_name_of_compat_has_a_test_here() -> None:
    tests = [name for name in globals() if name.startswith("test_")]
    missing = [name for name in compat.__all__ if not any(name.lower().strip("_") in test.lower() for test in tests)]
    assert not missing, f"names of dbuf.compat without a test: {missing}"


def imported_names() -> list[tuple[str, str]]:
    """`(module, name)` of everything that compat imports from torch and optree, late imports too."""
    files = Path(compat.__file__).parent.glob("*.py")
    found = []
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("torch", "optree"):
            found += [(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names if alias.name.split(".")[0] in ("torch", "optree")]
    return sorted(set(found))


@pytest.mark.parametrize(("module", "name"), imported_names(), ids=lambda part: part or "module")
def test_the_import_exists(module: str, name: str) -> None:
    assert not name or hasattr(importlib.import_module(module), name)


# --- constants of a trace ---------------------------------------------------------------------------------


class Sizes:
    """A static value with a method that must not be traced."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.asked = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sizes) and self.sizes == other.sizes

    def __hash__(self) -> int:
        return hash(self.sizes)

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        return f"Sizes({self.sizes!r})", {"Sizes": Sizes}

    def total(self) -> int:
        self.asked += 1
        return sum(self.sizes)


compat.register_constant(Sizes, ("total", "__eq__", "__hash__"))


def test_register_constant_runs_methods_for_real_and_guards_by_equality() -> None:
    compiles = 0

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal compiles
        compiles += 1
        return gm

    compiled = torch.compile(lambda x, s: x * s.total(), fullgraph=True, backend=backend)
    sizes = Sizes((1, 2))
    assert compiled(torch.ones(1), sizes).item() == 3 and sizes.asked >= 1
    assert compiled(torch.ones(1), Sizes((1, 2))).item() == 3 and compiles == 1, "an equal value recompiled"
    assert compiled(torch.ones(1), Sizes((5, 5))).item() == 10 and compiles == 2, "another value did not"


class Named:
    """A constant that generated code asks for by name."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Named)

    def __hash__(self) -> int:
        return 7


compat.register_constant(Named, ("__eq__", "__hash__"))


def test_forget_programs_drops_constants_of_which_the_last_of_equal_ones_counted() -> None:
    first, second = Named(), Named()
    expressions = {one.__fx_repr__()[0] for one in (first, second)}  # type: ignore[attr-defined]
    assert expressions == {"constant('Named_7')"} and tracing.constant("Named_7") is second
    compat.forget_programs()
    with pytest.raises(KeyError):
        tracing.constant("Named_7")


def test_opaque_object_has_one_of_its_two_names() -> None:
    assert tracing.opaque_object.MemberType.USE_REAL is not None
    names = ("register_custom_class", "register_opaque_type")
    assert any(hasattr(tracing.opaque_object, name) for name in names), "register_constant has nothing to call"


# --- Dynamo -----------------------------------------------------------------------------------------------


def test_trace_autograd_puts_autograd_grad_into_the_graph_and_restores_the_setting() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x.detach().requires_grad_()
        return torch.autograd.grad((y**3).sum(), y)[0]

    before = tracing.dynamo_config.trace_autograd_ops
    with pytest.raises(RuntimeError), compat.trace_autograd():
        assert tracing.dynamo_config.trace_autograd_ops is True
        raise RuntimeError
    assert tracing.dynamo_config.trace_autograd_ops == before
    with compat.trace_autograd():
        assert torch.compile(step, fullgraph=True, backend="eager")(torch.tensor([2.0])).item() == 12


def test_compile_program_has_a_recompile_limit_of_its_own() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    compiles = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        compiles.append(1)
        return gm

    for size in range(1, 2 * torch._dynamo.config.recompile_limit):
        assert compat.compile_program(fn, dynamic=False, backend=backend)(torch.ones(size)).shape == (size,)
    assert len(compiles) == 2 * torch._dynamo.config.recompile_limit - 1
    with pytest.raises(Exception, match="rint"):  # fullgraph: a graph break is an error
        compat.compile_program(lambda x: (print(x), x)[1], dynamic=None, backend=backend)(torch.ones(1))


def _repeated(call: Any, count: int, backend: Any) -> Any:
    """The gradient of `count` equal layers, each called by `call`."""

    def step(ws: list[torch.Tensor], h: torch.Tensor) -> Any:
        ws = [w.detach().requires_grad_() for w in ws]
        for w in ws:
            h = call(w, h)
        return torch.autograd.grad(h.square().mean(), ws)

    with compat.trace_autograd():
        ws = [torch.full((3, 3), 0.1 * i) for i in range(1, count + 1)]
        return compat.compile_program(step, dynamic=False, backend=backend)(ws, torch.ones(2, 3)), step(
            ws, torch.ones(2, 3)
        )


def _layer(w: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return torch.tanh(h @ w)


def test_compile_once_has_one_graph_for_equal_calls_and_node_is_region_finds_them() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(gm)
        return torch._dynamo.lookup_backend("aot_eager")(gm, inputs)

    def once(w: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return compat.compile_once(lambda *args: _layer(*args), w, h)

    compiled, eager = _repeated(once, 5, backend)
    assert all(torch.equal(a, b) for a, b in zip(compiled, eager, strict=True))
    calls = [node for node in graphs[0].graph.nodes if compat.node_is_region(node)]
    # The input of the first needs no gradient; as its graph has one call, it is unrolled.
    assert len(calls) == 4 and len({node.args[1] for node in calls}) == 1


def test_compile_once_is_needed_as_dynamo_still_copies_regions_without_their_gradient() -> None:
    """When this fails, torch has mended it: `compile_once` can be `nested_compile_region` alone.

    See docs/design/007-identical-blocks.md, which has the other limit too; `tests/test_once.py` notices its end.
    """
    region = torch.compiler.nested_compile_region(_layer)
    _repeated(region, 2, "eager")
    with pytest.raises(Exception, match="not have been used in the graph"):
        _repeated(region, 3, "eager")


def test_allow_in_graph_keeps_a_call_whole_for_dynamo_and_open_for_aot() -> None:
    graphs = []

    @compat.allow_in_graph
    def twice(x: torch.Tensor, how: tuple[tuple[str, int], ...]) -> torch.Tensor:
        return x * how[0][1]

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append([node.target for node in gm.graph.nodes if node.op == "call_function"])
        return gm

    out = torch.compile(lambda x: twice(x, (("by", 2),)), fullgraph=True, backend=backend)(torch.ones(1))
    assert out.item() == 2 and graphs == [[twice]]


def test_call_with_side_effects_lets_a_checkpoint_change_what_it_changes_back() -> None:
    outer = {"x": 1}

    def change(x: torch.Tensor) -> torch.Tensor:
        outer["x"] = 2
        y = (x * outer["x"]).sin()
        outer["x"] = 1
        return y

    def call(x: torch.Tensor) -> torch.Tensor:
        return compat.call_with_side_effects(change, x)

    def step(fn: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(fn, x, use_reentrant=False)

    x = torch.ones(2)
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    assert torch.equal(compiled(call, x), change(x)) and outer == {"x": 1}
    with pytest.raises(Exception, match="side effect"):
        compiled(change, x)


def test_graph_breaks_are_counted() -> None:
    torch._dynamo.reset()
    before = compat.graph_breaks()

    def fn(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    torch.compile(fn, backend="eager")(torch.ones(1))
    assert compat.graph_breaks() == before + 1


def test_backendfailed_is_what_a_failing_backend_raises() -> None:
    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        raise ValueError("mine")

    with pytest.raises(compat.BackendFailed, match="mine"):
        torch.compile(lambda x: x + 1, backend=backend, fullgraph=True)(torch.ones(1))


# --- AOTAutograd ------------------------------------------------------------------------------------------


def split_graphs(fn: Any, *args: Any) -> list[list[str]]:
    """The operations of a plain compile's forward, and of its backward."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[list[str]] = []

    def compiler(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in gm.graph.nodes if node.op == "call_function"])
        return make_boxed_func(gm.forward)

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)
    torch._dynamo.reset()
    torch.compile(fn, fullgraph=True, backend=backend)(*args).sum().backward()
    return graphs


@compat.allow_in_graph
def view_apart(x: torch.Tensor) -> torch.Tensor:
    length = compat.merging_trace_length()
    return x if length is None else x[-(2**48) - length :]


def test_tracingfailed_is_what_an_exception_in_traced_code_becomes() -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("mine")

    with pytest.raises(compat.TracingFailed, match="Observed exception"):
        torch.compile(fail, fullgraph=True, backend="eager")(torch.ones(1))


def test_merging_trace_length_tells_equal_nodes_apart_where_they_would_be_merged() -> None:
    x = torch.ones(3, requires_grad=True)

    def twice(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + x.sin()

    def twice_apart(x: torch.Tensor) -> torch.Tensor:
        return view_apart(x).sin() + view_apart(x).sin()

    assert split_graphs(twice, x)[0].count("aten.sin.default") == 1, "nothing is merged: what is told apart, and why?"
    assert split_graphs(twice_apart, x)[0].count("aten.sin.default") == 2
    assert compat.merging_trace_length() is None
    with tracing.functorch_config.patch(cse=False):  # as compile_inductor has it
        assert split_graphs(twice, x)[0].count("aten.sin.default") == 2
        assert "aten.slice.Tensor" not in split_graphs(twice_apart, x)[0]


@pytest.mark.parametrize("kept", [False, True], ids=["without", "kept"])
def test_kept_in_backward_holds_what_no_gradient_reaches(kept: bool) -> None:
    class Wait(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
            with compat.kept_in_backward() if kept else contextlib.nullcontext():
                torch.ops._c10d_functional.wait_tensor(torch.ones(3))
            return cotangent * 2

    wait = compat.allow_in_graph(lambda x: Wait.apply(x))
    x = torch.ones(3, requires_grad=True)
    forward, backward = split_graphs(lambda x: wait(x).sin(), x)
    assert ("_c10d_functional.wait_tensor.default" in forward) is not kept
    assert "_c10d_functional.wait_tensor.default" in backward
    with compat.kept_in_backward():  # eager: nothing to hold
        assert "partitioner_tag" not in tracing.get_current_meta()


# --- graphs -----------------------------------------------------------------------------------------------


def flat_graph(fn: Any, *args: Any) -> torch.fx.Graph:
    """The one graph that `compile_inductor` shows to its pass."""
    graphs: list[torch.fx.Graph] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return compat.compile_inductor(gm, inputs, graphs.append, {})

    with compat.trace_autograd():
        compat.compile_program(fn, dynamic=None, backend=backend)(*args)
    (graph,) = graphs
    return graph


def step_with_everything(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from torch.utils.checkpoint import checkpoint

    y = x.detach().requires_grad_()
    with compat.annotate({"mark": True}):
        marked = y.tanh()
    loss = checkpoint(lambda z: z.sin() * 2, marked, use_reentrant=False).sum()
    return loss.detach(), torch.autograd.grad(loss, y)[0]


def test_annotate_node_mark_node_is_backward_node_is_recomputed_and_node_region() -> None:
    nodes = flat_graph(step_with_everything, torch.ones(3)).nodes
    by_name = {str(node.target): node for node in nodes if node.op == "call_function"}
    tanh, sin, cos = (by_name[f"aten.{name}.default"] for name in ("tanh", "sin", "cos"))
    assert compat.node_mark(tanh, "mark") is True and compat.node_mark(tanh, "other") is None
    assert compat.node_mark(sin, "mark") is None
    assert compat.node_is_recomputed(sin) and not compat.node_is_recomputed(tanh)
    assert compat.node_is_backward(cos) and not compat.node_is_backward(sin)
    assert isinstance(compat.node_region(sin), int) and compat.node_region(tanh) is None


def test_node_draws_random() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    aten = torch.ops.aten
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert compat.node_draws_random(graph.call_function(aten.rand_like.default, (x,)))
    assert compat.node_draws_random(graph.call_function(aten.bernoulli.p, (x, 0.5)))
    assert not compat.node_draws_random(graph.call_function(aten.sin.default, (x,)))
    assert not compat.node_draws_random(graph.call_function(attention, (x, x, x)))
    if torch.Tag.nondeterministic_seeded in attention.tags:
        assert compat.node_draws_random(graph.call_function(attention, (x, x, x, 0.1)))
    assert not compat.node_draws_random(x)


def test_node_is_higher_order() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    nodes = [
        graph.call_function(op, (x,)) for op in (torch.ops.higher_order.invoke_subgraph, torch.ops.aten.sin.default)
    ]
    assert [compat.node_is_higher_order(node) for node in [x, *nodes]] == [False, True, False]


def test_node_may_be_in_place_knows_what_inductor_knows() -> None:
    from torch._inductor.fx_passes import reinplace

    plain = [op for op in reinplace.inplaceable_ops if getattr(op, "namespace", None) == "aten"]
    plain += reinplace._SCATTER_OP_TO_VIEW
    others = [op for op in reinplace.inplaceable_ops if op not in plain]
    assert {getattr(op, "__name__", str(op)) for op in others} <= {
        "_generalized_scatter",  # made of scatters
        "all_reduce.default",
        "all_reduce_coalesced.default",
    }
    graph = torch.fx.Graph()
    nodes = [graph.call_function(op, (graph.placeholder("x"),)) for op in plain]
    assert nodes and all(compat.node_may_be_in_place(node) for node in nodes)
    assert not compat.node_may_be_in_place(graph.call_function(torch.ops.aten.sin.default, (nodes[0],)))


def test_numel_hint_does_not_fix_a_size() -> None:
    seen: list[tuple[Any, int]] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        values = [node.meta["example_value"] for node in gm.graph.nodes if node.op == "call_function"]
        seen.append((values[-1].numel(), compat.numel_hint(values[-1])))
        return gm

    double = torch.compile(lambda x: x * 2, backend=backend)
    for rows in (3, 5, 7):
        double(torch.ones(rows, 2))
    (fixed, first), (free, second) = seen  # and no third program
    assert (fixed, first, second) == (6, 6, 10) and isinstance(free, torch.SymInt)


def test_node_is_inlined() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    aten = torch.ops.aten
    assert compat.node_is_inlined(graph.call_function(aten.mul.Tensor, (x, x)))
    assert compat.node_is_inlined(graph.call_function(aten.embedding.default, (x, x)))
    assert not compat.node_is_inlined(graph.call_function(aten.mm.default, (x, x)))
    assert not compat.node_is_inlined(graph.call_function(aten.sum.default, (x,)))
    assert not compat.node_is_inlined(x)


@pytest.mark.slow
def test_scheduledop_describes_a_program_and_its_order_can_be_chosen() -> None:
    """Two chains that share nothing, written in the order that `place` asks for; collectives are in test_schedule."""
    seen: list[list[compat.ScheduledOp]] = []

    def place(ops: list[compat.ScheduledOp]) -> list[int]:
        seen.append(ops)
        return list(range(len(ops)))

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return compat.compile_inductor(gm, inputs, lambda graph: None, {"fx_graph_cache": False}, place)

    x = torch.eye(3)
    out = compat.compile_program(lambda x: (x.sin() @ x).cos(), dynamic=None, backend=backend)(x)
    torch.testing.assert_close(out, (x.sin() @ x).cos())
    (ops,) = seen
    assert [(op.kind, op.needs, op.reads, op.heavy) for op in ops] == [
        ("compute", (), (), False),
        ("compute", (0,), (0,), True),
        ("compute", (1,), (1,), False),
    ]


@pytest.mark.slow
def test_compile_inductor_runs_the_pass_on_the_graph_it_compiles() -> None:
    def to_zero(graph: torch.fx.Graph) -> None:
        for node in list(graph.nodes):
            if node.target is torch.ops.aten.sin.default:
                node.target = torch.ops.aten.cos.default

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return compat.compile_inductor(gm, inputs, to_zero, {})

    for _ in range(2):  # also when Inductor's cache knows the program
        torch._dynamo.reset()
        out = compat.compile_program(lambda x: x.sin(), dynamic=None, backend=backend)(torch.zeros(2))
        assert out.tolist() == [1, 1]


def test_functorch_config_has_the_settings_that_compile_inductor_turns_off() -> None:
    for name in ("remat_using_tags_for_fwd_loss_bwd_graph", "enable_autograd_cache", "cse"):
        assert hasattr(tracing.functorch_config, name)


# --- fake tensors and transforms --------------------------------------------------------------------------


def test_faketensormode_and_faketensor_run_without_memory() -> None:
    with compat.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(torch.ones(2))
        y = x * torch.ones(2)
    assert isinstance(y, compat.FakeTensor) and y.shape == (2,)


def test_needsrealtensors_is_what_fake_tensors_raise_for_value_dependent_results() -> None:
    with compat.FakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(2))
        with pytest.raises(compat.NeedsRealTensors):
            x.sum().item()
        with pytest.raises(compat.NeedsRealTensors):
            x.nonzero()


def test_call_with_room_keeps_python_from_mapping_memory_at_every_call() -> None:
    """At some depth a call needs a new chunk of frames, and Python gives it back when the call returns."""

    def leaf(a=0, b=0, c=0, d=0, e=0, f=0, g=0, h=0, i=0, j=0, k=0, l=0):  # type: ignore[no-untyped-def]
        """Its frame is longer than one of `faults_at`, so there is a depth at which it does not fit."""

    def faults_at(depth: int) -> int:
        if depth:
            return faults_at(depth - 1)
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        for _ in range(200):
            leaf()
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

    def worst() -> int:
        return max(map(faults_at, range(400)))

    with ThreadPoolExecutor(1) as thread:  # a test runs with room itself
        assert thread.submit(worst).result() >= 200, "Python does without: call_with_room can go"
        assert thread.submit(compat.call_with_room, worst).result() < 100
    assert compat.call_with_room(lambda a, *, fn: (a, fn), 1, fn=2) == (1, 2)


def test_call_with_room_collects_garbage_rarely_and_then_as_before() -> None:
    def fail() -> None:
        assert gc.get_threshold()[0] == 1_000_000
        raise KeyError

    before = gc.get_threshold()
    try:
        for mine, during in ((700, 1_000_000), (0, 0), (2_000_000, 2_000_000)):
            gc.set_threshold(mine, 10, 10)
            assert compat.call_with_room(gc.get_threshold) == (during, 10, 10)
            assert gc.get_threshold() == (mine, 10, 10)
        gc.set_threshold(700, 10, 10)
        with pytest.raises(KeyError):
            compat.call_with_room(fail)
        assert gc.get_threshold() == (700, 10, 10)
    finally:
        gc.set_threshold(*before)


def test_storage_id_is_that_of_views_and_of_no_other_tensor() -> None:
    x, other = torch.ones(3), torch.ones(3)
    assert compat.storage_id(x) == compat.storage_id(x[1:]) != compat.storage_id(other)


def test_version_of_counts_what_any_view_writes() -> None:
    x = torch.ones(3)
    before = compat.version_of(x)
    x.detach()[1:].mul_(2)
    assert compat.version_of(x) == compat.version_of(x[:1]) == before + 1


def test_inside_func_transform() -> None:
    seen = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        seen.append(compat.inside_func_transform())
        return x.sum()

    assert not compat.inside_func_transform()
    torch.func.grad(fn)(torch.ones(2))
    torch.func.vmap(fn)(torch.ones(2, 2))
    torch.func.vjp(fn, torch.ones(2))
    fn(torch.ones(2))
    assert seen == [True, True, True, False]


# --- pytrees and meshes -----------------------------------------------------------------------------------


def test_getattrkey_and_treespec_are_torchs() -> None:
    from torch.utils import _pytree

    assert _pytree.keystr((compat.GetAttrKey("local"),)) == ".local"
    spec = _pytree.tree_structure({"b": [0], "a": None})
    assert isinstance(spec, compat.TreeSpec)
    assert [child.type for child in spec.children()] == [list, None]
    assert spec.type is dict and spec.context == ["b", "a"], "dicts keep their insertion order"
    with pytest.raises(ValueError):
        spec.flatten_up_to({"b": [0]})


def test_optree_global_registers_for_every_namespace() -> None:
    class Box:
        def __init__(self, x: Any) -> None:
            self.x = x

    optree.register_pytree_node(
        Box, lambda b: ((b.x,), None, ("x",)), lambda _, xs: Box(*xs), namespace=compat.OPTREE_GLOBAL
    )
    assert optree.tree_leaves(Box(3)) == optree.tree_leaves(Box(3), namespace="any") == [3]


def test_annotated_gather_start_is_a_mark_beside_others() -> None:
    node = torch.fx.Graph().placeholder("x")
    node.meta = compat.annotated({"custom": {"mark": True}, "val": 1}, compat.GATHER_START)
    assert compat.node_mark(node, compat.GATHER_START) is True and compat.node_mark(node, "mark") is True
    assert node.meta["val"] == 1


def backend_of_a_group() -> tuple[str, int]:
    name = torch.distributed.init_device_mesh("cpu", (2,)).get_group().group_name
    return compat.group_backend(name), compat.group_rank(name)


def test_group_backend_and_group_rank_of_the_name_in_a_graph() -> None:
    assert run(backend_of_a_group, world_size=2) == [("gloo", 0), ("gloo", 1)]


def groups_left() -> tuple[int, bool]:
    group = torch.distributed.new_group([0, 1])
    compat.destroy_subgroups()
    with pytest.raises(ValueError, match="Invalid process group"):
        torch.distributed.destroy_process_group(group)
    return torch.distributed.get_world_size(), torch.distributed.is_initialized()


def test_destroy_subgroups_keeps_the_default_group() -> None:
    assert run(groups_left, world_size=2) == [(2, True)] * 2


def gloo_threads() -> int:
    return sum("gloo_tcp" in (task / "comm").read_text() for task in Path("/proc/self/task").iterdir())


def threads_of_a_kept_mesh() -> list[int]:
    counts = [gloo_threads()]
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for release in (lambda: None, compat.destroy_subgroups, compat.release_groups):
        release()
        counts.append(gloo_threads() - counts[0])
    return [mesh.ndim, *counts[1:]]


def test_release_groups_ends_the_threads_of_groups_whose_mesh_is_kept() -> None:
    assert run(threads_of_a_kept_mesh, world_size=4) == [[2, 2, 2, 0]] * 4


def flattened() -> tuple[list[int], str]:
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    compat.flatten_mesh(mesh, ("outer", "inner"), "outer_inner")
    group = mesh.get_group("outer_inner")
    assert isinstance(mesh, DeviceMesh) and isinstance(group.group_name, str)
    return torch.distributed.get_process_group_ranks(group), type(group).__name__


def test_flatten_mesh_makes_a_group_that_get_group_finds() -> None:
    assert run(flattened, world_size=4) == [([0, 1, 2, 3], "ProcessGroup")] * 4


def test_the_collectives_dbuf_stands_on_take_these_arguments() -> None:
    """`torch.ops._c10d_functional`: private by its name, stable in 2.13 and 2.14, and what Inductor knows."""
    ops = torch.ops._c10d_functional
    expected = {
        "all_gather_into_tensor": ["input", "group_size", "group_name"],
        "reduce_scatter_tensor": ["input", "reduce_op", "group_size", "group_name"],
        "all_reduce": ["input", "reduce_op", "group_name"],
        "all_to_all_single": ["input", "output_split_sizes", "input_split_sizes", "group_name"],
        "broadcast": ["input", "src", "group_name"],
        "wait_tensor": ["tensor"],
    }
    for name, arguments in expected.items():
        assert [a.name for a in getattr(ops, name).default._schema.arguments] == arguments
    assert dbuf.collectives.is_collective(ops.all_reduce.default)
    assert not dbuf.collectives.is_collective(ops.wait_tensor.default)
