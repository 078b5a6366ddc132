"""compiled_once: the numbers of eager, the collectives of an unrolled step, and results that share no memory."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cheap_kernels
import dbuf
from dbuf import RowAtomic, compat, schedule, testing, tree
from models import Tensors, shard_groups

WIDTH, EACH = 8, 2  # blocks of each kind, and one more of the first: it is unrolled, as its input needs no gradient


def attention(p: Tensors, h: torch.Tensor) -> torch.Tensor:
    """Its backward reads three views of one product."""
    q, k, v = (x.unflatten(-1, (2, -1)).transpose(1, 2) for x in (F.layer_norm(h, (WIDTH,)) @ p["qkv"]).chunk(3, -1))
    return h + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2) @ p["out"]


def joined(p: Tensors, h: torch.Tensor) -> torch.Tensor:
    """Its backward reads a concatenation and both its parts, which Inductor would write in their places there."""
    left, right = torch.tanh(h @ p["left"]), torch.sigmoid(h @ p["right"])
    return h + torch.cat([left, right], dim=-1) @ p["down"]


def halved(p: Tensors, h: torch.Tensor) -> torch.Tensor:
    """Its backward reads parts of one product element by element, each from an offset."""
    gate, up = (h @ p["both"]).chunk(2, -1)
    return h + torch.tanh(gate) * up @ p["down"]


def plain(p: Tensors, h: torch.Tensor) -> torch.Tensor:
    """Its backward returns what it is given: the gradient of the sum."""
    return h + F.gelu(h @ p["up"]) @ p["down"] * p["gain"]


KINDS: dict[str, Callable[..., torch.Tensor]] = {
    "attention": attention,
    "joined": joined,
    "halved": halved,
    "plain": plain,
}
SHAPES = {
    "attention": {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH)},
    "joined": {"left": (WIDTH, 5), "right": (WIDTH, 6), "down": (11, WIDTH)},
    "halved": {"both": (WIDTH, 14), "down": (7, WIDTH)},
    "plain": {"up": (WIDTH, 12), "down": (12, WIDTH), "gain": ()},
}


def weights(kinds: tuple[str, ...]) -> dict[str, Tensors]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"{kind}.{i}": {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in SHAPES[kind].items()}
        for kind in kinds
        for i in range(EACH + (kind == kinds[0]))
    }


def make_step(use: Callable[..., Any], wrap: Callable[..., Any] = dbuf.gathered) -> Callable[..., Any]:
    blocks = {kind: wrap(use(fn)) for kind, fn in KINDS.items()}

    def loss_fn(params: dict[str, dbuf.DBuffer], h: torch.Tensor) -> torch.Tensor:
        for name, group in params.items():
            h = blocks[name.split(".")[0]](group, h)
        return h.square().mean()

    def step(params: dict[str, dbuf.DBuffer], h: torch.Tensor) -> Any:
        loss, grads = dbuf.value_and_grad(loss_fn)(params, h)
        return tree.map(torch.sub, params, grads), loss, grads

    return step


def run_both(use: Callable[..., Any], kinds: tuple[str, ...], wrap: Callable[..., Any] = dbuf.gathered) -> Any:
    """Eager and compiled results, the report, and whether the new weights are in the memory of the old ones."""
    mesh = dbuf.init_mesh(("dp",))
    params = shard_groups(weights(kinds), mesh, RowAtomic())
    h = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(mesh.get_rank()))
    eager = make_step(lambda fn: fn)(params, h)
    # No cache: a program from there would not show what a pass that is switched off does.
    step = dbuf.jit(make_step(use, wrap), donate_argnums=0, options={"fx_graph_cache": False})
    places = [buf.local.data_ptr() for buf in params.values()]
    with contextlib.nullcontext() if mesh.size() == 1 else cheap_kernels.graphs_alone():
        out = step(params, h)
    report = step.inspect(out[0], h)
    return eager, out, report, places == [buf.local.data_ptr() for buf in out[0].values()]


def test_in_eager_it_is_the_call() -> None:
    block = dbuf.compiled_once(plain)
    p, h = weights(("plain",))["plain.0"], torch.ones(1, 2, WIDTH)
    testing.assert_bitwise(block(p, h=h), plain(p, h))
    assert block.__name__ == "plain"


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_numbers_collectives_and_donation_are_those_of_an_unrolled_step(world_size: int) -> None:
    kinds = tuple(KINDS)
    for eager, out, report, in_place in testing.run(
        run_both, dbuf.compiled_once, kinds, world_size=world_size, timeout_s=600
    ):
        testing.assert_close(out, eager)
        groups = EACH * len(kinds) + 1
        assert report.collectives == ({} if world_size == 1 else {"all_gather": 2 * groups, "reduce_scatter": groups})
        assert report.ops["invoke_subgraph"] == 2 * (groups - 1), "regions are unrolled"
        assert report.gathered_alive <= 2
        assert in_place


@pytest.mark.slow
def test_remat_around_it_recomputes_regions() -> None:
    for eager, out, report, _ in testing.run(
        run_both, dbuf.compiled_once, ("plain",), lambda fn: dbuf.remat(dbuf.gathered(fn)), world_size=2, timeout_s=600
    ):
        testing.assert_close(out, eager)
        assert report.collectives == {"all_gather": 2 * (EACH + 1), "reduce_scatter": EACH + 1}


def test_results_that_share_memory_are_taken_outside() -> None:
    """A hand-made call: an argument, a view of one, two views of one product, and one result twice."""
    aten = torch.ops.aten
    with compat.FakeTensorMode():
        x, w = torch.ones(4, 6), torch.ones(6, 8)
    inner = torch.fx.Graph()
    given_x, given_w = inner.placeholder("x"), inner.placeholder("w")
    given_x.meta["val"], given_w.meta["val"] = x, w

    def call(graph: torch.fx.Graph, op: Any, *args: Any) -> torch.fx.Node:
        node = graph.call_function(op, args)
        node.meta["val"] = op(*torch.fx.node.map_arg(args, lambda n: n.meta["val"]))
        return node

    product = call(inner, aten.mm.default, given_x, given_w)
    halves = call(inner, aten.split.Tensor, product, 4, 1)
    left, right = call(inner, operator.getitem, halves, 0), call(inner, operator.getitem, halves, 1)
    turned = call(inner, aten.permute.default, given_w, [1, 0])
    results = (given_x, turned, left, right, left, None)
    inner.output(results)
    region = torch.fx.GraphModule(torch.nn.Module(), inner)

    outer = torch.fx.Graph()
    outer_x, outer_w = outer.placeholder("x"), outer.placeholder("w")
    outer_x.meta["val"], outer_w.meta["val"] = x, w
    body = outer.get_attr("region")
    invoked = outer.call_function(torch.ops.higher_order.invoke_subgraph, (body, "region", outer_x, outer_w))
    invoked.meta["val"] = tuple(r if r is None else r.meta["val"] for r in results)
    reads = [outer.call_function(operator.getitem, (invoked, i)) for i in range(len(results))]
    outer.output(tuple(reads))
    root = torch.nn.Module()
    root.region = region
    gm = torch.fx.GraphModule(root, outer)

    assert schedule.take_aliases_outside(gm.graph) == 5
    gm.graph.lint()
    assert inner is not None and len(region.graph.output_node().args[0]) == 2  # the product, and None
    given, turned_w, first, second, again, nothing = gm.graph.output_node().args[0]
    assert given is outer_x and turned_w.args[0] is outer_w and again is first and nothing.args[1] == 1
    assert first.args[0] is second.args[0] and first.args[0].args[0].args == (invoked, 0)
    assert schedule.take_aliases_outside(gm.graph) == 0
