"""Which modules are groups: from a class, modules, paths or a rule to `path of a module -> name of its group`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeAlias

from torch import nn

from dbuf.errors import TreeError, explain

__all__ = ["ROOT", "Groups", "Rule", "choose_groups", "group_of"]

ROOT = "root"
_WHERE = "dbuf.nn.functionalize"

Rule: TypeAlias = Callable[[str], bool | str | None]
"""A function of a module's path: whether it is a group, or the name of the group that it belongs to."""

Groups: TypeAlias = type[nn.Module] | nn.Module | str | Rule | Iterable[Any] | Mapping[str, Any] | None
"""A class, a module, a path, a rule, an iterable of the first three, or a mapping of names to any of these."""


def choose_groups(module: nn.Module, groups: Groups) -> dict[nn.Module, str]:
    """The modules that gather a group of their own as they run, and its name; the root is always one.

    Args:
        module: The whole model.
        groups: A class (every instance is a group), a module, a path as in `named_modules`, an iterable of these, a
            rule of a path, or a mapping from names to any of these.

    Returns:
        Module -> name, in the order of `named_modules`. The name is the module's path unless a rule or a mapping
        gave one; what is in no other group is in `"root"`.

    Raises:
        TreeError: Something matches no module, or one that has no forward of its own; a module in two groups; a
            name that two groups would share.
    """
    path_of = {part: path for path, part in module.named_modules()}
    chosen: dict[nn.Module, str] = {}
    if isinstance(groups, Mapping):
        named = [(name, part) for name, item in groups.items() for part in _match(item, module, path_of)]
    else:
        named = [(path_of[part], part) for part in _match(groups, module, path_of)]
        if callable(groups) and not isinstance(groups, type | nn.Module):
            named = [(_name_by(groups, path), part) for path, part in named]
    for name, part in named:
        if chosen.setdefault(part, name) != name:
            _refuse_two_groups(path_of[part], chosen[part], name)
        if type(part).forward is nn.Module.forward:
            _refuse_no_forward(path_of[part], part)
    if module not in chosen or not chosen[module]:
        if ROOT in chosen.values() and not isinstance(groups, Mapping):
            _refuse_root_name(next(path_of[part] for part, name in chosen.items() if name == ROOT))
        chosen[module] = ROOT
    return {part: chosen[part] for part in path_of if part in chosen}


def group_of(path: str, modules: Mapping[str, nn.Module], chosen: Mapping[nn.Module, str]) -> nn.Module:
    """The nearest module at `path` or above it that is a group: the one whose run gathers what lies at `path`."""
    while path and modules[path] not in chosen:
        path = path.rpartition(".")[0]
    return modules[path]


def _match(item: Groups, module: nn.Module, path_of: dict[nn.Module, str]) -> list[nn.Module]:
    """The modules that one item of `groups` means, at least one."""
    if item is None:
        return []
    found: list[nn.Module]
    if isinstance(item, type):
        found = [part for part in path_of if isinstance(part, item)]
    elif isinstance(item, nn.Module):
        found = [item] if item in path_of else []
    elif isinstance(item, str):
        found = [part for path, part in module.named_modules(remove_duplicate=False) if path == item]
    elif callable(item):
        found = [part for part, path in path_of.items() if path and item(path)]
    else:
        return list(dict.fromkeys(part for one in item for part in _match(one, module, path_of)))
    return found or _refuse_no_match(item, path_of)


def _name_by(rule: Rule, path: str) -> str:
    name = rule(path)
    return name if isinstance(name, str) else path


def _refuse_no_match(item: Any, path_of: dict[nn.Module, str]) -> NoReturn:
    kinds = Counter(type(part).__name__ for part in path_of if type(part).forward is not nn.Module.forward)
    deep = [path for part, path in path_of.items() if path and type(part).forward is not nn.Module.forward]
    raise TreeError(
        explain(
            _WHERE,
            "a group matches no module.",
            got=item.__qualname__ if isinstance(item, type) else repr(item).partition("\n")[0],
            need="one or more of the model's modules: "
            + ", ".join(f"{name} ({count})" for name, count in kinds.most_common(8)),
            fix=f"groups={deep[0]!r}, or a class whose instances are the blocks" if deep else "groups=None",
        )
    )


def _refuse_no_forward(path: str, part: nn.Module) -> NoReturn:
    first = next((f"{path}.{name}" for name, _ in part.named_children()), path)
    raise TreeError(
        explain(
            _WHERE,
            "a group is gathered as its module runs, and this one has no forward.",
            got=f"{path}: {type(part).__name__}",
            need="modules that are called",
            fix=f"its children, such as {first!r}, or their class",
        )
    )


def _refuse_two_groups(path: str, first: str, second: str) -> NoReturn:
    raise TreeError(
        explain(
            _WHERE,
            "a module, and so each of its parameters, is in two groups.",
            got=f"{path!r} in {first!r} and in {second!r}",
            need="one group a module; a group inside another one takes its parameters out of it",
            fix=f"leave it out of {second!r}",
        )
    )


def _refuse_root_name(path: str) -> NoReturn:
    raise TreeError(
        explain(
            _WHERE,
            f"the name {ROOT!r} is that of what is left over.",
            got=f"a group at path {path!r}",
            need="another name for the group",
            fix=f'groups={{"trunk": {path!r}, ...}}',
        )
    )
