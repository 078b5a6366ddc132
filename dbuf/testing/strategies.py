"""Hypothesis strategies for what dbuf works on: shapes, trees of tensors, meshes and placements."""

from __future__ import annotations

import importlib
import math
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from dbuf.errors import explain
from dbuf.placement import (
    BlockAtomic,
    Partial,
    Placements,
    Replicate,
    RowAtomic,
    ShardPlacement,
    TensorAtomic,
)

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

Shape = tuple[int, ...]


def shapes(*, max_ndim: int = 3, max_dim: int = 7) -> SearchStrategy[Shape]:
    """Shapes of up to `max_ndim` dimensions: scalars `()`, empty tensors and odd sizes included.

    Args:
        max_ndim: Largest number of dimensions.
        max_dim: Largest size of a dimension, in elements; the smallest is 0.
    """
    st = _strategies()
    dim = st.one_of(st.integers(1, max_dim), st.integers(0, max_dim))  # zeros, but not too many
    result: SearchStrategy[Shape] = st.lists(dim, max_size=max_ndim).map(tuple)
    return result


def shape_groups(
    *, min_tensors: int = 0, max_tensors: int = 8, max_ndim: int = 3, max_dim: int = 7
) -> SearchStrategy[tuple[Shape, ...]]:
    """Tuples of shapes, as one buffer holds them; the empty group unless `min_tensors` says otherwise."""
    shape = shapes(max_ndim=max_ndim, max_dim=max_dim)
    result: SearchStrategy[tuple[Shape, ...]] = (
        _strategies().lists(shape, min_size=min_tensors, max_size=max_tensors).map(tuple)
    )
    return result


def tensor_trees(*, dtype: torch.dtype | None = None, max_leaves: int = 6) -> SearchStrategy[object]:
    """Nested dicts, lists, tuples and Nones of tensors that share one dtype.

    Values are whole numbers from -8 to 8: sums of a few of them are exact in every dtype, in any order.

    Args:
        dtype: The dtype of all tensors; drawn from float32, bfloat16, float16 and int64 by default.
        max_leaves: About how many leaves a tree has at most.
    """
    st = _strategies()
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.int64) if dtype is None else (dtype,)
    result: SearchStrategy[object] = st.sampled_from(dtypes).flatmap(
        lambda chosen: st.recursive(_tensors(chosen) | st.none(), _containers, max_leaves=max_leaves)
    )
    return result


def mesh_shapes(*, max_size: int = 4, max_ndim: int = 3) -> SearchStrategy[Shape]:
    """Shapes of meshes of at most `max_size` ranks on 1 to `max_ndim` axes, axes of size 1 included."""
    st = _strategies()
    axis = st.integers(1, max_size)
    result: SearchStrategy[Shape] = (
        st.lists(axis, min_size=1, max_size=max_ndim).map(tuple).filter(lambda s: math.prod(s) <= max_size)
    )
    return result


def placements(mesh_ndim: int, *, partial: bool = False, max_block_size: int = 3) -> SearchStrategy[Placements]:
    """Legal tuples of placements: the sharded axes are a suffix and carry one and the same placement.

    Args:
        mesh_ndim: Number of mesh axes.
        partial: Whether axes that are not sharded may be `Partial("sum")` or `Partial("avg")`.
        max_block_size: Largest block of a `BlockAtomic`.
    """
    st = _strategies()
    whole = st.sampled_from([Replicate(), *([Partial("sum"), Partial("avg")] if partial else [])])
    sharded: SearchStrategy[ShardPlacement] = st.one_of(
        st.just(RowAtomic()), st.just(TensorAtomic()), st.builds(BlockAtomic, st.integers(1, max_block_size))
    )
    result: SearchStrategy[Placements] = st.integers(0, mesh_ndim).flatmap(
        lambda n: st.builds(
            lambda prefix, shard: (*prefix, *([shard] * n)),
            st.lists(whole, min_size=mesh_ndim - n, max_size=mesh_ndim - n),
            sharded,
        )
    )
    return result


def _tensors(dtype: torch.dtype) -> SearchStrategy[torch.Tensor]:
    st = _strategies()
    result: SearchStrategy[torch.Tensor] = st.builds(
        lambda shape, seed: torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
        shapes(),
        st.integers(0, 2**31 - 1),
    )
    return result


def _containers(children: SearchStrategy[object]) -> SearchStrategy[object]:
    st = _strategies()
    few = st.lists(children, max_size=3)
    keys = st.sampled_from(["w", "b", "scale", "a.b", "0"])
    result: SearchStrategy[object] = st.one_of(few, few.map(tuple), st.dictionaries(keys, children, max_size=3))
    return result


def _strategies() -> ModuleType:
    """Import `hypothesis.strategies`, or say how to get it."""
    try:
        return importlib.import_module("hypothesis.strategies")
    except ImportError as error:
        raise ImportError(
            explain(
                "dbuf.testing.strategies",
                "random inputs cannot be drawn.",
                got="no module named 'hypothesis'",
                need="hypothesis, which the test extra installs",
                fix="pip install 'dbuf[test]'",
            )
        ) from error
