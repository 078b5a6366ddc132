"""Trees of tensors and trees of buffers: structures, key paths, prefixes, and both pytree libraries alike."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from hypothesis import given
from torch.utils import _pytree

import cheap_kernels  # noqa: F401
import dbuf
from dbuf import DBuffer, Replicate, RowAtomic, TreeError
from dbuf import tree as trees
from dbuf.testing import assert_bitwise, strategies

R, S = Replicate(), RowAtomic()
Pair = namedtuple("Pair", ["left", "right"])


def shard(tensors: Any, at: Any = S) -> DBuffer:
    return dbuf.shard(tensors, dbuf.init_mesh(), at)


@dataclasses.dataclass
class Layer:
    """A user's own node: two children, one static name."""

    w: Any
    b: Any
    name: Any


_pytree.register_pytree_node(
    Layer,
    lambda x: ([x.w, x.b], x.name),
    lambda kids, name: Layer(*kids, name),
    flatten_with_keys_fn=lambda x: ([(_pytree.GetAttrKey("w"), x.w), (_pytree.GetAttrKey("b"), x.b)], x.name),
    serialized_type_name="tests.test_tree.Layer",
)

NESTED = {
    "z": [torch.ones(2, 3), None, (torch.zeros(2), {"deep": torch.full((), 5.0)})],
    "a": Pair(torch.arange(3.0), None),
    "own": Layer(torch.ones(1, 2), None, "attention"),
    "ordered": OrderedDict(second=torch.ones(1), first=torch.zeros(1)),
    "nothing": None,
    "empty": [{}, ()],
}
PATHS = (
    "['z'][0]",
    "['z'][2][0]",
    "['z'][2][1]['deep']",
    "['a'].left",
    "['own'].w",
    "['ordered']['second']",
    "['ordered']['first']",
)


# --- trees of tensors -------------------------------------------------------------------------------------


def test_structure_none_and_custom_nodes_survive() -> None:
    buf = shard(NESTED)
    out = dbuf.unpack(buf)
    assert isinstance(out["a"], Pair) and isinstance(out["own"], Layer) and out["own"].name == "attention"
    assert list(out) == list(NESTED) and out["nothing"] is None and out["z"][1] is None and out["empty"] == [{}, ()]
    assert list(out["ordered"]) == ["second", "first"] and isinstance(out["ordered"], OrderedDict)
    assert_bitwise(out, NESTED)
    assert_bitwise(dbuf.unpack(dbuf.pack(out, buf)), NESTED)
    shapes = dbuf.shapes(buf)
    assert shapes["z"][2][1]["deep"] == torch.Size([]) and shapes["own"].b is None


def test_key_paths_are_in_insertion_order_and_none_has_none() -> None:
    assert shard(NESTED).spec.tree.paths == PATHS
    assert shard(torch.ones(2)).spec.tree.paths == ("",)
    assert shard([]).spec.tree.paths == shard(None).spec.tree.paths == ()
    assert [p for p, _ in trees.flatten_with_paths({"b": 1, "a": 2})[0]] == ["['b']", "['a']"]


@given(strategies.tensor_trees())
def test_law_unpack_inverts_shard_on_random_trees(tensors: object) -> None:
    buf = shard(tensors, R)
    assert_bitwise(dbuf.unpack(buf), tensors)
    assert_bitwise(dbuf.pack(dbuf.unpack(buf), buf).local, buf.local)
    assert buf.spec.present() == tuple(leaf is not None for leaf in trees.leaves(tensors))


def test_order_of_keys_is_part_of_the_structure() -> None:
    ab, ba = shard({"a": torch.ones(1), "b": torch.ones(1)}), shard({"b": torch.ones(1), "a": torch.ones(1)})
    assert ab.spec != ba.spec
    assert ab.spec == shard({"a": torch.zeros(1), "b": torch.ones(1)}).spec
    assert hash(ab.spec) == hash(shard({"a": torch.zeros(1), "b": torch.ones(1)}).spec)
    assert trees.signature({"a": ab, "b": 1}) == trees.signature({"a": ab, "b": 2})
    assert trees.signature({"a": ab, "b": 1}) != trees.signature({"b": 1, "a": ab})
    assert trees.signature({"a": ab}) != trees.signature({"a": ba})


def test_containers_and_missing_leaves_are_part_of_the_structure() -> None:
    one = torch.ones(1)
    specs = [shard(t).spec for t in ([one], (one,), {"0": one}, [one, None], [None, one], Pair(one, None))]
    assert len(set(specs)) == len(specs)


@pytest.mark.parametrize("held", [torch.ones(1), (1, [torch.ones(1)])], ids=["tensor", "nested"])
def test_a_tensor_in_static_metadata_is_refused(held: object) -> None:
    """It would be compared and hashed as part of the spec, and never be sharded or differentiated."""
    for tree in (Layer(torch.ones(2), None, held), {"deep": [Layer(torch.ones(2), None, held)]}):
        with pytest.raises(TreeError) as caught:
            shard(tree)
        assert "a tensor is part of the tree's static metadata" in str(caught.value)
        assert "Layer" in str(caught.value) and "one of its children" in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"a": torch.ones(2)},
        {"a": torch.ones(2), "c": torch.ones(2)},
        [torch.ones(2)] * 2,
        {"a": torch.ones(2), "b": None},
    ],
    ids=["missing", "renamed", "list", "none"],
)
def test_pack_refuses_another_structure(wrong: object) -> None:
    with pytest.raises(TreeError, match=r"^dbuf\.pack: the tensors do not match the buffer"):
        dbuf.pack(wrong, shard({"a": torch.ones(2), "b": torch.ones(2)}))


def test_keep_puts_none_where_a_tensor_was_left_out() -> None:
    part = dbuf.select(shard(NESTED), lambda path: "ordered" in path)
    out = dbuf.unpack(part)
    assert part.spec.tree.paths == PATHS[5:] and out["z"] == [None, None, (None, {"deep": None})]
    assert_bitwise(out["ordered"], NESTED["ordered"])
    assert repr(part.spec.tree) == "Structure(['ordered']['second'], ['ordered']['first'])"
    assert repr(shard([]).spec.tree) == "Structure(empty)"


# --- trees of buffers, in both libraries ------------------------------------------------------------------

LIBRARIES = pytest.mark.parametrize("library", [_pytree, optree], ids=["torch", "optree"])


@LIBRARIES
def test_tree_map_over_buffers(library: Any) -> None:
    a, b = shard({"w": torch.tensor([1.0, 2.0])}), shard({"w": torch.tensor([10.0, 20.0])})
    out = library.tree_map(torch.add, {"p": [a, (b,)]}, {"p": [b, (b,)]})
    assert isinstance(out["p"][0], DBuffer) and out["p"][0].spec is a.spec
    assert out["p"][0].local.tolist() == [11, 22] and out["p"][1][0].local.tolist() == [20, 40]


@LIBRARIES
def test_tree_map_refuses_buffers_with_other_specs(library: Any) -> None:
    a = shard({"w": torch.ones(2)})
    for other in (shard({"v": torch.ones(2)}), shard({"w": torch.ones(2)}, R), shard({"w": torch.ones(2, 1)})):
        with pytest.raises(ValueError, match=r"[Mm]ismatch"):
            library.tree_map(torch.add, a, other)


@LIBRARIES
def test_unflatten_checks_nothing_so_that_transforms_may_pass_other_objects(library: Any) -> None:
    a = shard({"w": torch.ones(2)})
    out = library.tree_map(lambda _: "anything", {"a": a})
    assert out["a"].local == "anything" and out["a"].spec == a.spec and "'anything'" in repr(out["a"])


def test_both_libraries_see_the_same_leaves_in_the_same_places() -> None:
    tree = {"a": shard([torch.ones(2)]), "b": (shard([torch.zeros(3)]), None)}
    assert_bitwise(optree.tree_leaves(tree), [leaf for leaf in _pytree.tree_leaves(tree) if leaf is not None])
    assert optree.tree_paths(tree) == [("a", "local"), ("b", 0, "local")]
    keyed = [(p, x) for p, x in trees.flatten_with_paths(tree)[0] if x is not None]
    assert [path for path, _ in keyed] == ["['a'].local", "['b'][0].local"]
    paths, leaves, spec = optree.tree_flatten_with_path(tree)
    assert len(paths) == len(leaves) == 2
    assert_bitwise(optree.tree_unflatten(spec, leaves), tree)
    values, torch_spec = _pytree.tree_flatten(tree)
    assert_bitwise(_pytree.tree_unflatten(values, torch_spec), tree)
    assert hash(spec) == hash(optree.tree_structure(tree))


@pytest.mark.slow
def test_map_and_leaves_are_those_of_pytree_in_a_trace_too() -> None:
    buf, other = shard({"w": torch.ones(2, 3)}), shard({"v": torch.ones(6)})
    inside = DBuffer((torch.ones(1), {"x": torch.zeros(2)}), buf.spec)  # as some transforms do
    tree = {**NESTED, "buf": buf, "inside": inside, "number": 3}

    def at_buffers(node: Any) -> bool:
        return isinstance(node, DBuffer)

    def both(tree: Any, more: Any) -> Any:
        def add(a: Any, b: Any) -> Any:
            return a + b if isinstance(a, torch.Tensor) else a

        return (
            trees.map(add, tree, more),
            trees.map(lambda node: node.local if at_buffers(node) else node, tree, is_leaf=at_buffers),
            trees.leaves(tree),
            trees.leaves(tree, is_leaf=at_buffers),
        )

    more = _pytree.tree_map(lambda x: x + 1 if isinstance(x, torch.Tensor) else x, tree)
    compiled = torch.compile(both, fullgraph=True, backend="eager")
    assert_bitwise(compiled(tree, more), both(tree, more))
    mapped, leaves = both(tree, more)[0], both(tree, more)[2]
    assert_bitwise(leaves, _pytree.tree_leaves(tree))
    assert mapped["buf"].spec == buf.spec and mapped["inside"].local[1]["x"].sum() == 2
    for wrong in ({"b": other}, {"b": buf.local}, {"c": buf}):
        with pytest.raises(Exception, match=r"(?i)mismatch|expected"):
            torch.compile(lambda a, b: trees.map(torch.add, a, b), fullgraph=True, backend="eager")({"b": buf}, wrong)


def test_map_with_path_and_fill() -> None:
    assert trees.map_with_path(lambda path, x, y: (path, x + y), {"b": 1}, {"b": 2}) == {"b": ("['b']", 3)}
    spec = trees.structure({"b": [0, 0], "a": 0})
    assert trees.fill([1, 2], spec, (True, False, True)) == {"b": [1, None], "a": 2}


# --- prefixes ---------------------------------------------------------------------------------------------


def test_placement_specs_may_be_a_prefix() -> None:
    def at(placements: Any, tree: Any) -> Any:
        return trees.map(lambda b: b.placements, dbuf.redistribute(tree, placements), is_leaf=dbuf.buffer.is_buffer)

    def new() -> DBuffer:
        return shard([torch.ones(2)])

    r, s = (R,), (S,)
    tree = {"embed": new(), "blocks": [new(), new()], "rest": {"x": new(), "y": (new(),)}}
    assert at(r, tree) == at(R, tree) == {"embed": r, "blocks": [r, r], "rest": {"x": r, "y": (r,)}}
    prefix = {"embed": s, "blocks": r, "rest": {"x": r, "y": s}}
    assert at(prefix, tree) == {"embed": s, "blocks": [r, r], "rest": {"x": r, "y": (s,)}}
    assert at({"embed": s, "blocks": [r, s], "rest": R}, tree)["blocks"] == [r, s]
    assert at((r, s), (new(), [new()])) == (r, [s])  # a tuple of specs, not one spec
    assert at([], []) == [] and at(r, {}) == {}


@pytest.mark.parametrize(
    "prefix",
    [
        {"a": (R,)},
        [(R,)],
        {"a": (R,), "c": (R,)},
        {"a": (R,), "b": [(R,)]},
        ((R,), (R,)),
        "Replicate",
        {"a": R, "b": 3},
    ],
    ids=["missing", "list", "renamed", "too deep", "tuple", "text", "number"],
)
def test_a_wrong_prefix_is_refused(prefix: object) -> None:
    tree = {"a": shard([torch.ones(2)]), "b": shard([torch.ones(2)])}
    with pytest.raises(dbuf.DbufError) as caught:
        dbuf.allgather(tree, prefix)
    assert str(caught.value).startswith("dbuf.allgather: ") and "need: " in str(caught.value)


def test_a_leaf_that_is_no_buffer_is_named() -> None:
    with pytest.raises(TreeError) as caught:
        dbuf.allgather({"a": shard([torch.ones(2)]), "b": [torch.ones(2), 3]})
    assert "bufs['b'][0]: Tensor\n        bufs['b'][1]: int" in str(caught.value)


def test_the_message_names_the_buffer_that_does_not_fit() -> None:
    tree = {"ok": shard([torch.ones(2)], R), "block3": shard([torch.ones(2)], dbuf.Partial("sum"))}
    with pytest.raises(dbuf.PlacementError, match=r"^dbuf\.view: bufs\['block3'\] cannot go"):
        dbuf.view(tree, S)


def test_none_holds_no_buffer() -> None:
    """A tree of buffers may have None where there is none, through every kind of function."""
    mesh = dbuf.init_mesh(("dp",), device_type="cpu")
    buf = dbuf.shard({"w": torch.ones(3, 2)}, mesh, dbuf.RowAtomic())
    bufs = {"a": buf, "b": None}
    assert dbuf.allgather(bufs)["b"] is None
    assert dbuf.redistribute(bufs, {"a": dbuf.Replicate(), "b": dbuf.Replicate()})["a"].placements == (
        dbuf.Replicate(),
    )
    assert dbuf.cast(bufs, torch.bfloat16)["a"].dtype == torch.bfloat16
    assert dbuf.global_norm(bufs) == dbuf.global_norm(buf)
    loss, grads = dbuf.value_and_grad(dbuf.gathered(lambda p: p["a"]["w"].sum()))(bufs)
    assert loss == 6.0 and grads["b"] is None and torch.equal(grads["a"].local, torch.ones(6))
    with pytest.raises(dbuf.TreeError, match="not every leaf is a DBuffer"):
        dbuf.cast({"a": torch.ones(2)}, torch.bfloat16)


def test_a_buffer_is_not_a_dict() -> None:
    """The likeliest slip of a newcomer: weights used without `gathered`."""
    mesh = dbuf.init_mesh(("dp",), device_type="cpu")
    buf = dbuf.shard({"w": torch.ones(3, 2)}, mesh, dbuf.RowAtomic())
    with pytest.raises(dbuf.TreeError, match=r"dbuf\.gathered"):
        buf["w"]


@pytest.mark.slow
def test_a_new_spec_leaves_a_compiled_function_in_silence(tmp_path: Path) -> None:
    """torch's cache of programs imports what a graph names: a spec is named by a function that can be imported."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, dbuf\n"
        "buf = dbuf.shard({'w': torch.ones(3, 2)}, dbuf.init_mesh(('dp',), device_type='cpu'), dbuf.RowAtomic())\n"
        "print(torch.compile(dbuf.allgather, fullgraph=True)(buf).placements)\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", script], capture_output=True, text=True, timeout=300)
    assert done.stdout == f"{(R,)}\n"
    assert "pickle" not in done.stderr and "Traceback" not in done.stderr
