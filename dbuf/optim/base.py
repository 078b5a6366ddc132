"""What every optimizer shares: the `init` / `update` pair, chaining, applying, and the guard on placements.

A transformation is two pure functions, as in optax (Hessel et al., 2020, https://github.com/google-deepmind/optax):
`init(params) -> state` and `update(grads, state, params) -> (updates, state)`. Nothing is written in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch

from dbuf import tree
from dbuf.buffer import DBuffer, buffers, is_buffer
from dbuf.errors import DbufError, PlacementError, TreeError, explain
from dbuf.placement import Partial, describe
from dbuf.spec import BufferSpec

__all__ = [
    "GradientTransformation",
    "LearningRate",
    "PyTree",
    "apply_updates",
    "chain",
    "device_of",
    "each",
    "named",
    "require_same_specs",
    "state_dtype",
    "to_state_dtype",
]

PyTree: TypeAlias = Any
"""A pytree of DBuffers, or an optimizer's state: a pytree of DBuffers and 0-d tensors."""

LearningRate: TypeAlias = float | torch.Tensor | Callable[[torch.Tensor], torch.Tensor]
"""A number, a 0-d tensor, or a schedule: a function of the number of updates done so far (0-d int64)."""


class GradientTransformation(NamedTuple):
    """An optimizer, or a part of one.

    Attributes:
        init: `init(params) -> state`.
        update: `update(grads, state, params) -> (updates, state)`; `updates` are what `apply_updates` adds.
    """

    init: Callable[[PyTree], PyTree]
    update: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]


def chain(*transformations: GradientTransformation) -> GradientTransformation:
    """Run transformations one after the other, the updates of each going into the next.

    Args:
        *transformations: First to last. None at all is the identity.

    Returns:
        One transformation, whose state is the tuple of theirs.

    Raises:
        DbufError: An argument is no transformation.

    Example:
        >>> from dbuf.optim import sgd
        >>> from dbuf.optim import clip_by_global_norm
        >>> len(chain(clip_by_global_norm(1.0), sgd(0.1)).init({}))
        2
    """
    wrong = [part for part in transformations if not hasattr(part, "init") or not hasattr(part, "update")]
    if wrong:
        raise DbufError(
            explain(
                "dbuf.optim.chain",
                "not every argument is a transformation.",
                got=", ".join(type(part).__name__ for part in wrong),
                need="transformations, each an argument of its own",
                fix="chain(clip_by_global_norm(1.0), adamw(1e-3))",
            )
        )

    def init(params: PyTree) -> PyTree:
        return tuple(part.init(params) for part in transformations)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        states = []
        for part, old in zip(transformations, state, strict=True):
            grads, new = part.update(grads, old, params)
            states.append(new)
        return grads, tuple(states)

    return GradientTransformation(init, update)


def apply_updates(params: PyTree, updates: PyTree) -> PyTree:
    """Add updates to parameters, in the wider of the two dtypes; the sum gets the parameters' dtype.

    Args:
        params: Pytree of DBuffers.
        updates: The same tree, with equal placements and layouts.

    Returns:
        New parameters; nothing aliases the old ones.

    Raises:
        PlacementError: Placements or layouts differ.

    Communication:
        None.
    """
    require_same_specs("dbuf.optim.apply_updates", params, updates=updates)
    return each(lambda p, u: (p + u).to(p.dtype), params, updates)


def named(name: str, transformation: GradientTransformation) -> GradientTransformation:
    """The same transformation, which refuses gradients that do not fit under the name that the user wrote.

    Not while tracing: the pieces refuse them too, and to compare twice is time to compile.
    """

    def update(grads: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        if not torch.compiler.is_compiling():
            require_same_specs(f"dbuf.optim.{name}", params, grads=grads)
        return transformation.update(grads, state, params)

    return GradientTransformation(transformation.init, update)


def to_state_dtype(where: str) -> GradientTransformation:
    """Gradients in the dtype of optimizer state; those that do not fit are refused."""

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        require_same_specs(where, params, grads=grads)
        return each(lambda g: g.to(state_dtype(g.dtype)), grads), state

    return GradientTransformation(lambda params: (), update)


def each(fn: Callable[..., torch.Tensor], bufs: PyTree, *rest: PyTree) -> PyTree:
    """`fn` of the flat tensors of equal buffers; None in place of a buffer stays None."""
    return tree.map(lambda x, *others: None if x is None else fn(x, *others), bufs, *rest)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a parameter's optimizer state: float32, or wider if the parameter is.

    Example:
        >>> state_dtype(torch.bfloat16)
        torch.float32
    """
    return torch.promote_types(dtype, torch.float32)


def device_of(params: PyTree) -> torch.device:
    """The device for 0-d state: that of the first parameter, or the CPU if there is none."""
    bufs = buffers(params)
    return bufs[0].device if bufs else torch.device("cpu")


def require_same_specs(where: str, params: PyTree, **others: PyTree) -> None:
    """Refuse trees whose buffers are not placed and laid out as the parameters are.

    An element-wise update reads the same position of each flat tensor, so it is right only if all of them are
    cut alike; a gradient that is still Partial would step with this rank's share of it, in silence.

    Args:
        where: The function that was called, for the message.
        params: Pytree of DBuffers to compare with.
        **others: Trees of the same buffers, by the name that messages give them.

    Raises:
        TreeError: A tree does not have the structure of `params`; the order of dict keys counts, for an optimizer may
            pair buffers by position.
        PlacementError: Placements, layouts or meshes differ; every offending buffer is listed.
    """
    for other in others.values():
        if not _alike(other, params):
            raise _mismatch(where, params, others)


def _alike(a: Any, b: Any) -> bool:
    """Whether two trees have the same containers and specs; in a trace pytree's way takes four times as long."""
    if isinstance(a, DBuffer) or isinstance(b, DBuffer):
        return isinstance(a, DBuffer) and isinstance(b, DBuffer) and a.spec == b.spec
    if type(a) is not type(b):
        return False
    if type(a) is dict:
        return list(a) == list(b) and all(_alike(x, y) for x, y in zip(a.values(), b.values(), strict=True))
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(_alike(x, y) for x, y in zip(a, b, strict=True))
    (found, structure), (expected, other) = tree.flatten(a, is_leaf=is_buffer), tree.flatten(b, is_leaf=is_buffer)
    if structure != other or (len(found) == 1 and found[0] is a):  # containers that differ, or one leaf
        return structure == other
    return all(_alike(x, y) for x, y in zip(found, expected, strict=True))


def _mismatch(where: str, params: PyTree, others: dict[str, PyTree]) -> DbufError:
    """The error that lists every buffer of `others` that is not as in `params`."""
    expected, structure = tree.flatten_with_paths(params, is_leaf=is_buffer)
    kinds = [is_buffer(param) for _, param in expected]
    wrong: list[str] = []
    partial = False
    target: Any = ()
    for name, other in others.items():
        found, other_structure = tree.flatten_with_paths(other, is_leaf=is_buffer)
        if other_structure != structure or [is_buffer(buf) for _, buf in found] != kinds:
            return TreeError(
                explain(
                    where,
                    f"{name} and params are trees of different structure.",
                    got=f"{name}: {_paths(found)}\nparams: {_paths(expected)}",
                    need="gradients, optimizer state and parameters as trees of one structure, dict keys in one order",
                    fix="update(grads, state, params) with gradients of all of params, and the state of init(params)",
                )
            )
        for (path, buf), (_, param) in zip(found, expected, strict=True):
            if is_buffer(buf) and buf.spec != param.spec:
                target = param.spec.placements
                partial |= any(isinstance(placement, Partial) for placement in buf.spec.placements)
                wrong.append(f"{name}{path} has {_difference(buf.spec, param.spec)}")
    if partial:
        what = "a gradient is not reduced yet"
        fix = f"dbuf.redistribute(grads, {_text(target)})"
    else:
        what = "buffers are not cut alike"
        fix = "dbuf.redistribute them to the placements and layout of params"
    need = "gradients, optimizer state and parameters with equal placements and layouts"
    return PlacementError(explain(where, f"{what}.", got="\n".join(wrong), need=need, fix=fix))


def _paths(keyed: list[tuple[str, Any]]) -> str:
    """The places of buffers, and of what else there is."""
    names = [f"{path or 'all'}{'' if is_buffer(leaf) else f' ({type(leaf).__name__})'}" for path, leaf in keyed]
    return ", ".join(names) or "empty"


def _text(part: Any) -> str:
    """A part of a spec as one would write it: torch's own `Partial(sum)` cannot be pasted back."""
    return describe(part) if isinstance(part, tuple) else repr(part)


def _difference(got: BufferSpec, need: BufferSpec) -> str:
    """Name the first part in which two specs differ, with both sides of it."""
    for part in ("placements", "mesh", "layout"):
        a, b = getattr(got, part), getattr(need, part)
        if a != b:
            return f"{part} {_text(a)}, params {_text(b)}"
    return "another tree of tensors than params"
