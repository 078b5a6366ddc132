"""`by_owner`: optimizers on whole tensors, each worked on by one rank.

gradients, sharded         rank 0: [A A A|B B]        rank 1: [B B|C C C]
to the owners              rank 0: [A A A]            rank 1: [B B B B C C C]     one all-to-all
plain tensor code          rank 0: f(A)               rank 1: f(B), f(C)
and back                   rank 0: [a a a|b b]        rank 1: [b b|c c c]         one all-to-all
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from dbuf import tree
from dbuf.buffer import DBuffer, buffers, is_buffer, pack
from dbuf.compat import register_constant
from dbuf.errors import TreeError, explain
from dbuf.layout import GlobalLayout, Shape
from dbuf.movement import redistribute
from dbuf.optim.base import GradientTransformation, PyTree, each, require_same_specs, state_dtype
from dbuf.optim.paths import Rule, decide, put, take
from dbuf.placement import TensorAtomic, shard_placement
from dbuf.plan.owners import Cost, plan_owners
from dbuf.plan.tensors import plan_tensor_atomic
from dbuf.spec import BufferSpec

__all__ = ["by_owner"]

_WHERE = "dbuf.optim.by_owner"


def by_owner(
    init: Callable[[torch.Tensor], PyTree],
    update: Callable[[torch.Tensor, PyTree], tuple[torch.Tensor, PyTree]],
    *,
    select: Rule | None = None,
    cost: Cost = "numel",
) -> GradientTransformation:
    """An optimizer on whole logical tensors, written as plain tensor code.

    The tensors of all groups are shared out over all ranks of their mesh (`plan_owners`); those of equal shape that a
    rank owns run as one batch, through `torch.func.vmap`. Parameters that rest as `TensorAtomic` stay where they are.

    Args:
        init: `init(param) -> state` of one tensor: a pytree of tensors of any shapes, of one structure for all
            tensors. It sees the shape and dtype of the parameter, but not its numbers.
        update: `update(grad, state) -> (update, state)` of one tensor, at least float32.
        select: `select(path, shape)` says which tensors; the updates of others pass as they are. By default all.
        cost: What a tensor costs its owner: `"numel"`, `"newton_schulz"` or a function of its shape.

    Returns:
        The transformation. Its state is a list with an entry a buffer: the pytree of `init`, with a TensorAtomic buffer
        in place of each tensor, which has the paths of the parameters.

    Raises:
        PlacementError: In `update`, gradients are not placed and laid out like the parameters.
        TreeError: States of different structures or dtypes.

    Communication:
        One all-to-all a buffer to the owners and one back. On a mesh with a replicated axis the way back starts with an
        all-gather along it. None for resting TensorAtomic parameters. Each rank sends what it holds of the selected
        tensors, and what it owns of them.

    Gradient:
        None is needed; `update` is not differentiated.

    Example:
        >>> import dbuf
        >>> buf = dbuf.shard({"w": 2 * torch.eye(2)}, dbuf.init_mesh(), dbuf.RowAtomic())
        >>> sign = by_owner(lambda w: (), lambda g, state: (g / g.norm(), state))
        >>> sign.update(buf, sign.init(buf), buf)[0].local
        tensor([0.7071, 0.0000, 0.0000, 0.7071])
    """
    owners = _Owners(cost)

    def init_all(params: PyTree) -> list[PyTree]:
        parts = [part for part in _parts(params, params, select) if part is not None]
        return [_init_state(init, owners, target, part) for part, target in _with_targets(parts, owners)]

    def update_all(grads: PyTree, state: list[PyTree], params: PyTree) -> tuple[PyTree, list[PyTree]]:
        require_same_specs(_WHERE, params, grads=grads)
        wide = each(lambda g: g.to(state_dtype(g.dtype)), grads)
        parts = _parts(wide, params, select)
        moving = [part for part in parts if part is not None]
        if not moving:
            return wide, state
        targets = [target for _, target in _with_targets(moving, owners)]
        owned = _move(moving, targets)
        results, new_state = _update_owned(update, owned, state)
        back = iter(_move(results, [part.spec for part in moving]))
        whole = iter([None if part is None else next(back) for part in parts])

        updates = tree.map(lambda g: g if g is None else put(g, next(whole)), wide, is_leaf=is_buffer)
        return updates, new_state

    return GradientTransformation(init_all, update_all)


@dataclass(frozen=True)
class _Owners:
    """Where the selected tensors of each buffer go: found for real while a step is traced."""

    cost: Cost

    def targets(self, *specs: BufferSpec) -> tuple[BufferSpec, ...]:
        """For each spec the TensorAtomic one of its owners; itself where it is TensorAtomic already."""
        moving = [k for k, spec in enumerate(specs) if not isinstance(shard_placement(spec.placements), TensorAtomic)]
        out = list(specs)
        for mesh in dict.fromkeys(specs[k].mesh for k in moving):
            here = [k for k in moving if specs[k].mesh == mesh]
            layouts = _layouts(tuple(specs[k].global_shapes() for k in here), mesh.size(), self.cost)
            for k, layout in zip(here, layouts, strict=True):
                out[k] = specs[k].with_layout((TensorAtomic(),) * mesh.ndim, layout, _WHERE)
        return tuple(out)

    def of_state(self, target: BufferSpec, shapes: tuple[Shape, ...]) -> BufferSpec:
        """The spec of one tensor of state a parameter, each with the parameter's owner."""
        cuts = target.layout.rank_to_offset
        owners = [max(bisect_right(cuts, at) - 1, 0) for at in target.layout.tensor_to_offset]
        layout = plan_tensor_atomic(shapes, target.layout.dp_size, tensor_owners=owners)
        return BufferSpec(target.mesh, target.placements, layout, target.tree)


@lru_cache(maxsize=256)
def _layouts(shapes: tuple[tuple[Shape, ...], ...], num_ranks: int, cost: Cost) -> tuple[GlobalLayout, ...]:
    """A layout a buffer, the owners of all chosen together."""
    owners = iter(plan_owners([shape for of_buffer in shapes for shape in of_buffer], num_ranks, cost=cost).owners)
    return tuple(
        plan_tensor_atomic(of_buffer, num_ranks, tensor_owners=[next(owners) for _ in of_buffer])
        for of_buffer in shapes
    )


register_constant(_Owners, ("targets", "of_state", "__eq__", "__hash__"))


def _parts(bufs: PyTree, params: PyTree, rule: Rule | None) -> list[DBuffer | None]:
    """What the rule takes of each buffer: itself, a selection, or nothing."""
    if rule is None:
        return list(buffers(bufs))
    return [take(buf, keep) for buf, (_, keep) in zip(buffers(bufs), decide(rule, params), strict=True)]


def _with_targets(parts: list[DBuffer], owners: _Owners) -> list[tuple[DBuffer, BufferSpec]]:
    return list(zip(parts, owners.targets(*[part.spec for part in parts]), strict=True)) if parts else []


def _move(bufs: list[DBuffer], targets: list[BufferSpec]) -> list[DBuffer]:
    """All buffers to other placements and layouts, all started before any is waited for."""
    placements = [target.placements for target in targets]
    moved: list[DBuffer] = redistribute(bufs, placements, layout=[target.layout for target in targets])
    return moved


def _owned(buf: DBuffer) -> dict[int, torch.Tensor]:
    """The tensors that this rank owns, by their number in the buffer."""
    parts = buf.local.split_with_sizes(buf.spec.split_sizes())
    shapes = buf.spec.global_shapes()
    return {t: parts[part].view(shapes[t]) for t, part in enumerate(buf.spec.part_of_tensor()) if part >= 0}


class _Member(NamedTuple):
    """One tensor of a batch: which buffer, which tensor of it, its gradient and the leaves of its state."""

    buffer: int
    tensor: int
    grad: torch.Tensor
    state: tuple[torch.Tensor, ...]


def _update_owned(
    update: Callable[[torch.Tensor, PyTree], tuple[torch.Tensor, PyTree]], owned: list[DBuffer], state: list[PyTree]
) -> tuple[list[DBuffer], list[PyTree]]:
    """Run `update` on everything that this rank owns, tensors of equal shapes together."""
    batches: dict[tuple[Any, ...], list[_Member]] = {}
    states = [tree.flatten(of_buffer, is_leaf=is_buffer) for of_buffer in state]
    for k, buf in enumerate(owned):
        leaves = [_owned(leaf) for leaf in states[k][0]]
        for t, grad in _owned(buf).items():
            member = _Member(k, t, grad, tuple([leaf[t] for leaf in leaves]))
            batches.setdefault((grad.shape, *[x.shape for x in member.state], str(states[k][1])), []).append(member)
    results: list[dict[int, torch.Tensor]] = [{} for _ in owned]
    new_leaves: list[list[dict[int, torch.Tensor]]] = [[{} for _ in leaves] for leaves, _ in states]
    for members in batches.values():
        structure = states[members[0].buffer][1]
        stacked = [torch.stack([member.state[i] for member in members]) for i in range(len(members[0].state))]
        grads = torch.stack([member.grad for member in members])
        result, new = torch.func.vmap(update)(grads, tree.unflatten(stacked, structure))
        new_flat = tree.leaves(new)
        for i, member in enumerate(members):
            results[member.buffer][member.tensor] = result[i]
            for leaf, x in zip(new_leaves[member.buffer], new_flat, strict=True):
                leaf[member.tensor] = x[i]
    updates = [_pack(found, buf) for found, buf in zip(results, owned, strict=True)]
    new_state = [
        tree.unflatten([_pack(found, leaf) for found, leaf in zip(of_buffer, leaves, strict=True)], structure)
        for of_buffer, (leaves, structure) in zip(new_leaves, states, strict=True)
    ]
    return updates, new_state


def _pack(owned: dict[int, torch.Tensor], like: DBuffer) -> DBuffer:
    """A buffer of what this rank owns; of nothing, `like`, so that the way back still needs the way there.

    A collective that nobody needs is left out of a compiled program, and here it would be on this rank alone.
    """
    if not owned:
        return like
    spec = like.spec
    leaves = [
        owned[t].to(like.dtype) if t in owned else like.local.new_zeros(shape)
        for t, shape in enumerate(spec.local_shapes())
    ]
    return pack(tree.fill(leaves, spec.treespec(), spec.present()), like)


def _init_state(init: Callable[[torch.Tensor], PyTree], owners: _Owners, target: BufferSpec, part: DBuffer) -> PyTree:
    """The state of one buffer: for each leaf of `init`'s tree a buffer with that tensor of every parameter."""
    dtype, device = state_dtype(part.dtype), part.device
    shapes = target.global_shapes()
    templates = [tree.flatten(init(torch.empty(shape, dtype=dtype, device="meta"))) for shape in shapes]
    if not templates:
        return ()
    _check_states(templates, target)
    own = {t for t, at in enumerate(target.part_of_tensor()) if at >= 0}
    made = {t: tree.leaves(init(torch.zeros(shapes[t], dtype=dtype, device=device))) for t in own}
    state = []
    for i, leaf in enumerate(templates[0][0]):
        spec = owners.of_state(target, tuple([tuple(leaves[i].shape) for leaves, _ in templates]))
        like = DBuffer(torch.zeros(spec.local_numel(), dtype=leaf.dtype, device=device), spec)
        state.append(_pack({t: made[t][i] for t in own}, like))
    return tree.unflatten(state, templates[0][1])


def _check_states(templates: list[tuple[list[torch.Tensor], Any]], target: BufferSpec) -> None:
    def form(template: tuple[list[torch.Tensor], Any]) -> tuple[Any, ...]:
        return template[1], tuple(leaf.dtype for leaf in template[0])

    forms = [form(template) for template in templates]
    if any(found != forms[0] for found in forms):
        raise TreeError(
            explain(
                _WHERE,
                "init gives states of different structures.",
                got="\n".join(f"{path}: {found}" for path, found in zip(target.tree_paths(), forms, strict=True)),
                need="one structure and dtypes for all tensors; shapes may differ",
                fix="a by_owner for each kind of tensor, put together with dbuf.optim.partition",
            )
        )
