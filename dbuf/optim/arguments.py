"""Refusals of arguments: numbers out of their range, and objects where a function belongs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real

import torch

from dbuf.errors import DbufError, explain

__all__ = ["require_callable", "require_known", "require_numbers", "require_rate"]


def require_numbers(where: str, below: float = math.inf, **numbers: object) -> None:
    """Refuse what is no number in [0, below).

    Args:
        where: The function that was called, for the message.
        below: The bound.
        **numbers: By the name of the argument.

    Raises:
        DbufError: Names every one.
    """
    wrong = {
        name: value
        for name, value in numbers.items()
        if type(value) is bool or not isinstance(value, float | int) or not 0 <= value < below
    }
    if wrong:
        raise DbufError(
            explain(
                where,
                f"{' and '.join(wrong)} out of range.",
                got=_text(wrong),
                need=f"a number in [0, {'1' if below == 1 else 'infinity'})",
                fix=f"{next(iter(wrong))}={'0.9' if below == 1 else '1.0'}",
            )
        )


def require_rate(where: str, learning_rate: object) -> None:
    """Refuse what is neither a number, a 0-d tensor nor a schedule.

    Raises:
        DbufError: It is something else.
    """
    scalar = learning_rate.ndim == 0 if isinstance(learning_rate, torch.Tensor) else isinstance(learning_rate, Real)
    if callable(learning_rate) or (scalar and type(learning_rate) is not bool):
        return
    raise DbufError(
        explain(
            where,
            "the learning rate is no number.",
            got=_text({"learning_rate": learning_rate}),
            need="a number, a 0-d tensor, or a function of the number of updates done so far",
            fix="learning_rate=1e-3",
        )
    )


def require_callable(where: str, name: str, value: object, fix: str) -> None:
    """Refuse what is no function and not None.

    Raises:
        DbufError: It is something else, such as the trees of bools that optax takes for masks.
    """
    if value is not None and not callable(value):
        raise DbufError(
            explain(where, f"{name} is no function.", got=_text({name: value}), need="a function", fix=f"{name}={fix}")
        )


def require_known(where: str, name: str, value: str, known: Iterable[str]) -> None:
    """Refuse a name that is none of those known.

    Raises:
        DbufError: Says which are.
    """
    names = list(known)
    if value not in names:
        need = " or ".join(map(repr, names))
        raise DbufError(explain(where, f"no such {name}.", got=repr(value), need=need, fix=repr(names[0])))


def _text(values: dict[str, object]) -> str:
    return ", ".join(f"{name}={value!r} ({type(value).__name__})" for name, value in values.items())
