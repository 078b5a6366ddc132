"""All rows of the table, by name, in the order in which a rank runs them."""

from __future__ import annotations

from table import buffers, movement, plans, programs, reductions, transforms
from table.row import Row

ROWS: dict[str, Row] = {
    **buffers.ROWS,
    **movement.ROWS,
    **reductions.ROWS,
    **transforms.ROWS,
    **programs.ROWS,
    **plans.ROWS,
}
