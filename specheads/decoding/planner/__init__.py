"""How big and which shape the next tree is: static choices, best-first and EAGLE-2's dynamic trees, sampled trees,
adaptive chains."""

from specheads.decoding.planner.adaptive import AdaptiveChain
from specheads.decoding.planner.best_first import BestFirstTree
from specheads.decoding.planner.dynamic import DynamicTree
from specheads.decoding.planner.named import PLANS, as_plan, tree_named
from specheads.decoding.planner.plan import MAX_NODES, Expand, Idle, Plan, Scored, limited
from specheads.decoding.planner.sampled import SampledTree
from specheads.decoding.planner.static import StaticTree, chain, comb, default_static

__all__ = [
    "MAX_NODES", "PLANS", "AdaptiveChain", "BestFirstTree", "DynamicTree", "Expand", "Idle", "Plan", "SampledTree",
    "Scored", "StaticTree", "as_plan", "chain", "comb", "default_static", "limited", "tree_named",
]  # fmt: skip
