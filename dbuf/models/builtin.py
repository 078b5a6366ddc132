"""The models that have a name here: shapes as published, one unit a block."""

from __future__ import annotations

import difflib
import json
from functools import cache
from importlib import resources
from typing import Any

import torch

from dbuf.errors import TreeError, explain
from dbuf.models.units import Model, Named, Unit, group

__all__ = ["builtin", "builtin_names"]


def builtin_names() -> tuple[str, ...]:
    """The names that `builtin` knows.

    Example:
        >>> builtin_names()[0]
        'llama3-8b'
    """
    return tuple(_table())


def builtin(name: str, group_by: str = "block") -> Model:
    """A model by its name; its tensors are bfloat16.

    Args:
        name: One of `builtin_names()`.
        group_by: See `group`; the paths are `block.0.q` and so on.

    Raises:
        TreeError: There is no such name; the message lists all.

    Example:
        >>> model = builtin("llama3-8b")
        >>> model.numel, [(unit.name, unit.count) for unit in model.units]
        (8030261248, [('block', 32), ('embed', 1), ('head', 1)])
    """
    if name not in _table():
        close = difflib.get_close_matches(name, _table(), 1, cutoff=0.3)
        raise TreeError(
            explain(
                "dbuf.models",
                "no such model.",
                got=repr(name),
                need=", ".join(_table()) + "; or a config.json, a .safetensors file or a folder with one, "
                "module:function",
                fix=f"--model {close[0] if close else next(iter(_table()))}",
            )
        )
    units = [
        Unit(
            unit["name"],
            unit["count"],
            tuple(tensor for tensor, _ in unit["tensors"]),
            tuple(tuple(shape) for _, shape in unit["tensors"]),
            torch.bfloat16,
        )
        for unit in _table()[name]["units"]
    ]
    return Model(name, tuple(units)) if group_by == "block" else group(name, _flat(units), group_by)


def _flat(units: list[Unit]) -> list[Named]:
    """Each tensor by a path of its own."""
    return [
        (f"{unit.name}.{i}.{tensor}" if unit.count > 1 else f"{unit.name}.{tensor}", shape, unit.dtype)
        for unit in units
        for i in range(unit.count)
        for tensor, shape in zip(unit.names, unit.shapes, strict=True)
    ]


@cache
def _table() -> dict[str, Any]:
    text = resources.files("dbuf.models").joinpath("builtin.json").read_text()
    return json.loads(text)  # type: ignore[no-any-return]
