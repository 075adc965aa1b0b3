"""Planning by cost: measured curves, estimated acceptance, and the draft with the most expected tokens a second."""

from specheads.decoding.planner.by_cost.cost_file import CostKey, CostTable, costs_dir, shipped_costs
from specheads.decoding.planner.by_cost.curves import Curve, StepCosts

__all__ = ["CostKey", "CostTable", "Curve", "StepCosts", "costs_dir", "shipped_costs"]
