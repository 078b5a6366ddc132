"""Blocks of a deep model that a step compiles once, however many there are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dbuf import tree as trees
from dbuf.compat import compile_once

__all__ = ["CompiledOnce", "compiled_once"]

Function = Callable[..., Any]


def compiled_once(fn: Function) -> Function:
    """`fn`, of which a step compiled by `jit` holds one piece of code, however often it calls it alike.

    A step of 32 equal blocks otherwise compiles each of them, forward and backward:

        unrolled                  block block block ... block     32 x the code
        compiled once             call  call  call  ... call       1 x the code

    Args:
        fn: Plain torch on tensors: `dbuf.gathered(dbuf.compiled_once(block))`. Collectives stay outside, so that the
            step overlaps and repeats them as it does without. Results are new tensors: no argument, and no two
            views of one tensor. Arguments are not views of one tensor either, which `gathered` sees to for weights.

    Returns:
        The same function. Calls share their code if shapes, dtypes and whether gradients are asked for are alike.
        In eager, and under plain `torch.compile`, nothing else changes.

    Communication:
        None of its own.

    Gradient:
        That of `fn`. Each block keeps for its backward what torch's partitioner chooses, block by block. Inductor fuses
        nothing across the border of a block.

    Example:
        >>> import dbuf
        >>> block = compiled_once(lambda p, h: torch.tanh(h * p["w"]))
        >>> block({"w": torch.tensor(2.0)}, torch.tensor(0.0))
        tensor(0.)
    """
    return CompiledOnce(fn)


class CompiledOnce:
    """What `compiled_once` returns: a function, and the means to have more work done within its region."""

    def __init__(self, fn: Function, prepare: Function | None = None) -> None:
        if hasattr(fn, "__name__"):
            functools.update_wrapper(self, fn)
        self._fn = fn
        self._prepare = prepare

    def after(self, prepare: Function) -> CompiledOnce:
        """The same function of what `prepare` turns into its first argument, within the region.

        A region takes no two views of one tensor (torch 2.13, 2.14), which the weights of a gathered buffer are.
        """
        return CompiledOnce(self._fn, prepare)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; in a compiled program, as a region."""
        fn, prepare = self._fn, self._prepare
        leaves, treespec = trees.flatten((args, kwargs))

        def run(*flat: Any) -> Any:
            (*positional,), named = trees.unflatten(list(flat), treespec)
            if prepare is not None:
                positional[0] = prepare(positional[0])
            return fn(*positional, **named)

        return compile_once(run, *leaves) if torch.compiler.is_compiling() else run(*leaves)
