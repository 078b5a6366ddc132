"""Planners: pure integer functions from shapes to a `GlobalLayout`, with the same answer on every rank."""

from dbuf.plan.rows import plan_row_atomic
from dbuf.plan.tensors import plan_tensor_atomic

__all__ = ["plan_row_atomic", "plan_tensor_atomic"]
