"""Refusals that several functions share: of placements that do not fit, and of tensors that do not match."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from dbuf.errors import DbufError, PlacementError, TreeError, explain
from dbuf.placement import Placements, describe

__all__ = ["refuse_no_dtype", "refuse_other_reduction", "refuse_other_rows", "refuse_partial", "refuse_structure"]


def refuse_no_dtype(dtype: object, where: str) -> None:
    """Raise `DbufError` for what should be a dtype, or None, and is neither; torch would take text for a device."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise DbufError(explain(where, "no dtype.", got=repr(dtype), need="a torch.dtype", fix="torch.bfloat16"))


def refuse_other_reduction(spec: Any, axis: int, target: Placements, where: str) -> NoReturn:
    """Raise `PlacementError` for a partial axis that would go to another reduction."""
    raise PlacementError(
        explain(
            where,
            "a partial value cannot change its reduction.",
            got=f"{describe(spec.placements)} -> {describe(target)} (axis {axis})",
            need="the same reduction on the axis, or a placement that reduces it",
            fix="reduce first: dbuf.allreduce(bufs)",
        )
    )


def refuse_other_rows(source: Any, target: Any, function: str, where: str, rows: list[str]) -> NoReturn:
    """Raise `PlacementError` for a change that holds rows of the transition table other than `function`."""
    names = ", ".join(f"dbuf.{row}" for row in rows)
    raise PlacementError(
        explain(
            where,
            f"cannot go {describe(source.placements)} -> {describe(target.placements)}.",
            got=f"a change that needs {names}, on mesh axes {source.mesh.mesh_dim_names}",
            need=f"a change made of {function} alone",
            fix=f"dbuf.{rows[0] if len(rows) == 1 else 'redistribute'}(bufs, {describe(target.placements)})",
        )
    )


def refuse_partial(spec: Any, where: str) -> None:
    """Raise `PlacementError` if the numbers are contributions that nobody has reduced yet."""
    if spec.has_partial():
        raise PlacementError(
            explain(
                where,
                "a partial buffer holds contributions, not values.",
                got=f"placements {describe(spec.placements)}",
                need="Replicate or sharded placements",
                fix=f"dbuf.allreduce(buf, {describe(spec.reduced_placements())})",
            )
        )


def refuse_structure(got: str, need: str, where: str) -> NoReturn:
    """Raise `TreeError` for tensors that do not match a buffer's tree or local shapes."""
    raise TreeError(
        explain(
            where,
            "the tensors do not match the buffer.",
            got=got,
            need=need,
            fix="start from dbuf.unpack(buf)",
        )
    )
