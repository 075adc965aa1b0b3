"""Planning by cost: measured step costs and estimated acceptance give the draft with the most tokens a second."""

from specheads.decoding.planner.by_cost.cost_file import CostKey, CostTable, costs_dir, shipped_costs
from specheads.decoding.planner.by_cost.curves import Curve, StepCosts

__all__ = ["CostKey", "CostTable", "Curve", "StepCosts", "costs_dir", "shipped_costs"]
