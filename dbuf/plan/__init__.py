"""Planners: pure functions from shapes to layouts and owners, with the same answer on every rank."""

from dbuf.plan.owners import OwnerPlan, newton_schulz_flops, plan_owners
from dbuf.plan.rows import plan_row_atomic
from dbuf.plan.tensors import plan_tensor_atomic

__all__ = ["OwnerPlan", "newton_schulz_flops", "plan_owners", "plan_row_atomic", "plan_tensor_atomic"]
