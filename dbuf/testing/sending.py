"""What travels to the workers by name and what by value."""

from __future__ import annotations

import io
import os
import sys
from collections import ChainMap
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from dbuf.testing.protocol import load_cloudpickle


def import_path() -> tuple[str, ...]:
    """Return `sys.path` with the entry for the working directory spelt out."""
    return tuple(os.path.abspath(entry) for entry in sys.path)


class Sender:
    """Pickles functions for the workers: modules that they cannot import are sent by value."""

    def __init__(self) -> None:
        """Know of no module yet."""
        self._importable: set[str] = set()

    def dumps(self, value: object) -> bytes:
        """Pickle `value`, functions and classes of hidden modules included."""
        cloudpickle = load_cloudpickle()
        hidden = self._hidden_modules()
        already = cloudpickle.list_registry_pickle_by_value()
        added = [module for module in hidden if module.__name__ not in already]
        for module in added:
            cloudpickle.register_pickle_by_value(module)
        try:
            buffer = io.BytesIO()
            _pickler_class()(buffer).dump(value)
            return buffer.getvalue()
        finally:
            for module in added:
                cloudpickle.unregister_pickle_by_value(module)

    def _hidden_modules(self) -> list[ModuleType]:
        """Return the loaded modules that a fresh interpreter with our import path would not find."""
        hidden = []
        for name in [name for name in sys.modules if name not in self._importable]:
            module = sys.modules.get(name)
            if name == "__main__" or not isinstance(module, ModuleType):
                continue  # cloudpickle sends what belongs to __main__ by value anyway
            if is_importable(name, module):
                self._importable.add(name)
            elif module.__name__ == name:
                hidden.append(module)
        return hidden


def _pickler_class() -> Any:
    """cloudpickle's, which sends along a submodule for any attribute of its name, and takes `.ops` for `torch.ops`."""
    base: Any = load_cloudpickle().Pickler
    table = ChainMap({type(torch.ops): _by_name}, base.dispatch_table)
    return type("Pickler", (base,), {"dispatch_table": table})


def _by_name(module: ModuleType) -> tuple[Callable[[], ModuleType], tuple[()]]:
    return _torch_ops, ()


def _torch_ops() -> ModuleType:
    return torch.ops


def is_importable(name: str, module: ModuleType) -> bool:
    """Whether importing `name` in a fresh interpreter with the same `sys.path` gives this very module."""
    top, _, rest = name.partition(".")
    if top in sys.stdlib_module_names:
        return True
    spec = _find_spec(top, None)
    if spec is None:
        return False
    package = sys.modules.get(top)
    file = getattr(package, "__file__", None)
    if file is not None:  # a package vouches for its submodules
        return _same_file(spec.origin, file)
    if not rest:
        return True
    leaf = _find_spec(name, spec.submodule_search_locations)
    return leaf is not None and _same_file(leaf.origin, getattr(module, "__file__", None))


def _find_spec(name: str, path: object) -> ModuleSpec | None:
    """Ask the import system, past the cache of loaded modules and past finders that only this process has."""
    for finder in sys.meta_path:
        if type(finder).__module__.partition(".")[0] == "_pytest":
            continue
        try:
            spec = finder.find_spec(name, path)  # type: ignore[arg-type]
        except Exception:
            continue
        if spec is not None:
            return spec
    return None


def _same_file(first: str | None, second: str | None) -> bool:
    if first is None or second is None:
        return False
    return os.path.realpath(first) == os.path.realpath(second)
