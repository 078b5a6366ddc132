"""The errors that dbuf raises, and the one builder of their messages.

Every message has four parts: where it happened, what was got, what was needed, and what to try. `explain`
lays them out; nothing else in the library formats a message by hand.
"""

from __future__ import annotations

__all__ = ["DbufError", "LayoutError", "PlacementError", "TreeError", "explain", "require_positive"]


class DbufError(ValueError):
    """Base of every error that a user of dbuf can cause."""


class PlacementError(DbufError):
    """A placement, or a tuple of them, is not one that dbuf accepts there."""


class LayoutError(DbufError):
    """A layout cannot be planned, is inconsistent, or does not fit a placement or a mesh."""


class TreeError(DbufError):
    """A pytree has the wrong structure, or a leaf of it is not what was asked for."""


def explain(where: str, what: str, *, got: str, need: str, fix: str) -> str:
    """Lay out a four-part message; lines after the first of a part are indented to line up with it.

    Args:
        where: The function, and the tree path where there is one, such as `dbuf.view: params['w']`.
        what: What is wrong, in one sentence.
        got: The offending value or values, one a line.
        need: What would have been accepted.
        fix: A call or an edit that makes it work.

    Returns:
        The message, without a trailing newline.

    Example:
        >>> print(explain("dbuf.cast", "no such dtype.", got="'fp12'", need="a dtype", fix="torch.bfloat16"))
        dbuf.cast: no such dtype.
          got:  'fp12'
          need: a dtype
          try:  torch.bfloat16
    """
    parts = (("got:  ", got), ("need: ", need), ("try:  ", fix))
    lines = [_hang(f"{where}: ", what, indent=2)]
    lines += [_hang(f"  {label}", text, indent=2 + len(label)) for label, text in parts]
    return "\n".join(lines)


def require_positive(value: object, name: str, where: str, error: type[DbufError]) -> int:
    """Return `value` if it is an int of at least 1, and raise `error` otherwise.

    A bool is refused: `True` where a count belongs is a slip, and would pass for 1.

    Args:
        value: The value to check.
        name: The name of the argument, for the message.
        where: The function that was called, for the message.
        error: The class to raise.

    Returns:
        `value`, unchanged.

    Example:
        >>> require_positive(3, "block_size", "BlockAtomic", PlacementError)
        3
    """
    # `type(...) is int` and not isinstance: bool is a subclass of int.
    if type(value) is int and value >= 1:
        return value
    raise error(
        explain(
            where,
            f"{name} is not a positive int.",
            got=f"{name}={value!r} ({type(value).__name__})",
            need="an int of at least 1 (a bool is not one)",
            fix=f"{name}=1",
        )
    )


def _hang(label: str, text: str, *, indent: int) -> str:
    """Put `label` before `text` and indent every later line of it by `indent` spaces."""
    return label + text.replace("\n", "\n" + " " * indent)
