"""`partition`: one optimizer for some tensors, another for the rest, also inside one buffer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dbuf import tree
from dbuf.buffer import DBuffer, is_buffer
from dbuf.errors import DbufError, explain
from dbuf.optim.arguments import require_callable
from dbuf.optim.base import GradientTransformation, PyTree, each, require_same_specs, state_dtype
from dbuf.optim.paths import decide, put, take

__all__ = ["partition"]

_WHERE = "dbuf.optim.partition"


def partition(
    optimizers: Mapping[str, GradientTransformation], rule: Callable[[str, tuple[int, ...]], str]
) -> GradientTransformation:
    """Give each tensor to the optimizer that a rule names.

    Args:
        optimizers: By name.
        rule: `rule(path, shape)` is the name of the optimizer of a tensor. The path is that of its buffer in the tree
            of parameters and then its own, such as `['block0']['attn.weight']`.

    Returns:
        The transformation. Its state is a dict from names to the states of the optimizers, each for the parameters that
        it has: the same tree, with selections of the buffers (`dbuf.select`), and None in place of a buffer of which it
        has nothing.

    Raises:
        DbufError: The rule names an optimizer that there is not.
        PlacementError: In `update`, gradients are not placed and laid out like the parameters.

    Communication:
        That of the optimizers: taking a selection out and putting it back moves nothing between ranks.

    Example:
        >>> from dbuf.optim import adamw, is_matrix, muon
        >>> both = partition({"muon": muon(0.02), "adamw": adamw(1e-3)}, lambda path, shape:
        ...     "muon" if is_matrix(path, shape) and "embed" not in path else "adamw")
        >>> list(both.init({}))
        ['muon', 'adamw']
    """
    require_callable(_WHERE, "rule", rule, "lambda path, shape: 'muon' if len(shape) == 2 else 'adamw'")

    def split(bufs: PyTree, params: PyTree) -> dict[str, PyTree]:
        labels = [found for _, found in decide(rule, params)]
        if unknown := {label for found in labels for label in found} - set(optimizers):
            _refuse_labels(unknown, optimizers)
        return {name: _take(bufs, [[label == name for label in found] for found in labels]) for name in optimizers}

    def init(params: PyTree) -> dict[str, PyTree]:
        parts = split(params, params)
        return {name: optimizer.init(parts[name]) for name, optimizer in optimizers.items()}

    def update(grads: PyTree, state: dict[str, PyTree], params: PyTree) -> tuple[PyTree, dict[str, PyTree]]:
        require_same_specs(_WHERE, params, grads=grads)
        grad_parts, param_parts = split(grads, params), split(params, params)
        updates = each(lambda g: g.to(state_dtype(g.dtype)), grads)
        new: dict[str, PyTree] = {}
        for name, optimizer in optimizers.items():
            part, new[name] = optimizer.update(grad_parts[name], state[name], param_parts[name])
            updates = _put(updates, part)
        return updates, new

    return GradientTransformation(init, update)


def _take(bufs: PyTree, keeps: list[list[bool]]) -> PyTree:
    """The tree with selections of its buffers, None where nothing is kept."""
    rest = iter(keeps)

    return tree.map(lambda buf: buf if buf is None else take(buf, next(rest)), bufs, is_leaf=is_buffer)


def _put(bufs: PyTree, parts: PyTree) -> PyTree:
    """The tree with selections put back."""
    found = iter(tree.leaves(parts, is_leaf=lambda node: node is None or is_buffer(node)))

    def put_next(buf: DBuffer | None) -> DBuffer | None:
        part = next(found)
        return None if buf is None else put(buf, part)

    return tree.map(put_next, bufs, is_leaf=is_buffer)


def _refuse_labels(unknown: set[str], optimizers: Mapping[str, GradientTransformation]) -> None:
    raise DbufError(
        explain(
            _WHERE,
            "the rule names an optimizer that there is not.",
            got=", ".join(sorted(map(repr, unknown))),
            need="one of " + ", ".join(map(repr, optimizers)),
            fix="a rule that returns a key of optimizers for every path and shape",
        )
    )
