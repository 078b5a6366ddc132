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
from typing import Any, NamedTuple, TypeAlias

import torch

from dbuf import tree
from dbuf.buffer import DBuffer, buffers, is_buffer, pack
from dbuf.compat import register_constant
from dbuf.errors import TreeError, explain
from dbuf.layout import GlobalLayout, Shape
from dbuf.movement import redistribute
from dbuf.optim.arguments import require_callable
from dbuf.optim.base import GradientTransformation, PyTree, each, require_same_specs, state_dtype
from dbuf.optim.owner_checks import require_equal_structures, require_state, require_update, template_of
from dbuf.optim.paths import Rule, decide, put, take
from dbuf.placement import TensorAtomic, shard_placement
from dbuf.plan.owners import Cost, plan_owners
from dbuf.plan.tensors import plan_tensor_atomic
from dbuf.spec import BufferSpec

__all__ = ["by_owner"]

_WHERE = "dbuf.optim.by_owner"

Update: TypeAlias = Callable[[torch.Tensor, PyTree], tuple[torch.Tensor, PyTree]]


def by_owner(
    init: Callable[[torch.Tensor], PyTree],
    update: Update,
    *,
    select: Rule | None = None,
    cost: Cost = "numel",
) -> GradientTransformation:
    """An optimizer on whole logical tensors, written as plain tensor code.

    The tensors of all groups are shared out over all ranks of their mesh (`plan_owners`); those of equal shape that a
    rank owns run as one batch, through `torch.func.vmap`. Parameters that rest as `TensorAtomic` stay where they are.

    A tensor has one owner, also where it is a stack of matrices: experts balance as tensors of their own, and not as
    one that costs more than a rank's share.

    Args:
        init: `init(param) -> state` of one tensor: a pytree of tensors of any shapes, of one structure for all
            tensors. It sees the shape and dtype of the parameter, but not its numbers.
        update: `update(grad, state) -> (update, state)` of one tensor, at least float32, with the shapes, structure
            and dtypes that it is given. `init` tries it on every rank, on tensors without memory.
        select: `select(path, shape)` says which tensors; the updates of others pass as they are. By default all.
        cost: What a tensor costs its owner: `"numel"`, `"newton_schulz"` or a function of its shape.

    Returns:
        The transformation. Its state is the tree of parameters with an entry in place of each buffer: the pytree of
        `init`, with a TensorAtomic buffer in place of each tensor, which has the paths of the parameters; or None where
        no tensor is selected.

    Raises:
        DbufError: `select` is no function.
        PlacementError: In `update`, gradients are not placed and laid out like the parameters, or the state is that of
            other owners or of another selection.
        TreeError: In `init`, states of different structures or dtypes, or an update that does not fit them.

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
    require_callable(_WHERE, "select", select, "lambda path, shape: len(shape) >= 2")
    owners = _Owners(cost)

    def init_all(params: PyTree) -> PyTree:
        parts = _parts(params, params, select)
        entries: list[PyTree] = [None] * len(parts)
        for k, part, target in _moving(parts, _targets(parts, owners)):
            entries[k] = _init_state(init, update, owners, target, part)
        return _in_place_of_buffers(params, entries)

    def update_all(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        require_same_specs(_WHERE, params, grads=grads)
        wide = each(lambda g: g.to(state_dtype(g.dtype)), grads)
        parts = _parts(wide, params, select)
        targets = _targets(parts, owners)
        entries = _entries(params, state)
        if not torch.compiler.is_compiling():
            for entry, target in zip(entries, targets, strict=True):
                require_state(entry, target, owners.of_state)
        moving = _moving(parts, targets)
        if not moving:
            return wide, state
        owned = _move([part for _, part, _ in moving], [target for _, _, target in moving])
        results, new = _update_owned(update, owned, [entries[k] for k, _, _ in moving])
        back = _move(results, [part.spec for _, part, _ in moving])
        whole: list[DBuffer | None] = [None] * len(parts)
        for (k, _, _), entry, buf in zip(moving, new, back, strict=True):
            entries[k], whole[k] = entry, buf
        updates = [put(buf, part) for buf, part in zip(buffers(wide), whole, strict=True)]
        return _in_place_of_buffers(wide, updates), _in_place_of_buffers(params, entries)

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


def _targets(parts: list[DBuffer | None], owners: _Owners) -> list[BufferSpec | None]:
    """Where each part goes; None for none."""
    specs = [part.spec for part in parts if part is not None]
    targets = iter(owners.targets(*specs) if specs else ())
    return [None if part is None else next(targets) for part in parts]


def _moving(parts: list[DBuffer | None], targets: list[BufferSpec | None]) -> list[tuple[int, DBuffer, BufferSpec]]:
    """What there is to move: the number of its buffer, itself, and where it goes."""
    pairs = enumerate(zip(parts, targets, strict=True))
    return [(k, part, target) for k, (part, target) in pairs if part is not None and target is not None]


def _in_place_of_buffers(bufs: PyTree, entries: list[Any]) -> PyTree:
    """The tree with an entry in place of each buffer."""
    rest = iter(entries)
    return tree.map(lambda buf: next(rest) if is_buffer(buf) else buf, bufs, is_leaf=is_buffer)


def _entries(bufs: PyTree, state: PyTree) -> list[PyTree]:
    """The entry of each buffer."""
    found: list[PyTree] = []
    try:
        tree.map(lambda buf, entry: found.append(entry) if is_buffer(buf) else None, bufs, state, is_leaf=is_buffer)
    except ValueError as error:
        raise TreeError(
            explain(
                _WHERE,
                "the state and params are trees of different structure.",
                got=str(error),
                need="the tree of params with an entry in place of each buffer",
                fix="the state that init(params) gives",
            )
        ) from None
    return found


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


def _update_owned(update: Update, owned: list[DBuffer], state: list[PyTree]) -> tuple[list[DBuffer], list[PyTree]]:
    """Run `update` on everything that this rank owns, tensors of equal shapes and dtypes together."""
    batches: dict[tuple[Any, ...], list[_Member]] = {}
    states = [tree.flatten(of_buffer, is_leaf=is_buffer) for of_buffer in state]
    for k, buf in enumerate(owned):
        leaves = [_owned(leaf) for leaf in states[k][0]]
        for t, grad in _owned(buf).items():
            member = _Member(k, t, grad, tuple([leaf[t] for leaf in leaves]))
            kinds = [(x.shape, x.dtype) for x in (grad, *member.state)]
            batches.setdefault((*kinds, str(states[k][1])), []).append(member)
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


def _init_state(
    init: Callable[[torch.Tensor], PyTree], update: Update, owners: _Owners, target: BufferSpec, part: DBuffer
) -> PyTree:
    """The state of one buffer: for each leaf of `init`'s tree a buffer with that tensor of every parameter."""
    dtype, device = state_dtype(part.dtype), part.device
    shapes = target.global_shapes()
    templates = [template_of(init(torch.empty(shape, dtype=dtype, device="meta"))) for shape in shapes]
    if not templates:
        return ()
    require_equal_structures(templates, target.tree_paths())
    if not torch.compiler.is_compiling():
        for shape, template in dict(zip(shapes, templates, strict=True)).items():
            require_update(update, shape, dtype, device, template)
    own = {t for t, at in enumerate(target.part_of_tensor()) if at >= 0}
    made = {t: tree.leaves(init(torch.zeros(shapes[t], dtype=dtype, device=device))) for t in own}
    state = []
    for i, leaf_dtype in enumerate(templates[0].dtypes):
        spec = owners.of_state(target, tuple([template.shapes[i] for template in templates]))
        like = DBuffer(torch.zeros(spec.local_numel(), dtype=leaf_dtype, device=device), spec)
        state.append(_pack({t: made[t][i] for t in own}, like))
    return tree.unflatten(state, templates[0].structure)
