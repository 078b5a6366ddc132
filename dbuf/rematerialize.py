"""What lives between forward and backward: weights gathered again, activations recomputed.

In eager, `gathered` swaps each view of a gathered weight that autograd would save for a note, and gathers again when
the backward asks; `remat` is `torch.utils.checkpoint`. Under compilation both only leave marks on the graph, and
the pass in `dbuf.schedule` repeats what is marked in front of its first use in the backward.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.utils.checkpoint import checkpoint

from dbuf import tree as trees
from dbuf.buffer import DBuffer, buffers, is_buffer, unpack
from dbuf.compat import inside_func_transform, storage_id, version_of
from dbuf.errors import DbufError, explain
from dbuf.movement import gather_for
from dbuf.once import CompiledOnce

__all__ = ["gathered", "remat"]

Function = Callable[..., Any]
_inside_remat = contextvars.ContextVar("inside a function that remat will run again", default=False)


def gathered(fn: Function, *, dtype: torch.dtype | None = None, grad_dtype: torch.dtype | None = None) -> Function:
    """`fn` of full tensors as a function of buffers, whose weights are gathered here and again in the backward.

    Args:
        fn: `fn(tensors, *args, **kwargs)`, plain torch on what `unpack` gives.
        dtype: Gather, and compute, in this dtype; cast before the wire. By default what the buffer's spec says: a
            training step sets it there for all the gathers inside a loss.
        grad_dtype: The dtype in which gradients are reduced; by default likewise, or fp32 for a bf16 or fp16 wire.

    Returns:
        The same function with a DBuffer, or a pytree of them, first. On replicated buffers it is just the call.

    Communication:
        An all-gather a buffer and sharded axis in the forward, the same again in the backward (none for a buffer
        whose weights the backward does not read), and a reduce-scatter.

    Gradient:
        That of `fn`; sharded as the buffer is. No full weight lives between forward and backward: in eager,
        autograd saves a note instead of a view of one; in a step compiled by `dbuf.jit`, the gather is repeated in
        the graph. Nothing else is recomputed. Under a plain `torch.compile`, or inside `torch.func` transforms,
        the weights are kept.

    Source:
        `reshard_after_forward` of FSDP2; ZeRO stage 3.
    """

    @functools.wraps(fn, updated=())  # Dynamo knows no `__dict__` of a functools.partial
    def call(bufs: Any, *args: Any, **kwargs: Any) -> Any:
        gather = functools.partial(gather_for, where="dbuf.gathered", dtype=dtype, grad_dtype=grad_dtype)
        if torch.compiler.is_compiling():
            full = gather(bufs, again=True)
            if isinstance(fn, CompiledOnce):
                return fn.after(_unpack_all)(full, *args, **kwargs)
            return fn(_unpack_all(full), *args, **kwargs)
        if not _keeps_weights(bufs):
            return fn(_unpack_all(gather(bufs, again=False)), *args, **kwargs)
        full = gather(bufs, again=False)
        notes = _Notes(buffers(bufs), buffers(full), lambda shard: gather(shard, again=False))
        with torch.autograd.graph.saved_tensors_hooks(notes.pack, notes.unpack):
            out = fn(_unpack_all(full), *args, **kwargs)
        notes.find_written(buffers(full))
        return out

    return call


def _unpack_all(bufs: Any) -> Any:
    return trees.map(lambda buf: None if buf is None else unpack(buf), bufs, is_leaf=is_buffer)


def _keeps_weights(bufs: Any) -> bool:
    """Whether autograd would keep gathered weights: something is sharded, and a gradient will be asked for."""
    if not torch.is_grad_enabled() or _inside_remat.get():
        return False
    sharded = any(buf.spec.gathered_placements() != buf.placements for buf in buffers(bufs))
    return sharded and not _under_func("gathered")


@dataclasses.dataclass(frozen=True)
class _Note:
    """In place of a view of a gathered weight: which buffer, and how to make the view again."""

    index: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conj: bool


@dataclasses.dataclass(frozen=True)
class _Kept:
    """A tensor that is saved as it is, and how often its memory had been written by then."""

    tensor: torch.Tensor
    version: int


class _Notes:
    """Saved-tensor hooks of one call of a gathered function.

    Where there are hooks, autograd no longer sees that a saved tensor is written in place; these look themselves.
    """

    def __init__(self, shards: list[DBuffer], full: list[DBuffer], gather: Callable[[DBuffer], DBuffer]) -> None:
        self._shards = [DBuffer(buf.local.detach(), buf.spec) for buf in shards]
        self._gather = gather
        self._again: list[torch.Tensor | None] = [None] * len(full)
        self._packed = [0] * len(full)
        self._unpacked = [0] * len(full)
        self._versions = [version_of(buf.local) for buf in full]
        self._written = [False] * len(full)
        # The caller holds `full` while these hooks are on, so no other tensor can take over its storage.
        self._index_of = {
            storage_id(whole.local): i
            for i, (buf, whole) in enumerate(zip(shards, full, strict=True))
            if storage_id(whole.local) != storage_id(buf.local)
        }

    def pack(self, saved: torch.Tensor) -> _Kept | _Note:
        """A note for a view of a gathered weight; anything else is saved as it is."""
        index = self._index_of.get(storage_id(saved))
        if index is None or saved.is_neg():
            return _Kept(saved, version_of(saved))
        self._packed[index] += 1
        size, stride, offset = tuple(saved.shape), tuple(saved.stride()), int(saved.storage_offset())
        return _Note(index, size, stride, offset, saved.dtype, saved.is_conj())

    def find_written(self, full: list[DBuffer]) -> None:
        """The function has returned: see which gathered weights it has written, which another gather would undo."""
        self._written = [version_of(buf.local) != before for buf, before in zip(full, self._versions, strict=True)]

    def unpack(self, saved: _Kept | _Note) -> torch.Tensor:
        """The view, from a weight gathered again: once a buffer, and dropped after its last use."""
        if isinstance(saved, _Kept):
            if version_of(saved.tensor) != saved.version:
                _refuse_written(f"a tensor of shape {tuple(saved.tensor.shape)}", "x * 2 in place of x.mul_(2)")
            return saved.tensor
        if self._written[saved.index]:
            _refuse_written(f"a gathered weight of shape {saved.size}", "a copy: w.clone().mul_(2)")
        i = saved.index
        again = self._again[i]
        if again is None:
            with torch.no_grad():
                again = self._gather(self._shards[i]).local
            self._again[i] = again
        self._unpacked[i] += 1
        if self._unpacked[i] == self._packed[i]:
            self._again[i] = None
            self._unpacked[i] = 0
        # Complex views of real weights have another dtype than the buffer, and count in their own elements.
        view = again.new_empty(0, dtype=saved.dtype)
        view.set_(again.untyped_storage(), saved.offset, saved.size, saved.stride)
        return view.conj() if saved.conj else view


def _refuse_written(what: str, instead: str) -> NoReturn:
    raise DbufError(
        explain(
            "dbuf.gathered",
            "the backward needs a tensor that was modified by an inplace operation.",
            got=f"{what}, saved for the backward and written",
            need="tensors that stay as they are from the forward to the backward",
            fix=instead,
        )
    )


def remat(fn: Function) -> Function:
    """`fn`, recomputed in the backward instead of keeping its activations, as `jax.checkpoint` does.

    Args:
        fn: Any function of pytrees; tensors and buffers among its arguments are kept, nothing that it makes is.

    Returns:
        The same function. `remat(gathered(block))` and `gathered(remat(block))` keep neither weights nor
        activations.

    Communication:
        That of `fn`, and again in the backward.

    Gradient:
        Exactly that of `fn`: in eager the random state is replayed; in a compiled step random numbers are made again
        from the same seed, or kept where an op draws them from a generator. Inside `torch.func` transforms
        activations are kept (saved-tensor hooks do not work there), with a warning.

    Source:
        Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost".
    """

    @functools.wraps(fn, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and (not torch.is_grad_enabled() or _under_func("remat")):
            return fn(*args, **kwargs)
        # Flat tensors: checkpoint releases and restores its direct arguments, but would hold a dict of them.
        leaves, treespec = trees.flatten((args, kwargs))

        def run(*flat: Any) -> Any:
            again_args, again_kwargs = trees.unflatten(list(flat), treespec)
            return fn(*again_args, **again_kwargs)

        if torch.compiler.is_compiling():
            return checkpoint(run, *leaves, use_reentrant=False)
        return checkpoint(_marked(run), *leaves, use_reentrant=False)

    return call


def _marked(run: Function) -> Function:
    """`run`, during which `gathered` leaves the saving to `remat`: hooks of its own would hide tensors from it."""

    def marked(*flat: Any) -> Any:
        token = _inside_remat.set(True)
        try:
            return run(*flat)
        finally:
            _inside_remat.reset(token)

    return marked


def _under_func(name: str) -> bool:
    if not inside_func_transform():
        return False
    warnings.warn(
        f"dbuf.{name} inside a torch.func transform keeps what it would drop: saved-tensor hooks do not work there. "
        "Use dbuf.value_and_grad.",
        stacklevel=3,
    )
    return True
