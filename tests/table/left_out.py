"""The cells that are not run, and why; `test_table.py` counts them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from table.cells import DTYPES, LAYOUTS, Cell

# Cells left out: the functions (none named: all), why, and where.
LEFT_OUT: tuple[tuple[str, str, Callable[[Cell], bool]], ...] = (
    (
        "init_mesh plan_row_atomic plan_tensor_atomic plan_compact plan_layout changed_mesh_axis check report "
        "disable_jit",
        "runs before a step or around it, outside any trace: there is nothing to compile",
        lambda c: c.compiled,
    ),
    (
        "init_mesh plan_row_atomic plan_tensor_atomic plan_compact plan_layout changed_mesh_axis",
        "takes no tensor: one dtype stands for both",
        lambda c: not c.compiled and c.dtype is torch.bfloat16,
    ),
    ("compiled_once", "compiled with several equal blocks in test_once.py: one call is unrolled", lambda c: c.compiled),
    ("inspect", "compiles whatever it is given: there is no eager inspection", lambda c: not c.compiled),
    ("init_mesh", "takes no layout: one stands for all", lambda c: _first_dtype(c) and c.name != "row padded"),
    (
        "changed_mesh_axis",
        "takes placements alone: both layouts of RowAtomic are the same there",
        lambda c: _first_dtype(c) and c.name == "row unpadded",
    ),
    ("plan_row_atomic plan_compact", "plans no TensorAtomic", lambda c: _first_dtype(c) and c.name == "tensor"),
    ("plan_tensor_atomic", "plans no rows", lambda c: _first_dtype(c) and c.name != "tensor"),
    (
        "",
        "four ranks are compiled on one axis: on two, programs differ by the groups that they name, and a compile of "
        "the table costs more than all eager cells",
        lambda c: c.compiled and c.ndim > 1,
    ),
    (
        "",
        "of compiled cells, every layout meets every number of ranks and every dtype, and every dtype every number of "
        "ranks; the other half of the triples would compile the same code again",
        lambda c: c.compiled and (LAYOUTS.index(c.name) + c.ranks + DTYPES.index(c.dtype)) % 2 == 0,
    ),
)


def reason_to_leave_out(function: str, c: Cell) -> str | None:
    for functions, reason, applies in LEFT_OUT:
        if (not functions or function in functions.split()) and applies(c):
            return reason
    return None


def _first_dtype(c: Cell) -> bool:
    return not c.compiled and c.dtype is DTYPES[0]
