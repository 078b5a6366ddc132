"""Planners: pure functions from shapes to layouts and owners, with the same answer on every rank."""

from dbuf.plan.cheapest import CostModel, LayoutChoice, LayoutOption, plan_layout
from dbuf.plan.compact import CompactPlan, plan_compact
from dbuf.plan.owners import OwnerPlan, newton_schulz_flops, plan_owners
from dbuf.plan.rows import plan_row_atomic
from dbuf.plan.tensors import plan_tensor_atomic

__all__ = [
    "CompactPlan",
    "CostModel",
    "LayoutChoice",
    "LayoutOption",
    "OwnerPlan",
    "newton_schulz_flops",
    "plan_compact",
    "plan_layout",
    "plan_owners",
    "plan_row_atomic",
    "plan_tensor_atomic",
]
