"""What `by_owner` refuses, on every rank: an owner that failed alone would leave the others waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from dbuf import tree
from dbuf.buffer import DBuffer, is_buffer
from dbuf.compat import FakeTensorMode
from dbuf.errors import PlacementError, TreeError, explain
from dbuf.layout import Shape
from dbuf.spec import BufferSpec

__all__ = ["Template", "require_equal_structures", "require_state", "require_update", "template_of"]

_WHERE = "dbuf.optim.by_owner"


class Template(NamedTuple):
    """The state of one tensor without its numbers.

    Attributes:
        shapes: Of its leaves.
        dtypes: Likewise.
        structure: Its containers.
    """

    shapes: tuple[Shape, ...]
    dtypes: tuple[torch.dtype, ...]
    structure: Any


def template_of(state: Any) -> Template:
    """The template of a state of tensors."""
    leaves, structure = tree.flatten(state)
    return Template(tuple(tuple(x.shape) for x in leaves), tuple(x.dtype for x in leaves), structure)


def require_equal_structures(templates: list[Template], paths: tuple[str, ...]) -> None:
    """Refuse states that differ in more than shapes.

    Raises:
        TreeError: Names every tensor.
    """
    forms = [template[1:] for template in templates]
    if any(form != forms[0] for form in forms):
        raise TreeError(
            explain(
                _WHERE,
                "init gives states of different structures.",
                got="\n".join(f"{path}: {form}" for path, form in zip(paths, forms, strict=True)),
                need="one structure and dtypes for all tensors; shapes may differ",
                fix="a by_owner for each kind of tensor, put together with dbuf.optim.partition",
            )
        )


def require_update(
    update: Callable[..., Any], shape: Shape, dtype: torch.dtype, device: torch.device, state: Template
) -> None:
    """Run `update` on tensors without memory, and refuse what does not fit what it was given.

    Raises:
        TreeError: The update has another shape, or the state another structure, shape or dtype. What `update` itself
            raises comes out as it is.
    """

    def run(device: torch.device | str) -> Any:
        leaves = [torch.zeros(1, *s, dtype=d, device=device) for s, d in zip(state.shapes, state.dtypes, strict=True)]
        grad = torch.zeros(1, *shape, dtype=dtype, device=device)
        return torch.func.vmap(update)(grad, tree.unflatten(leaves, state.structure))

    try:
        out = run("meta")
    except Exception:  # a tenth of the time, but not beside tensors that the function brings along
        with FakeTensorMode(allow_non_fake_inputs=True):
            out = run(device)
    if not isinstance(out, tuple) or len(out) != 2 or not isinstance(out[0], torch.Tensor):
        _refuse_update(shape, f"a {type(out).__name__}", "a pair of a tensor and a state")
    result, new = out[0][0], template_of(tree.map(lambda x: x[0], out[1]))
    if result.shape != shape:
        _refuse_update(shape, f"an update of shape {tuple(result.shape)}", f"an update of shape {shape}")
    if new != state:
        _refuse_update(shape, f"a state of {_text(new)}", f"a state of {_text(state)}, as init gives it")


def require_state(entry: Any, target: BufferSpec | None, of_state: Callable[..., BufferSpec]) -> None:
    """Refuse the entry of a buffer that is not with the owners of its tensors; `target` is None if it has none.

    Raises:
        PlacementError: The state is that of other parameters, or of another rule.
    """
    bufs = [leaf for leaf in tree.leaves(entry, is_leaf=is_buffer) if leaf is not None]
    if target is None:
        good = not bufs
    else:
        good = entry is not None and all(
            isinstance(buf, DBuffer) and of_state(target, buf.spec.global_shapes()) == buf.spec for buf in bufs
        )
    if not good:
        raise PlacementError(
            explain(
                _WHERE,
                "the state is not with the owners of these tensors.",
                got=", ".join(repr(getattr(buf, "spec", buf)) for buf in bufs) or "none",
                need=repr(target) if target is not None else "none, for no tensor of the buffer is selected",
                fix="the state that init gives for parameters placed and laid out like these, and one rule for both",
            )
        )


def _refuse_update(shape: Shape, got: str, need: str) -> None:
    raise TreeError(
        explain(
            _WHERE,
            f"update does not fit a tensor of shape {shape}.",
            got=got,
            need=need,
            fix="an update(grad, state) that returns (update, state) as it was given them, dict keys in their order",
        )
    )


def _text(state: Template) -> str:
    kinds = ", ".join(f"{dtype} {shape}" for shape, dtype in zip(state.shapes, state.dtypes, strict=True))
    return f"({kinds}) in {state.structure}"
