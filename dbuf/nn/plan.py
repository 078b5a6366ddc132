"""Where each parameter of a model belongs: the buffer that holds it, and every place of the model that reads it.

Names and shapes only: no tensor is kept.

    occurrence   a parameter at one path; a tied one has several
    owner        the group whose buffer holds it: the root if it occurs there, otherwise the first that it occurs in
    entry        one buffer: a group's parameters, or its frozen ones
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NoReturn, cast

import torch
from torch import nn

from dbuf.errors import TreeError, explain
from dbuf.nn.groups import group_of

__all__ = ["Entry", "Plan", "Slot", "State", "plan_module"]

_WHERE = "dbuf.nn.functionalize"


@dataclasses.dataclass(frozen=True)
class Slot:
    """One place that reads a parameter: `module._parameters[name]`, from tensor `key` of the buffer `entry`."""

    path: str
    owner: nn.Module
    name: str
    entry: str
    key: str


@dataclasses.dataclass(frozen=True)
class Entry:
    """One buffer: for each of its tensors the key in it, the shape, and the paths in the model, first one first."""

    name: str
    group: str
    frozen: bool
    shapes: dict[str, tuple[int, ...]]
    paths: dict[str, tuple[str, ...]]
    dtype: torch.dtype

    def tree_paths(self) -> tuple[str, ...]:
        """The key paths that a DBuffer of this entry has."""
        return tuple(f"[{key!r}]" for key in self.shapes)


@dataclasses.dataclass(frozen=True)
class State:
    """One of the module's own buffers, such as running statistics: its paths and places, and whether it is saved."""

    paths: tuple[str, ...]
    places: tuple[tuple[nn.Module, str], ...]
    persistent: bool

    def constant(self) -> torch.Tensor:
        """Its value in the copy of the code: what it was in the original, or on meta."""
        part, name = self.places[0]
        return cast(torch.Tensor, part._buffers[name])


@dataclasses.dataclass(frozen=True)
class Plan:
    """The whole of it.

    Attributes:
        entries: By name, trained groups in the order of modules, each followed by its frozen part.
        slots: For each module that is a group, what to fill in as it runs.
        within: For each of them, the entries that it and the groups inside it read.
        members: For each group, the paths of its modules, children before parents, as `nn.Module.apply` goes.
        states: By path.
    """

    entries: dict[str, Entry]
    slots: dict[nn.Module, tuple[Slot, ...]]
    within: dict[nn.Module, tuple[str, ...]]
    members: dict[str, tuple[str, ...]]
    states: dict[str, State]


@dataclasses.dataclass(frozen=True)
class _Occurrence:
    path: str
    owner: nn.Module
    name: str
    site: nn.Module


def plan_module(module: nn.Module, chosen: Mapping[nn.Module, str]) -> Plan:
    """Give every parameter an owner, and every group the list of what it reads.

    Raises:
        TreeError: A group of several dtypes.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    seen: dict[nn.Parameter, list[_Occurrence]] = {}
    for path, part in modules.items():
        site = group_of(path, modules, chosen)
        for name, parameter in part._parameters.items():
            if parameter is not None:
                full = f"{path}.{name}" if path else name
                seen.setdefault(parameter, []).append(_Occurrence(full, part, name, site))

    site_paths = _site_paths(modules, chosen)
    held: dict[tuple[str, bool], list[tuple[str, nn.Parameter]]] = {
        (group, frozen): [] for group in chosen.values() for frozen in (False, True)
    }
    slots: dict[nn.Module, list[Slot]] = {site: [] for site in chosen}
    for parameter, occurrences in seen.items():
        home = next((o for o in occurrences if chosen[o.site] == chosen[module]), occurrences[0])
        group, frozen = chosen[home.site], not parameter.requires_grad
        prefix = site_paths[group]
        key = home.path.removeprefix(f"{prefix}.") if prefix else home.path
        held[group, frozen].append((key, parameter))
        for o in occurrences:
            slots[o.site].append(Slot(o.path, o.owner, o.name, entry_name(group, frozen), key))
    paths = {p: tuple(o.path for o in occurrences) for p, occurrences in seen.items()}
    entries = {
        entry_name(*which): _entry(*which, parameters, paths) for which, parameters in held.items() if parameters
    }
    # A module shared by two others is one place, met under two paths.
    unique = {site: tuple({(s.owner, s.name): s for s in reversed(found)}.values()) for site, found in slots.items()}
    return Plan(entries, unique, _within(unique), _members(module, modules, chosen), _states(modules))


def entry_name(group: str, frozen: bool) -> str:
    """The name of a group's buffer, in the dict of them all."""
    return f"{group} (frozen)" if frozen else group


def _site_paths(modules: Mapping[str, nn.Module], chosen: Mapping[nn.Module, str]) -> dict[str, str]:
    """For each group, what its keys leave out: the path of its module, or nothing if it has several."""
    paths: dict[str, list[str]] = {}
    first = {part: path for path, part in reversed(list(modules.items()))}
    for site, group in chosen.items():
        paths.setdefault(group, []).append(first[site])
    return {group: found[0] if len(found) == 1 else "" for group, found in paths.items()}


def _entry(
    group: str,
    frozen: bool,
    parameters: list[tuple[str, nn.Parameter]],
    paths: Mapping[nn.Parameter, tuple[str, ...]],
) -> Entry:
    dtypes: dict[torch.dtype, list[str]] = {}
    for _, parameter in parameters:
        dtypes.setdefault(parameter.dtype, []).append(paths[parameter][0])
    if len(dtypes) > 1:
        _refuse_mixed(group, dtypes)
    return Entry(
        entry_name(group, frozen),
        group,
        frozen,
        {key: tuple(parameter.shape) for key, parameter in parameters},
        {key: paths[parameter] for key, parameter in parameters},
        next(iter(dtypes)),
    )


def _within(slots: Mapping[nn.Module, tuple[Slot, ...]]) -> dict[nn.Module, tuple[str, ...]]:
    """Entries read below each site; a site's own come first."""
    reads: dict[nn.Module, dict[str, None]] = {}
    for site, own in slots.items():
        inside = [slot for part in site.modules() if part in slots for slot in slots[part]]
        reads[site] = dict.fromkeys(slot.entry for slot in (*own, *inside))
    return {site: tuple(entries) for site, entries in reads.items()}


def _members(
    module: nn.Module, modules: Mapping[str, nn.Module], chosen: Mapping[nn.Module, str]
) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {group: [] for group in chosen.values()}
    done: set[nn.Module] = set()

    def visit(part: nn.Module, path: str) -> None:
        if part not in done:
            done.add(part)
            for name, child in part.named_children():
                visit(child, f"{path}.{name}" if path else name)
            found[chosen[group_of(path, modules, chosen)]].append(path)

    visit(module, "")
    return {group: tuple(paths) for group, paths in found.items()}


def _states(modules: Mapping[str, nn.Module]) -> dict[str, State]:
    places: dict[torch.Tensor, list[tuple[str, nn.Module, str]]] = {}
    for path, part in modules.items():
        for name, tensor in part._buffers.items():
            if tensor is not None:
                places.setdefault(tensor, []).append((f"{path}.{name}" if path else name, part, name))
    return {
        found[0][0]: State(
            tuple(path for path, _, _ in found),
            tuple(dict.fromkeys((part, name) for _, part, name in found)),
            any(name not in part._non_persistent_buffers_set for _, part, name in found),
        )
        for found in places.values()
    }


def _refuse_mixed(group: str, dtypes: Mapping[torch.dtype, list[str]]) -> NoReturn:
    few = min(dtypes.values(), key=len)
    raise TreeError(
        explain(
            f"{_WHERE}: group {group!r}",
            "a group holds several dtypes; nothing is promoted.",
            got="\n".join(
                f"{dtype}: {', '.join(paths[:4])}{', ...' if len(paths) > 4 else ''}" for dtype, paths in dtypes.items()
            ),
            need="one dtype a group",
            fix=f"groups=[..., {few[0].rpartition('.')[0]!r}]: the modules of the rarer dtype as groups of their own; "
            "or module.to(dtype)",
        )
    )
