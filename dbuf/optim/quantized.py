"""Optimizer state in 8 bits: a code for each element, and a scale for each block of a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from dbuf import tree
from dbuf.buffer import DBuffer, is_buffer
from dbuf.errors import DbufError, explain, require_positive
from dbuf.optim.arguments import require_callable
from dbuf.optim.base import GradientTransformation, PyTree, require_same_specs
from dbuf.optim.partition import partition
from dbuf.optim.paths import Rule

__all__ = ["Quantized", "is_large_matrix", "is_second_moment", "quantized"]

_WHERE = "dbuf.optim.quantized"
_MIN_ROW, _MIN_NUMEL = 64, 4096


class Quantized(NamedTuple):
    """A buffer in 8 bits.

    Attributes:
        codes: uint8, placed and laid out like the parameters.
        scales: The largest magnitude of each block, float32, cut between ranks where the codes are.
    """

    codes: DBuffer
    scales: DBuffer


def is_large_matrix(path: str, shape: tuple[int, ...]) -> bool:
    """Whether `quantized` takes a tensor: two dimensions, rows of 64 elements and 4096 in all, or more of each.

    Vectors are never taken: layouts may cut them anywhere, and the codes would depend on where.

    Example:
        >>> is_large_matrix("['up']", (64, 64)), is_large_matrix("['bias']", (8192,))
        (True, False)
    """
    numel = torch.Size(shape).numel()
    return len(shape) >= 2 and numel >= _MIN_NUMEL and numel // shape[0] >= _MIN_ROW


def is_second_moment(path: str) -> bool:
    """Whether a path in a state starts with the field of Adam that holds no negative number, or of a part of a chain.

    Example:
        >>> is_second_moment(".nu['w']"), is_second_moment("[0].nu_max['w']"), is_second_moment(".mu['model.nu']")
        (True, True, False)
    """
    place, _, rest = path.partition(".")
    return not place.strip("[]0123456789") and rest.split("[")[0].split(".")[0] in ("nu", "nu_max")


def quantized(
    transformation: GradientTransformation,
    *,
    block: int = 256,
    select: Rule = is_large_matrix,
    unsigned: Callable[[str], bool] = is_second_moment,
) -> GradientTransformation:
    """Keep the state of an element-wise transformation in 8 bits.

    A block is `block` consecutive elements of one row of the logical tensor (the elements at one index of dimension 0,
    or of the first `row_dims` ones if the layout counts its rows over more); the last of a row may be short. No layout
    cuts a row, so the codes are the same on any number of ranks. Each block
    is divided by its largest magnitude, and each element takes the nearest of 256 values of the dynamic map, which are
    dense near zero. State is float32 during an update.

    Args:
        transformation: Element-wise: its state is made of buffers like the parameters, and of 0-d tensors.
        block: Elements of a block.
        select: `select(path, shape)` says which tensors; the state of others stays float32. By default large matrices.
        unsigned: `unsigned(path)` says by its path in the state which buffers hold no negative number, and need no
            sign: by default the `nu` and `nu_max` of Adam, by the name of the field. In these only zero rounds to zero.

    Returns:
        `partition({"quantized": ..., "full": ...})`; the state of the first has a `Quantized` in place of each buffer.

    Raises:
        PlacementError: In `update`, gradients are not placed and laid out like the parameters.
        DbufError: `block` is no positive number, or a state is not like the parameters.

    Communication:
        That of the transformation.

    Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", https://arxiv.org/abs/2110.02861: the
        dynamic map, and blocks; there of 2048 elements of the flat tensor.
    """
    require_positive(block, "block", _WHERE, DbufError)
    require_callable(_WHERE, "select", select, "lambda path, shape: len(shape) >= 2")

    def shrink(state: PyTree, params: PyTree) -> PyTree:
        specs = {buf.spec for buf in tree.leaves(params, is_leaf=is_buffer) if is_buffer(buf)}
        named_leaves, structure = tree.flatten_with_paths(state, is_leaf=is_buffer)
        out = []
        for path, leaf in named_leaves:
            small = is_buffer(leaf) and leaf.dtype.is_floating_point  # not a mask of bools
            if small and leaf.spec not in specs:
                _refuse_state(path)
            out.append(_quantize(leaf, block, unsigned(path)) if small else leaf)
        return tree.unflatten(out, structure)

    def grow(state: PyTree) -> PyTree:
        named_leaves, structure = tree.flatten_with_paths(state, is_leaf=_is_quantized)
        leaves = [_dequantize(x, block, unsigned(path)) if _is_quantized(x) else x for path, x in named_leaves]
        return tree.unflatten(leaves, structure)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        require_same_specs(_WHERE, params, grads=grads)
        updates, new = transformation.update(grads, grow(state), params)
        return updates, shrink(new, params)

    small = GradientTransformation(lambda params: shrink(transformation.init(params), params), update)
    return partition(
        {"quantized": small, "full": transformation},
        lambda path, shape: "quantized" if select(path, shape) else "full",
    )


def _dynamic_map(signed: bool) -> tuple[float, ...]:
    """256 numbers in [-1, 1] or [0, 1]: for each of seven decades the middles of equal cells, twice as many each.

    Example:
        >>> values = _dynamic_map(True)
        >>> len(values), values[0], values[-1], 0.0 in values
        (256, -0.99296875, 1.0, True)
    """
    values = [0.0, 1.0]
    for decade in range(7):
        cells = 2**decade if signed else 2 ** (decade + 1)
        for cell in range(cells):
            middle = 10.0 ** (decade - 6) * (0.1 + 0.9 * (cell + 0.5) / cells)
            values += [middle, -middle] if signed else [middle]
    return tuple(sorted(values))


def _is_quantized(node: object) -> bool:
    return isinstance(node, Quantized)


class _Run(NamedTuple):
    """Neighbouring tensors whose rows are equally long: one matrix, as far as blocks go."""

    start: int
    rows: int
    row: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.row


def _runs(buf: DBuffer) -> list[_Run]:
    """What this rank holds, in the order of the buffer, as few matrices: the number of kernels goes with them."""
    runs: list[_Run] = []
    for tensor, _, numel, start in buf.spec.local_pieces():
        row = buf.layout.row_size(tensor)
        if runs and runs[-1].stop == start and runs[-1].row == row:
            runs[-1] = _Run(runs[-1].start, runs[-1].rows + numel // row, row)
        else:
            runs.append(_Run(start, numel // row, row))
    return runs


def _blocks(rows: torch.Tensor, block: int) -> list[torch.Tensor]:
    """Rows cut into blocks, `(rows, blocks, elements)`: the full ones, and a short last one.

    Padding the short one would be less code, and Inductor (2.13) miscompiles what reads a padded tensor of one row.
    """
    full = rows.shape[1] // block
    parts = [rows[:, : full * block].view(-1, full, block)] if full else []
    return [*parts, rows[:, full * block :].unsqueeze(1)] if rows.shape[1] % block else parts


def _assemble(found: list[torch.Tensor], runs: list[_Run], like: DBuffer, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor laid out like `like`, with zeros in gaps and padding."""
    parts, end = [], 0
    for run, x in zip(runs, found, strict=True):
        if run.start > end:
            parts.append(like.local.new_zeros(run.start - end, dtype=dtype))
        parts.append(x.reshape(-1))
        end = run.stop
    if end < like.spec.local_numel() or not parts:
        parts.append(like.local.new_zeros(like.spec.local_numel() - end, dtype=dtype))
    return torch.cat(parts)


def _quantize(buf: DBuffer, block: int, unsigned: bool) -> Quantized:
    values = torch.tensor(_dynamic_map(not unsigned), dtype=torch.float32, device=buf.device)
    middles = (values[1:] + values[:-1]) / 2
    if unsigned:
        # Only zero itself is 0: a mean of squares that vanished beside a mean that did not would be divided by.
        middles = torch.cat([values[:1], middles[1:]])
    runs = _runs(buf)
    codes, scales = [], []
    for run in runs:
        parts = _blocks(buf.local[run.start : run.stop].view(-1, run.row), block)
        largest = [part.abs().amax(-1) for part in parts]
        units = [x / torch.where(scale > 0, scale, 1.0).unsqueeze(-1) for x, scale in zip(parts, largest, strict=True)]
        found = [torch.bucketize(unit, middles).to(torch.uint8).flatten(1) for unit in units]
        codes.append(torch.cat(found, 1))
        scales.append(torch.cat(largest, 1).reshape(-1).to(torch.float32))
    # Scales lie in the order of the buffer without gaps.
    flat = torch.cat(scales) if scales else buf.local.new_zeros(0, dtype=torch.float32)
    return Quantized(
        DBuffer(_assemble(codes, runs, buf, torch.uint8), buf.spec), DBuffer(flat, buf.spec.of_scales(block))
    )


def _dequantize(small: Quantized, block: int, unsigned: bool) -> DBuffer:
    values = torch.tensor(_dynamic_map(not unsigned), dtype=torch.float32, device=small.codes.device)
    runs = _runs(small.codes)
    sizes = [run.rows * -(-run.row // block) for run in runs]
    found = []
    for run, scales in zip(runs, small.scales.local.split_with_sizes(sizes) if runs else (), strict=True):
        parts = _blocks(small.codes.local[run.start : run.stop].view(-1, run.row), block)
        of_part = scales.view(run.rows, -1).split_with_sizes([part.shape[1] for part in parts], 1)
        full = [values[part.long()] * scale.unsqueeze(-1) for part, scale in zip(parts, of_part, strict=True)]
        found.append(torch.cat([x.flatten(1) for x in full], 1))
    return DBuffer(_assemble(found, runs, small.codes, torch.float32), small.codes.spec)


def _refuse_state(path: str) -> None:
    raise DbufError(
        explain(
            _WHERE,
            "a state that is not like the parameters cannot be kept in 8 bits.",
            got=f"state{path}, with another layout or placement",
            need="an element-wise transformation",
            fix="quantized around the element-wise part of a chain only",
        )
    )
