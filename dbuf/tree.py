"""The one door to the pytree libraries: traversal, key paths, prefixes, and registration with both of them.

`torch.utils._pytree` decides every order in this library: dicts keep their insertion order and `None` holds no
tensor. optree sorts dict keys, so it is only told how to open our own node, never asked for an order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, cast

import optree
import torch
from torch.utils import _pytree

from dbuf.compat import OPTREE_GLOBAL, GetAttrKey, TreeSpec
from dbuf.errors import TreeError, explain

__all__ = [
    "Node",
    "Structure",
    "broadcast_prefix",
    "fill",
    "flatten",
    "flatten_with_paths",
    "leaves",
    "map",
    "map_with_path",
    "register_node",
    "signature",
    "structure",
    "unflatten",
]

flatten = _pytree.tree_flatten
unflatten = _pytree.tree_unflatten
structure = _pytree.tree_structure
_OWN = "dbuf"  # a namespace of optree, in which dicts keep their order


class Node:
    """Base of the classes that `register_node` takes, so that a trace tells them from leaves at a glance."""

    __slots__ = ()
    map_children: Callable[..., Any]
    """`map_children(fn, node, others)`: `map` of a node and others like it."""


def map(fn: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """`torch.utils._pytree.tree_map`, in a trace by a shorter way.

    Dynamo maps over containers without tracing pytree's code, but not over nodes of ours, of which a step has
    hundreds: half of what it traced was pytree.
    """
    if is_leaf is not None or not torch.compiler.is_compiling():
        return _pytree.tree_map(fn, tree, *rest, is_leaf=is_leaf)
    return _pytree.tree_map(
        lambda node, *others: node.map_children(fn, node, others) if isinstance(node, Node) else fn(node, *others),
        tree,
        *rest,
        is_leaf=_is_node,
    )


def leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """`torch.utils._pytree.tree_leaves`, in a trace by a shorter way."""
    if not torch.compiler.is_compiling():
        return _pytree.tree_leaves(tree, is_leaf=is_leaf)
    found: list[Any] = []
    map(lambda leaf: found.append(leaf), tree, is_leaf=is_leaf)
    return found


def _is_node(node: Any) -> bool:
    return isinstance(node, Node)


def signature(tree: Any) -> Hashable:
    """The containers and static parts of a tree as one hashable value, found in C++; the order of dicts counts."""
    with optree.dict_insertion_ordered(True, namespace=_OWN):
        return optree.tree_structure(tree, none_is_leaf=False, namespace=_OWN)


def flatten_with_paths(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[tuple[str, Any]], TreeSpec]:
    """Leaves with their key paths, such as `("['block']['w']", tensor)`, and the structure."""
    keyed, spec = _pytree.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [(_pytree.keystr(path), leaf) for path, leaf in keyed], spec


def map_with_path(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`map`, with the key path of the leaf as the first argument of `fn`."""
    return _pytree.tree_map_with_path(lambda path, *xs: fn(_pytree.keystr(path), *xs), tree, *rest)


class Structure:
    """The structure of a tree of tensors as a hashable value: its containers, and a key path for each tensor.

    torch's `TreeSpec` keeps dict keys in a list and cannot be hashed, and it counts `None` as a leaf. This wraps
    one: it hashes the key paths once, compares the spec itself, and remembers which leaves hold no tensor.
    """

    __slots__ = ("_hash", "paths", "present", "spec")

    def __init__(self, spec: TreeSpec, paths: tuple[str, ...], present: tuple[bool, ...]) -> None:
        self.spec = spec
        self.paths = paths
        self.present = present
        self._hash = hash((paths, present))

    @classmethod
    def of(cls, tree: Any, where: str) -> tuple[Structure, list[Any]]:
        """The structure of `tree` and its leaves, without the `None` ones.

        Raises:
            TreeError: A custom node keeps a tensor in its static part, where it would be compared and hashed.
        """
        keyed, spec = flatten_with_paths(tree)
        held = _tensor_in_context(spec)
        if held is not None:
            raise TreeError(
                explain(
                    where,
                    "a tensor is part of the tree's static metadata.",
                    got=f"node {held[0].__name__} with {type(held[1]).__name__} in its context",
                    need="tensors as leaves; contexts that can be compared and hashed",
                    fix=f"register {held[0].__name__} so that the tensor is one of its children",
                )
            )
        kept = [(path, leaf) for path, leaf in keyed if leaf is not None]
        present = tuple(leaf is not None for _, leaf in keyed)
        return cls(spec, tuple(path for path, _ in kept), present), [leaf for _, leaf in kept]

    def keep(self, mask: tuple[bool, ...]) -> Structure:
        """The same containers with `None` in place of the tensors that `mask` leaves out."""
        kept = iter(mask)
        present = tuple(was and next(kept) for was in self.present)
        return Structure(self.spec, tuple(p for p, keep in zip(self.paths, mask, strict=True) if keep), present)

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Structure)
            and self.paths == other.paths
            and self.present == other.present
            and self.spec == other.spec
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Structure({', '.join(self.paths) or 'empty'})"


def fill(leaves: list[Any], spec: TreeSpec, present: tuple[bool, ...]) -> Any:
    """The tree with these leaves where one is present, and `None` elsewhere."""
    it = iter(leaves)
    return unflatten([next(it) if here else None for here in present], spec)


def _tensor_in_context(spec: TreeSpec) -> tuple[type, torch.Tensor] | None:
    found = [leaf for leaf in _context_leaves(spec.context) if isinstance(leaf, torch.Tensor)]
    if found:
        return spec.type, found[0]
    for child in spec.children():
        inner = _tensor_in_context(child)
        if inner is not None:
            return inner
    return None


def _context_leaves(context: Any) -> list[Any]:
    return [] if context is None else list(leaves(context))


def broadcast_prefix(
    prefix: Any,
    tree: Any,
    *,
    is_prefix_leaf: Callable[[Any], bool],
    is_leaf: Callable[[Any], bool],
    where: str,
) -> list[Any]:
    """One entry of `prefix` for every leaf of `tree`, as `in_specs` in `jax.shard_map`.

    Raises:
        TreeError: `prefix` is not a prefix of `tree`.
    """
    if is_prefix_leaf(prefix):
        return [prefix] * len(leaves(tree, is_leaf=is_leaf))
    branches, spec = flatten(prefix, is_leaf=is_prefix_leaf)
    try:
        subtrees = spec.flatten_up_to(tree)
    except ValueError as error:
        raise TreeError(
            explain(
                where,
                "the placement specs are not a prefix of the tree of buffers.",
                got=f"specs {spec}, {error}",
                need="one tuple of placements for everything, or a tree of them with the buffers' containers",
                fix="one tuple, such as (RowAtomic(),)",
            )
        ) from None
    out: list[Any] = []
    for entry, subtree in zip(branches, subtrees, strict=True):
        out += [entry] * len(leaves(subtree, is_leaf=is_leaf))
    return out


def register_node(
    cls: type[Node],
    fields: tuple[str, ...],
    get_static: Callable[[Any], Hashable],
    build: Callable[[Any, tuple[Any, ...]], Any],
) -> None:
    """Make `cls` a pytree node for torch and for optree alike, with key paths.

    A node that only one of them knows is invisible to the other: optree users would lose `torch.func`, or the
    reverse.

    Args:
        cls: The class, a subclass of `Node`.
        fields: Attributes that are children, in order.
        get_static: The hashable rest of an instance.
        build: `(static, children) -> instance`; it must accept any object as a child.
    """

    def children(node: Any) -> tuple[Any, ...]:
        return tuple(getattr(node, field) for field in fields)

    def keyed(node: Any) -> tuple[list[tuple[Any, Any]], Any]:
        return [(GetAttrKey(field), getattr(node, field)) for field in fields], get_static(node)

    def map_node(fn: Callable[..., Any], node: Any, others: tuple[Any, ...]) -> Any:
        static = get_static(node)
        for other in others:
            if type(other) is not cls or get_static(other) != static:
                return _pytree.tree_map(fn, node, *others)  # which says what is wrong
        rows = [(getattr(node, field), *[getattr(other, field) for other in others]) for field in fields]
        return build(static, tuple([fn(*row) if isinstance(row[0], torch.Tensor) else map(fn, *row) for row in rows]))

    cls.map_children = staticmethod(map_node)
    _pytree.register_pytree_node(
        cls,
        lambda node: (list(children(node)), get_static(node)),
        lambda kids, static: build(static, tuple(kids)),
        flatten_with_keys_fn=keyed,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
    )
    optree.register_pytree_node(
        cast(Any, cls),  # its stubs want a collection
        lambda node: (children(node), get_static(node), fields),
        lambda static, kids: build(static, tuple(kids)),
        namespace=OPTREE_GLOBAL,
    )
