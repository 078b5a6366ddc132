"""A module's code without its numbers: a copy whose parameters are placeholders, filled in as each group runs.

Every module that is a group gets a subclass of its own class whose `forward` gathers the group, puts its tensors in
place of the placeholders, runs the original forward, and takes them out again. The model's code is not changed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from dbuf import tree as trees
from dbuf.buffer import DBuffer
from dbuf.compat import call_with_side_effects
from dbuf.errors import TreeError, explain
from dbuf.nn.plan import Plan, Slot
from dbuf.rematerialize import gathered, remat

__all__ = ["Running", "Tensors", "copy_code", "filled", "install", "version_of"]

Tensors = Mapping[str, Mapping[str, torch.Tensor]]


class Running:
    """What the groups of one model find while it runs: the buffers, and what groups around them have gathered."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # the placeholders are one place: one thread at a time
        self.bufs: Mapping[str, DBuffer] = {}
        self.open: Tensors = {}


class Placeholder(torch.Tensor):
    """A parameter of the code: a shape and a dtype on the meta device, which no real tensor may meet.

    torch's own meta tensors would not do: a matrix product of one with a CPU tensor gives whatever lies in memory,
    without an error (2.13).
    """

    _is_param = True  # for isinstance(_, nn.Parameter)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Metadata and operations among placeholders alone."""
        leaves = trees.leaves((args, kwargs or {}))
        if all(leaf.is_meta for leaf in leaves if isinstance(leaf, torch.Tensor) and not isinstance(leaf, cls)):
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        met = [getattr(leaf, "path", "a view of a parameter") for leaf in leaves if isinstance(leaf, cls)]
        raise TreeError(
            explain(
                "dbuf.nn: apply",
                "a parameter is read while its group is not gathered.",
                got=f"{', '.join(met)} in {getattr(func, '__name__', func)}",
                need="each parameter read only while the module whose group holds it runs its forward",
                fix="leave that module out of groups, or group the module that reads it",
            )
        )


def copy_code(module: nn.Module) -> nn.Module:
    """A copy of a module with placeholders as parameters, tied where they were; its buffers are copied.

    Nothing is allocated for parameters, and the original shares nothing with the copy.

    Raises:
        TreeError: `copy.deepcopy` does not take the module.
    """
    memo: dict[int, Any] = {}
    for path, parameter in module.named_parameters():
        blank = torch.empty_like(parameter.detach(), device="meta").as_subclass(Placeholder)
        blank.path = path  # type: ignore[attr-defined]
        memo[id(parameter)] = blank.requires_grad_(parameter.requires_grad)
    try:
        return copy.deepcopy(module, memo)
    except (RuntimeError, TypeError) as error:
        raise TreeError(
            explain(
                "dbuf.nn.functionalize",
                "the module's code cannot be copied.",
                got=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
                need="a module that copy.deepcopy takes: parameters and constants, no computed tensors, no locks",
                fix="torch.nn.utils.parametrizations in place of the old weight_norm; or make such things in forward",
            )
        ) from error


def install(plan: Plan, rematerialized: Iterable[nn.Module], running: Running) -> None:
    """Make each group of a copied module gather itself."""
    again = set(rematerialized)
    for module, slots in plan.slots.items():
        # Not through setattr: a site is no child of the module.
        module.__dict__["_dbuf_site"] = _Site(slots, plan.within[module], module in again, running)
        module.__class__ = _gathering(type(module))  # type: ignore[arg-type]  # a class is hashable


@functools.cache
def _gathering(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass that differs in its forward alone; it keeps the name, which some models look at."""

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._dbuf_site.run(functools.partial(cls.forward, self), args, kwargs)

    def fill(namespace: dict[str, Any]) -> None:
        namespace |= {"forward": forward, "__module__": cls.__module__, "__qualname__": cls.__qualname__}

    return types.new_class(cls.__name__, (cls,), exec_body=fill)


class _Site:
    """A module that gathers as it runs: what it reads, and how."""

    def __init__(self, slots: tuple[Slot, ...], within: tuple[str, ...], again: bool, running: Running) -> None:
        self._slots = slots
        self._reads = tuple(dict.fromkeys(slot.entry for slot in slots))
        self._within = within
        self._again = again
        self._running = running

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gather what no group around this one has gathered, and run the module's own forward on it."""
        running = self._running
        around = running.open
        if not torch.compiler.is_compiling() and any(name not in running.bufs for name in self._within):
            _refuse_outside(self._within)
        inside = {name: running.bufs[name] for name in self._within}
        own = {name: inside[name] for name in self._reads if name not in around}

        def call(tensors: Any, inside: Any, args: Any, kwargs: Any) -> Any:
            # Set again, and not only around the whole model: `remat` runs this in the backward.
            before = running.bufs, running.open
            running.bufs, running.open = inside, {**around, **tensors}
            try:
                with filled(self._slots, running.open):
                    return forward(*args, **kwargs)
            finally:
                running.bufs, running.open = before

        def call_again(tensors: Any, inside: Any, args: Any, kwargs: Any) -> Any:
            return call_with_side_effects(call, tensors, inside, args, kwargs)

        use = remat(gathered(call_again)) if self._again else gathered(call)
        return use(own, inside, args, kwargs)


def _refuse_outside(names: tuple[str, ...]) -> NoReturn:
    raise TreeError(
        explain(
            "dbuf.nn",
            "a group runs outside of apply, where it has no numbers.",
            got=", ".join(map(repr, names)),
            need="model.apply(params, ...); a module that recomputes itself does so in the backward, after it",
            fix="functionalize(module, groups, remat=True), with the model's own checkpointing switched off",
        )
    )


@contextlib.contextmanager
def filled(slots: Sequence[Slot], tensors: Tensors) -> Iterator[None]:
    """While it is open, the parameters at `slots` are these tensors; the code that runs may not write them.

    Raises:
        TreeError: It did. Not while tracing: `jit` has tried the function out by then.
    """
    places = [(slot.owner._parameters, slot.name, tensors[slot.entry][slot.key]) for slot in slots]
    before = [parameters[name] for parameters, name, _ in places]
    tracing = torch.compiler.is_compiling()
    versions = [] if tracing else [version_of(tensor) for _, _, tensor in places]
    for parameters, name, tensor in places:
        parameters[name] = tensor  # type: ignore[assignment]
    try:
        yield
        if not tracing:
            _check_unchanged(slots, places, versions)
    finally:
        for (parameters, name, _), placeholder in zip(places, before, strict=True):
            parameters[name] = placeholder


def version_of(tensor: torch.Tensor) -> int:
    """A number that every write into a tensor, or into a view of it, changes; inference tensors have none."""
    return 0 if tensor.is_inference() else int(tensor._version)


def _check_unchanged(slots: Sequence[Slot], places: list[Any], versions: list[int]) -> None:
    replaced = [
        slot.path
        for slot, (parameters, name, tensor) in zip(slots, places, strict=True)
        if parameters.get(name) is not tensor
    ]
    written = dict.fromkeys(
        slot.entry
        for slot, (_, _, tensor), version in zip(slots, places, versions, strict=True)
        if version_of(tensor) != version
    )
    if not replaced and not written:
        return
    got = [f"{path}: replaced" for path in replaced] + [f"group {name!r}: written in place" for name in written]
    raise TreeError(
        explain(
            "dbuf.nn: apply",
            "the forward changes parameters.",
            got="\n".join(got),
            need="a forward that only reads its parameters: what it writes here is lost after the call",
            fix="keep what changes in a buffer of the module (register_buffer), and use apply_and_update",
        )
    )
