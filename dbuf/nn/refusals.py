"""What `Functional` refuses, and how it says so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from dbuf.buffer import is_buffer
from dbuf.errors import TreeError, explain
from dbuf.nn.code import version_of
from dbuf.nn.plan import Entry, Plan

__all__ = ["check_source", "check_statistics", "check_unwritten", "check_values", "refuse_names"]


def check_values(plan: Plan, values: Mapping[str, Any], *, all_states: bool = False) -> None:
    """Raise `TreeError` unless these are the buffers of this model, and plain tensors of its own buffers."""
    wrong = [f"{name!r}: missing" for name in plan.entries if name not in values]
    for path, state in plan.states.items():
        if path not in values and (all_states or state.constant().is_meta):
            wrong.append(f"{path!r}: missing" + (", and the module was built on meta" if not all_states else ""))
    wrong += [f"{name!r}: no such group" for name in values if name not in plan.entries and name not in plan.states]
    for name, value in values.items():
        difference = None
        if name in plan.entries:
            difference = _difference(plan.entries[name], value)
        elif name in plan.states and not isinstance(value, torch.Tensor):
            difference = f"{type(value).__name__}, not a tensor"
        if difference:
            wrong.append(f"{name!r}: {difference}")
    if not wrong:
        return
    in_rest = [*(name for name, entry in plan.entries.items() if entry.frozen), *plan.states]
    rest = any(f"{name!r}: missing" in line for line in wrong for name in in_rest)
    raise TreeError(
        explain(
            "dbuf.nn: apply",
            "these are not the numbers of this module.",
            got="\n".join(wrong),
            need="buffers " + ", ".join(map(repr, plan.entries)),
            fix="apply(params | rest, ...) with both of what shard or init gave"
            if rest
            else "what model.shard or model.init gave, or a map of it",
        )
    )


def _difference(entry: Entry, value: Any) -> str | None:
    if not is_buffer(value):
        return f"{type(value).__name__}, not a DBuffer"
    if value.spec.tree_paths() != entry.tree_paths():
        missing = [path for path in entry.tree_paths() if path not in value.spec.tree_paths()]
        return f"tensors {', '.join(value.spec.tree_paths())}" + (f"; without {', '.join(missing)}" if missing else "")
    shapes = tuple(tuple(shape) for shape in value.spec.global_shapes())
    bad = [
        f"{key!r} of shape {have}, not {need}"
        for (key, need), have in zip(entry.shapes.items(), shapes, strict=True)
        if have != need
    ]
    return "; ".join(bad) or None


def check_source(plan: Plan, found: Mapping[str, torch.Tensor]) -> None:
    """Raise `TreeError` unless a module or state dict has all parameters and saved buffers, in the right shapes."""
    wrong: list[str] = []
    known = {path for state in plan.states.values() for path in state.paths}
    for entry in plan.entries.values():
        for key, paths in entry.paths.items():
            known |= set(paths)
            here = [path for path in paths if path in found]
            if not here:
                wrong.append(f"{paths[0]}: missing")
            elif tuple(found[here[0]].shape) != entry.shapes[key]:
                wrong.append(f"{here[0]}: shape {tuple(found[here[0]].shape)}, not {entry.shapes[key]}")
            elif found[here[0]].is_meta:
                wrong.append(f"{here[0]}: on the meta device")
    for path, state in plan.states.items():
        value = found[path] if path in found else None if state.persistent else state.constant()
        if value is None or value.is_meta:
            wrong.append(f"{path}: {'missing' if value is None else 'on the meta device'}")
    wrong += [f"{path}: no such parameter or buffer" for path in found if path not in known]
    if wrong:
        raise TreeError(
            explain(
                "dbuf.nn: shard",
                "the source does not fit the module.",
                got="\n".join(wrong),
                need="every parameter and buffer, with values, in the shape of the module that was functionalized",
                fix="the module itself or its state_dict(); model.init(mesh, placements) to make new values",
            )
        )


# Their kernels write running statistics without a trace in the tensors' versions.
_STATISTICS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


def check_statistics(plan: Plan) -> None:
    """Raise `TreeError`, before anything is written, if a norm would update its running statistics."""
    parts = [(path, state.places[0][0]) for path, state in plan.states.items()]
    _refuse_written([path for path, part in parts if isinstance(part, _STATISTICS) and part.training])


def check_unwritten(
    states: Mapping[str, torch.Tensor], versions: Mapping[str, int], after: Mapping[str, torch.Tensor]
) -> None:
    """Raise `TreeError` if a forward has written the module's own buffers."""
    pairs = states.items()
    _refuse_written([path for path, t in pairs if after[path] is not t or version_of(t) != versions[path]])


def _refuse_written(paths: list[str]) -> None:
    if paths:
        raise TreeError(
            explain(
                "dbuf.nn: apply",
                "the forward writes buffers of the module, and what it writes would be lost.",
                got="\n".join(paths),
                need="a call that returns their new values, or a mode that leaves them alone",
                fix="out, rest = model.apply_and_update(params, rest, ...), or model.module.eval()",
            )
        )


def refuse_names(unknown: Iterable[str], known: Iterable[str], where: str) -> NoReturn:
    """Raise `TreeError` for names that no group has."""
    raise TreeError(
        explain(
            where,
            "no group has that name.",
            got=", ".join(map(repr, sorted(unknown))),
            need="names of groups: " + ", ".join(map(repr, dict.fromkeys(known))),
            fix="remat=True, for all groups but the root",
        )
    )
