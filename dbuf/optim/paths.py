"""Rules that look at a tensor's path and global shape, and what they decide for the tensors of each buffer.

The path of a tensor is the path of its buffer in the tree of parameters followed by its own in the buffer, such as
`['block0']['attn.weight']`. Rules run in Python while a step is traced: what they decide is part of the program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from dbuf import tree
from dbuf.buffer import DBuffer, is_buffer, merge, select
from dbuf.errors import TreeError, explain
from dbuf.optim.base import GradientTransformation

__all__ = ["Rule", "decide", "is_matrix", "on_matrices", "put", "require_matrices", "take"]

_T = TypeVar("_T")

Rule: TypeAlias = Callable[[str, tuple[int, ...]], bool]
"""`rule(path, shape)`: whether it holds for a tensor."""


def is_matrix(path: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor has two dimensions or more: weights do, biases and the gains of norms do not.

    Example:
        >>> is_matrix("['up']", (4, 2)), is_matrix("['bias']", (4,))
        (True, False)
    """
    return len(shape) >= 2


def decide(rule: Callable[[str, tuple[int, ...]], _T], params: Any) -> list[tuple[DBuffer, list[_T]]]:
    """Each buffer of a tree, and what the rule says of each of its tensors."""
    named = tree.flatten_with_paths(params, is_leaf=is_buffer)[0]
    out = []
    for place, buf in named:
        if is_buffer(buf):
            tensors = zip(buf.spec.tree_paths(), buf.spec.global_shapes(), strict=True)
            out.append((buf, [rule(place + path, shape) for path, shape in tensors]))
    return out


def take(buf: DBuffer, keep: list[bool]) -> DBuffer | None:
    """The tensors of a buffer that are kept: the buffer itself if all are, None if none is."""
    if all(keep):
        return buf
    paths = [path for path, kept in zip(buf.spec.tree_paths(), keep, strict=True) if kept]
    return select(buf, paths) if paths else None


def put(buf: DBuffer, part: DBuffer | None) -> DBuffer:
    """A buffer with what `take` took from it put back, in the dtype of the buffer."""
    if part is None:
        return buf
    part = part if part.dtype == buf.dtype else DBuffer(part.local.to(buf.dtype), part.spec)
    return part if part.spec == buf.spec else merge(buf, part)


def on_matrices(where: str, transformation: GradientTransformation) -> GradientTransformation:
    """The same transformation, whose `init` refuses tensors that are no matrices."""

    def init(params: Any) -> Any:
        require_matrices(where, params)
        return transformation.init(params)

    return GradientTransformation(init, transformation.update)


def require_matrices(where: str, params: Any) -> None:
    """Refuse tensors of fewer than two dimensions.

    Raises:
        TreeError: Names every one.
    """
    named = [found for _, of_buffer in decide(lambda path, shape: (path, shape), params) for found in of_buffer]
    bad = [f"{path}: {shape}" for path, shape in named if not is_matrix(path, shape)]
    if bad:
        raise TreeError(
            explain(
                where,
                "not every tensor is a matrix.",
                got="\n".join(bad),
                need="tensors of two dimensions, or stacks of matrices",
                fix="dbuf.optim.partition({'matrices': muon(...), 'rest': adamw(...)}, rule)",
            )
        )
