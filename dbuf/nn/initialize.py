"""Parameters of a module that was built on the meta device: made group by group, never all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from dbuf.errors import TreeError, explain
from dbuf.nn.plan import Plan

__all__ = ["Initializer", "made_by_group"]

Initializer = Callable[[nn.Module], object]
"""Sets the parameters and buffers that one module holds itself, in place."""

_STATE = ""
Address = tuple[str, str]
"""The entry and key of a parameter, or `_STATE` and the path of a buffer."""

Places = dict[Address, list[tuple[dict[str, Any], str]]]
Made = tuple[dict[str, dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def made_by_group(
    module: nn.Module, plan: Plan, init_module: Initializer | None, device: torch.device
) -> Iterator[Made]:
    """For each group `({entry: {key: tensor}}, {path of a buffer: tensor})`, of which the caller drops each in turn.

    Args:
        module: The copy of the code; left as it was after each group.
        plan: Of that copy.
        init_module: Called on every module of a group, children first; by default the nearest `_init_weights` of
            a module above or `reset_parameters` of its own.
        device: Where the tensors are made.

    Raises:
        TreeError: A parameter or buffer that nothing has set.
    """
    modules = dict(module.named_modules())
    for group, members in plan.members.items():
        places = _places(modules, plan, group, members)
        before = {address: holders[0][0][holders[0][1]] for address, holders in places.items()}
        try:
            _put(places, {address: _blank(old, device) for address, old in before.items()})
            with torch.no_grad():
                for path in members:
                    (init_module or _default(modules, path))(modules[path])
            # Read back: an initializer may have put a new tensor there.
            made = {address: holders[0][0][holders[0][1]].detach() for address, holders in places.items()}
        finally:
            _put(places, before)
        _check_set(plan, group, made)
        entries: dict[str, dict[str, torch.Tensor]] = {}
        for (entry, key), tensor in made.items():
            entries.setdefault(entry, {})[key] = tensor
        states = entries.pop(_STATE, {})
        del made
        yield entries, states


def _places(modules: dict[str, nn.Module], plan: Plan, group: str, members: tuple[str, ...]) -> Places:
    """Where a group's parameters and buffers are read: the dicts that hold them, and their names there."""
    places: Places = {}
    for name, entry in plan.entries.items():
        if entry.group == group:
            places |= {(name, key): [] for key in entry.shapes}
    for slots in plan.slots.values():
        for slot in slots:
            if (slot.entry, slot.key) in places:
                places[slot.entry, slot.key].append((slot.owner._parameters, slot.name))
    own = {modules[path] for path in members}
    for path, state in plan.states.items():
        if state.places[0][0] in own:
            places[_STATE, path] = [(part._buffers, name) for part, name in state.places]
    return places


def _put(places: Places, tensors: dict[Address, torch.Tensor]) -> None:
    for address, holders in places.items():
        for holder, name in holders:
            holder[name] = tensors[address]


def _blank(old: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor that shows what an initializer has left out; a buffer that has values already keeps them."""
    if not old.is_meta:
        return old.to(device, copy=True)
    floating = old.dtype.is_floating_point or old.dtype.is_complex
    value = float("nan") if floating else False if old.dtype == torch.bool else torch.iinfo(old.dtype).max
    blank = torch.full(old.shape, value, dtype=old.dtype, device=device)
    return nn.Parameter(blank, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else blank


def _check_set(plan: Plan, group: str, made: dict[Address, torch.Tensor]) -> None:
    unset = [
        key if entry == _STATE else plan.entries[entry].paths[key][0]
        for (entry, key), tensor in made.items()
        if _is_blank(tensor)
    ]
    if unset:
        _refuse_unset(group, unset)


def _is_blank(tensor: torch.Tensor) -> bool:
    if tensor.dtype == torch.bool or not tensor.numel():
        return False
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return bool(tensor.isnan().any())
    return bool((tensor == torch.iinfo(tensor.dtype).max).all())


def _default(modules: dict[str, nn.Module], path: str) -> Initializer:
    above = path
    while True:
        init_weights = getattr(modules[above], "_init_weights", None)
        if callable(init_weights):
            return init_weights  # type: ignore[no-any-return]
        if not above:
            return _reset
        above = above.rpartition(".")[0]


def _reset(module: nn.Module) -> None:
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(reset := getattr(module, name, None)):
            reset()
            return


def _refuse_unset(group: str, unset: list[str]) -> NoReturn:
    raise TreeError(
        explain(
            f"dbuf.nn: init, group {group!r}",
            "nothing has set these.",
            got="\n".join(unset),
            need="an `_init_weights(module)` of the model, or a `reset_parameters()` of each module, that sets all of "
            "what the module holds",
            fix="init(mesh, placements, init_module=fn), or build the model on a real device and shard(model, ...)",
        )
    )
