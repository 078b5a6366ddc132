"""Donated arguments: which result goes into whose memory, and the writing itself."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from dbuf import tree as trees
from dbuf.errors import DbufError, TreeError, explain

__all__ = ["check_donation", "check_memory", "forms_of_donated", "write_back"]

_WHERE = "dbuf.jit"


def write_back(args: tuple[Any, ...], out: Any, donate_argnums: tuple[int, ...]) -> Any:
    """`out` with each paired part written into, and replaced by, the donated argument; runs inside the trace.

    Inductor turns a trailing copy into the old tensor into a kernel that writes there in the first place.

    Raises:
        TreeError: A pair does not fit. The function may have taken another branch than when `check_donation` saw it.
    """
    if not donate_argnums:
        return out
    parts = list(out) if isinstance(out, tuple | list) else [out]
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for k, i in enumerate(donate_argnums):

        def pair(old: Any, new: Any, i: int = i, k: int = k) -> Any:
            if not isinstance(old, torch.Tensor):
                return new  # a number that changes, say
            if not isinstance(new, torch.Tensor) or old.dtype != new.dtype or old.shape != new.shape:
                got = f"{new.dtype} {new.shape}" if isinstance(new, torch.Tensor) else type(new).__name__
                raise TreeError(_unpaired(i, k, got, f"{old.dtype} {old.shape}"))
            pairs.append((old, new))
            return old

        if k >= len(parts):
            raise TreeError(_unpaired(i, k, "nothing", "a result for each donated argument"))
        parts[k] = trees.map(pair, args[i], parts[k])
    # All results are taken before any is written: one may be a donated argument, or a view of it. Inductor drops the
    # clone of anything else.
    taken = [new.clone() for _, new in pairs]
    others = [x for i, arg in enumerate(args) if i not in donate_argnums for x in trees.leaves(arg)]
    donated = [old for old, _ in pairs]

    def take(x: Any) -> Any:
        is_other = any([x is other for other in others]) and not any([x is old for old in donated])
        return x.clone() if isinstance(x, torch.Tensor) and not is_other else x

    parts[len(donate_argnums) :] = trees.map(take, parts[len(donate_argnums) :])
    for (old, _), new in zip(pairs, taken, strict=True):
        old.copy_(new)
    return type(out)(parts) if type(out) in (tuple, list) else _rebuild(out, parts)


def _rebuild(out: Any, parts: list[Any]) -> Any:
    if isinstance(out, tuple):
        return type(out)(*parts)  # a named tuple
    return parts[0]


def check_donation(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, donate_argnums: tuple[int, ...]) -> None:
    """Refuse results that do not pair with what is donated.

    Args:
        args: The arguments by position.
        kwargs: Those by name.
        out: What the function returns for them; fake tensors will do.
        donate_argnums: Which arguments are donated.

    Raises:
        TreeError: A donated argument has no partner of the same structure, specs, shapes and dtypes.
        DbufError: A number is out of range or given twice; and what `check_memory` refuses.
    """
    parts = list(out) if isinstance(out, tuple | list) else [out]
    if sorted(set(donate_argnums)) != sorted(donate_argnums) or any(not 0 <= i < len(args) for i in donate_argnums):
        _refuse(
            "no such arguments to donate.",
            got=f"donate_argnums={donate_argnums} of {len(args)} positional arguments",
            need="positions of arguments, each once",
            fix="donate_argnums=(0, 1), and pass those arguments by position",
        )
    for k, i in enumerate(donate_argnums):
        if k >= len(parts):
            raise TreeError(_unpaired(i, k, "nothing", "a result for each donated argument"))
        difference = _first_difference(args[i], parts[k])
        if difference:
            raise TreeError(_unpaired(i, k, *difference))
    check_memory(args, kwargs, donate_argnums)


def forms_of_donated(args: tuple[Any, ...], donate_argnums: tuple[int, ...]) -> tuple[Hashable, ...]:
    """Dtypes and shapes of what is donated: a program is checked for these, and writes results like these."""
    donated = [x for i in donate_argnums if i < len(args) for x in trees.leaves(args[i])]
    return tuple([(x.dtype, x.shape) for x in donated if isinstance(x, torch.Tensor)])


def _first_difference(old: Any, new: Any) -> tuple[str, str] | None:
    olds, old_spec = trees.flatten_with_paths(old)
    news, new_spec = trees.flatten_with_paths(new)
    if old_spec != new_spec:
        return str(new_spec), str(old_spec)
    for (path, a), (_, b) in zip(olds, news, strict=True):
        if isinstance(a, torch.Tensor) and (not isinstance(b, torch.Tensor) or _form(a) != _form(b)):
            return f"{path}: {_form(b) if isinstance(b, torch.Tensor) else b!r}", f"{path}: {_form(a)}"
    return None


def _form(x: torch.Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)} on {x.device}"


def _unpaired(argument: int, result: int, got: str, need: str) -> str:
    return explain(
        _WHERE,
        f"argument {argument} is donated, but result {result} does not fit into its memory.",
        got=got,
        need=need,
        fix="return the updated arguments first, in the order of donate_argnums, or donate fewer",
    )


def check_memory(args: tuple[Any, ...], kwargs: dict[str, Any], donate_argnums: tuple[int, ...]) -> None:
    """Refuse donated tensors that cannot be written over; run at every call, for equal specs do not tell.

    Raises:
        DbufError: A donated tensor requires a gradient, or shares memory with itself or with another argument.
    """
    donated = [x for i in donate_argnums for x in _tensors(args[i])]
    if any([x.requires_grad for x in donated]):
        _refuse(
            "a donated tensor requires a gradient, so its graph would grow from step to step.",
            got="a buffer made of tensors that require one, such as a module's parameters",
            need="tensors without a graph: dbuf.value_and_grad asks for gradients itself",
            fix="dbuf.tree.map(torch.Tensor.detach, params) before the first step",
        )
    # An argument may be a donated tensor itself: a program is told of that.
    same = {id(x) for x in donated}
    others = [x for i, arg in enumerate(args) if i not in donate_argnums for x in _tensors(arg)] + _tensors(kwargs)
    spans = [(*_span(x), True, x) for x in donated]
    spans += [(*_span(x), False, x) for x in others if id(x) not in same]
    spans.sort(key=lambda span: span[:2])
    end, owner, is_donated = 0, torch.empty(0), False
    for start, stop, mine, x in spans:
        if start < end and (mine or is_donated):
            _refuse(
                "a donated tensor and another argument share memory, so one would overwrite the other.",
                got=f"{_form(owner)} and {_form(x)}",
                need="tensors with memory of their own",
                fix="clone one of them before the step",
            )
        if mine and stop - start < x.numel() * x.itemsize:
            _refuse(
                "elements of a donated tensor share memory.",
                got=f"{_form(x)} with strides {x.stride()}",
                need="memory for each element",
                fix="tensor.contiguous() before the first step",
            )
        if stop > end:
            end, owner, is_donated = stop, x, mine


def _span(x: torch.Tensor) -> tuple[int, int]:
    """The addresses between which a tensor's elements lie."""
    numel = x.numel() if x.is_contiguous() else 1 + sum((n - 1) * k for n, k in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + numel * x.itemsize


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in trees.leaves(tree) if isinstance(x, torch.Tensor) and x.numel()]


def _refuse(what: str, *, got: str, need: str, fix: str) -> None:
    raise DbufError(explain(_WHERE, what, got=got, need=need, fix=fix))
