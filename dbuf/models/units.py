"""The tensors of a model as units: what is one buffer, and how many are alike."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import translate
from typing import NamedTuple, TypeAlias

import torch

from dbuf.errors import TreeError, explain
from dbuf.layout import Shape

__all__ = ["Model", "Named", "Unit", "group"]

Named: TypeAlias = tuple[str, Shape, torch.dtype]
"""A tensor: its path, its global shape, its dtype."""

_ROOT = "root"  # the name that dbuf.nn gives to what is left over
_NUMBER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


@dataclasses.dataclass(frozen=True)
class Unit:
    """Tensors that make up one buffer, and how many such units the model has.

    Attributes:
        name: The path of its module; `layers.*` or `layers.{0..2}` where several are alike.
        count: Units that are alike, so that one plan serves all.
        names: Paths of its tensors, below the unit's own.
        shapes: Their global shapes.
        dtype: Of all of them.
    """

    name: str
    count: int
    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Elements of one unit."""
        return sum(map(math.prod, self.shapes))


class Model(NamedTuple):
    """A model as units.

    Attributes:
        name: What it was read from.
        units: In the order of its tensors.
    """

    name: str
    units: tuple[Unit, ...]

    @property
    def numel(self) -> int:
        """Elements of all units."""
        return sum(unit.count * unit.numel for unit in self.units)


def group(name: str, tensors: Iterable[Named], group_by: str = "block") -> Model:
    """Cut a list of tensors into units, and count the ones that are alike.

    Tensors of different dtypes are never in one unit. Takes one pass over the tensors.

    Args:
        name: The model's name.
        tensors: Path, shape and dtype of each.
        group_by: `"block"`: a unit for each outermost module with a number for a name (`layers.0`), and one for each
            module outside of them that holds tensors; `"tensor"`: each alone; `"all"`: one; anything else: a pattern of
            module paths (`*` matches dots too), whose outermost matches are units, and `root` is what is left over.

    Raises:
        TreeError: There is no tensor, or the pattern matches no module.

    Example:
        >>> blocks = [(f"layers.{i}.w", (4, 4), torch.float32) for i in range(3)]
        >>> [(unit.name, unit.count) for unit in group("m", [*blocks, ("head.w", (9, 4), torch.float32)]).units]
        [('layers.*', 3), ('head', 1)]
    """
    listed = list(tensors)
    if not listed:
        raise TreeError(
            explain("dbuf.models", "there is no tensor.", got=name, need="one or more parameters", fix="another file")
        )
    prefix_of = _rule(group_by, listed)
    members: dict[tuple[str, torch.dtype], list[tuple[str, Shape]]] = {}
    for path, shape, dtype in listed:
        prefix = prefix_of(path)
        inner = path[len(prefix) + 1 :] if prefix and path.startswith(f"{prefix}.") else path
        members.setdefault((prefix, dtype), []).append((inner, shape))
    dtypes: dict[str, int] = {}
    for prefix, _ in members:
        dtypes[prefix] = dtypes.get(prefix, 0) + 1
    units = []
    for (prefix, dtype), inside in members.items():
        shown = prefix or _ROOT
        label = shown if dtypes[prefix] == 1 else f"{shown} ({str(dtype).removeprefix('torch.')})"
        units.append(Unit(label, 1, tuple(n for n, _ in inside), tuple(s for _, s in inside), dtype))
    return Model(name, _count_alike(units))


def _rule(group_by: str, tensors: list[Named]) -> Callable[[str], str]:
    """A function from a tensor's path to its unit's; empty for what is left over."""
    if group_by == "tensor":
        return lambda path: path
    if group_by == "all":
        return lambda path: ""
    if group_by == "block":
        return _block_of
    return _matching(group_by, tensors)


def _block_of(path: str) -> str:
    module = path.rpartition(".")[0]
    found = _NUMBER.search(module)
    return module[: found.end()] if found else module


def _matching(pattern: str, tensors: list[Named]) -> Callable[[str], str]:
    matches = re.compile(translate(pattern)).match
    known: dict[str, str] = {}

    def unit_of(module: str) -> str:
        """The outermost module at `module` or above it that the pattern matches."""
        if module not in known:
            above = unit_of(module.rpartition(".")[0]) if module else ""
            known[module] = above or (module if module and matches(module) else "")
        return known[module]

    modules = dict.fromkeys(path.rpartition(".")[0] for path, _, _ in tensors)
    if not any(unit_of(module) for module in modules):
        raise TreeError(
            explain(
                "dbuf.models",
                "the pattern of --group-by matches no module.",
                got=repr(pattern),
                need='"block", "tensor", "all", or a pattern of paths such as ' + ", ".join([*modules][:6]),
                fix=f"--group-by '{next((m for m in modules if m), 'block')}'",
            )
        )
    return lambda path: unit_of(path.rpartition(".")[0])


def _count_alike(units: Sequence[Unit]) -> tuple[Unit, ...]:
    """One unit for all that differ in a number of their path alone."""
    alike: dict[tuple[object, ...], list[Unit]] = {}
    for unit in units:
        found = _NUMBER.search(unit.name)
        stem = unit.name if found is None else f"{unit.name[: found.start(1)]}*{unit.name[found.end(1) :]}"
        alike.setdefault((stem, unit.names, unit.shapes, unit.dtype), []).append(unit)
    kinds: dict[object, int] = {}
    for key in alike:
        kinds[key[0]] = kinds.get(key[0], 0) + 1
    return tuple(
        same[0]
        if len(same) == 1
        else dataclasses.replace(same[0], count=len(same), name=_joined(str(key[0]), same, kinds[key[0]]))
        for key, same in alike.items()
    )


def _joined(stem: str, same: list[Unit], kinds: int) -> str:
    """`layers.*`; where other layers look different, which ones these are."""
    if kinds == 1:
        return stem
    numbers = [int(found[1]) for unit in same if (found := _NUMBER.search(unit.name))]
    dense = numbers == list(range(numbers[0], numbers[-1] + 1))
    which = f"{numbers[0]}..{numbers[-1]}" if dense else f"{numbers[0]}, ..., {numbers[-1]}"
    return stem.replace("*", f"{{{which}}}", 1)
