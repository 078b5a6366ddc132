"""`make_train_step`: the one step that serves every strategy.

differentiate -> redistribute to `grads` -> accumulate over microbatches -> redistribute to `optim`
    -> update the main weights -> cast -> redistribute to `params`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dbuf import tree as trees
from dbuf.buffer import DBuffer, buffers, cast, is_buffer
from dbuf.errors import DbufError, PlacementError, TreeError, explain, require_positive
from dbuf.mesh import DeviceMesh
from dbuf.movement import redistribute
from dbuf.optim import GradientTransformation, apply_updates
from dbuf.optim.base import state_dtype
from dbuf.reduce import global_norm, pmean, psum
from dbuf.train.state import Strategies, TrainState, of_each, resting_weights
from dbuf.transforms import require_one_mesh, value_and_grad, widest_mesh

__all__ = ["make_train_step"]

Step = Callable[[TrainState, Any], tuple[TrainState, dict[str, Any]]]
_WHERE = "dbuf.train.make_train_step"


def make_train_step(
    loss_fn: Callable[..., Any],
    optimizer: GradientTransformation,
    strategy: Strategies,
    *,
    microbatches: int = 1,
    compute_dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
    clip_norm: float | None = None,
    has_aux: bool = False,
    skip_nonfinite: bool = False,
    mean_over: Sequence[str] | str | None = None,
) -> Step:
    """A pure step `(state, batch) -> (state, metrics)`; compile it with `dbuf.jit(step, donate_argnums=0)`.

    Args:
        loss_fn: `loss_fn(params, batch) -> loss`, or `(loss, aux)` with `has_aux`: a mean over this rank's batch.
            `params` are buffers; used inside `gathered` (or `allgather`), they travel in `compute_dtype`.
        optimizer: As given to `init`.
        strategy: As given to `init`.
        microbatches: Pieces that the batch is cut into along dimension 0 of each of its tensors. Each has a forward
            and a backward of its own; gradients, loss and floating aux are averaged over them.
        compute_dtype: The dtype of weights in the loss, and of their gathers; by default the main weights'.
        grad_dtype: The dtype in which gradients are reduced over ranks; by default float32 for a low-precision
            `compute_dtype`, otherwise its own. They accumulate in the main weights' dtype in any case.
        clip_norm: Scale gradients down to this global 2-norm, as `torch.nn.utils.clip_grad_norm_` does.
        has_aux: Whether `loss_fn` returns a tree of tensors besides the loss. Floating ones are averaged over ranks
            and microbatches, others summed.
        skip_nonfinite: Leave the state as it was, bit by bit, where the gradients' norm is inf or nan, but for
            `skipped`, which counts; decided alike on all ranks.
        mean_over: Mesh axes over which the loss is averaged; by default all axes of the largest mesh among the
            buffers. Tensors of a buffer on a smaller mesh differ along the axes that it lacks.

    Returns:
        The step. `metrics` holds `"loss"`, `"grad_norm"` (before clipping), with `skip_nonfinite` the count
        `"skipped"`, and with `has_aux` `"aux"`; equal on all ranks, but for loss and aux along axes that `mean_over`
        leaves out.

    Raises:
        DbufError: At the call: a batch that cannot be cut, a state of another strategy or dtype, several meshes of
            which none holds the axes of all.

    Communication:
        That of the strategy, see `Strategy`; an all-reduce of one element a mesh axis for the loss, each aux leaf,
        and the norm.

    Source:
        The order of moves is that of Megatron-FSDP's step; the numerics are those of FSDP2's
        `MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=grad_dtype)`.
    """
    require_positive(microbatches, "microbatches", _WHERE, DbufError)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        _check(state, batch, strategy, microbatches, compute_dtype)
        mesh = widest_mesh(buffers(state.params))
        axes = mean_over if mean_over is not None else mesh.mesh_dim_names
        weights = _for_the_loss(state, compute_dtype, grad_dtype)
        differentiate = value_and_grad(loss_fn, has_aux=has_aux, mean_over=axes)
        total: Any = None
        values = []
        for i in range(microbatches):
            value, grads = differentiate(weights, _piece(batch, i, microbatches))
            grads = _reduce(grads, of_each(strategy, "grads"), grad_dtype)
            total = grads if total is None else trees.map(torch.add, total, grads)
            values.append(value)
        grads = _scale(_reduce(total, of_each(strategy, "optim"), grad_dtype), 1.0 / microbatches)
        norm = global_norm(grads, mesh)
        if clip_norm is not None:
            grads = _scale(grads, (clip_norm / (norm + 1e-6)).clamp(max=1.0))
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = apply_updates(state.params, updates)
        compute = resting_weights(params, strategy, compute_dtype)
        new = TrainState(state.step + 1, params, opt_state, compute, state.skipped)
        loss, aux = _report(values, has_aux, mesh, axes)
        metrics = {"loss": loss, "grad_norm": norm}
        if skip_nonfinite:
            new = _keep_unless(torch.isfinite(norm), new, state)
            metrics["skipped"] = new.skipped
        return new, ({**metrics, "aux": aux} if has_aux else metrics)

    return step


def _for_the_loss(state: TrainState, compute_dtype: torch.dtype | None, grad_dtype: torch.dtype | None) -> Any:
    """The weights to differentiate, which say themselves in what dtypes gathers inside the loss send them.

    They are in the main weights' dtype, so that gradients are too once they are reduced: a gather casts to
    `compute_dtype`, and casting a weight that rests in it up and down again changes nothing.
    """

    def prepare(apart: DBuffer | None, main: DBuffer | None) -> DBuffer | None:
        if main is None:
            return None
        local = main.local if apart is None else apart.local.to(main.local.dtype)
        spec = main.spec if apart is None else apart.spec
        return DBuffer(local, spec.with_wire(compute_dtype, grad_dtype))

    return trees.map(prepare, state.compute, state.params, is_leaf=lambda node: node is None or is_buffer(node))


def _reduce(grads: Any, placements: Any, grad_dtype: torch.dtype | None) -> Any:
    """To these placements, what is reduced on the way in `grad_dtype`."""
    if grad_dtype is None:
        return redistribute(grads, placements)
    wanted = trees.broadcast_prefix(
        placements, grads, is_prefix_leaf=lambda node: isinstance(node, tuple), is_leaf=is_buffer, where=_WHERE
    )
    bufs, treespec = trees.flatten(grads, is_leaf=is_buffer)
    moves = [i for i, buf in enumerate(bufs) if buf is not None and buf.spec.placements != wanted[i]]
    narrow = redistribute([cast(bufs[i], grad_dtype) for i in moves], [wanted[i] for i in moves]) if moves else []
    for i, buf in zip(moves, narrow, strict=True):
        bufs[i] = cast(buf, bufs[i].local.dtype)
    return trees.unflatten(bufs, treespec)


def _scale(grads: Any, factor: float | torch.Tensor) -> Any:
    if isinstance(factor, float) and factor == 1.0:
        return grads
    return trees.map(lambda g: g if g is None else (g * factor).to(g.dtype), grads)


def _piece(batch: Any, i: int, microbatches: int) -> Any:
    """The i-th part of each tensor along dimension 0; 0-d tensors, buffers and everything else whole."""
    if microbatches == 1:
        return batch

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0:
            return leaf
        return leaf.reshape(microbatches, -1, *leaf.shape[1:])[i]

    return trees.map(cut, batch, is_leaf=is_buffer)


def _report(values: list[Any], has_aux: bool, mesh: DeviceMesh, axes: Any) -> tuple[torch.Tensor, Any]:
    """Loss and aux over microbatches and ranks."""
    pairs = values if has_aux else [(value, ()) for value in values]
    _check_aux([aux for _, aux in pairs])

    def over_all(*leaves: Any) -> Any:
        if not isinstance(leaves[0], torch.Tensor):
            return leaves[0]
        floating = leaves[0].is_floating_point()
        wide = state_dtype(leaves[0].dtype) if floating else torch.int64  # counts do not fit into uint8, nor into bool
        total = leaves[0].to(wide)
        for leaf in leaves[1:]:
            total = total + leaf.to(wide)
        if floating:
            return pmean(total * (1.0 / len(leaves)), mesh, axes).to(leaves[0].dtype)
        return psum(total, mesh, axes)

    return trees.map(over_all, *pairs)  # type: ignore[no-any-return]


def _check_aux(aux: list[Any]) -> None:
    if torch.compiler.is_compiling():
        return
    named = [item for one in aux for item in trees.flatten_with_paths(one, is_leaf=is_buffer)[0]]
    bad = [p for p, x in named if is_buffer(x) or (isinstance(x, torch.Tensor) and x.is_complex())]
    if bad:
        raise TreeError(
            explain(
                _WHERE,
                "an aux cannot be averaged over ranks and microbatches.",
                got="a buffer, or complex numbers, at aux" + ", aux".join(dict.fromkeys(bad)),
                need="real tensors, of which each rank has its own",
                fix="dbuf.global_norm(buf) or another number of a buffer; torch.view_as_real of complex numbers",
            )
        )


def _keep_unless(good: torch.Tensor, new: TrainState, old: TrainState) -> TrainState:
    kept = trees.map(lambda a, b: torch.where(good, a, b) if isinstance(a, torch.Tensor) else a, new, old)
    return TrainState(kept.step, kept.params, kept.opt_state, kept.compute, old.skipped + (~good).to(torch.int64))


def _check(
    state: TrainState, batch: Any, strategy: Strategies, microbatches: int, compute_dtype: torch.dtype | None
) -> None:
    """Refuse what does not fit; eagerly, which `jit` does before it traces."""
    if torch.compiler.is_compiling():
        return
    _check_batch(batch, microbatches)
    _check_state(state, strategy, compute_dtype)
    require_one_mesh(_WHERE, buffers(state.params), "dbuf.init_mesh once, and slice it")


def _check_batch(batch: Any, microbatches: int) -> None:
    named = trees.flatten_with_paths(batch, is_leaf=is_buffer)[0]
    bad = [
        f"batch{path}: {tuple(leaf.shape)}"
        for path, leaf in named
        if isinstance(leaf, torch.Tensor) and leaf.ndim and (leaf.shape[0] % microbatches or not leaf.shape[0])
    ]
    if bad:
        raise DbufError(
            explain(
                _WHERE,
                f"a batch cannot be cut into {microbatches} equal microbatches.",
                got="\n".join(bad),
                need=f"dimension 0 of every tensor a multiple of {microbatches}",
                fix="another batch size, or another number of microbatches",
            )
        )


def _check_state(state: TrainState, strategy: Strategies, compute_dtype: torch.dtype | None) -> None:
    if not isinstance(state, TrainState):
        raise DbufError(
            explain(
                _WHERE,
                "a step takes a TrainState.",
                got=type(state).__name__,
                need="what dbuf.train.init returned, or the step before",
                fix="state = dbuf.train.init(params, optimizer, strategy)",
            )
        )
    expected = trees.broadcast_prefix(
        of_each(strategy, "optim"),
        state.params,
        is_prefix_leaf=lambda node: isinstance(node, tuple),
        is_leaf=is_buffer,
        where=_WHERE,
    )
    bufs = trees.leaves(state.params, is_leaf=is_buffer)
    for buf, placements in zip(bufs, expected, strict=True):
        if buf is not None and buf.placements != placements:
            _refuse_state(f"main weights at {buf.placements}", f"{placements}, the strategy's optim")
    for buf in buffers(state.compute):
        if compute_dtype is not None and buf.dtype != compute_dtype:
            _refuse_state(f"weights that rest in {buf.dtype}", f"compute_dtype, {compute_dtype}")


def _refuse_state(got: str, need: str) -> None:
    raise PlacementError(
        explain(
            _WHERE,
            "the state was made for another step.",
            got=got,
            need=need,
            fix="dbuf.train.init with the strategy and the compute_dtype of make_train_step",
        )
    )
