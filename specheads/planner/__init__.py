"""How big and which shape the next tree is: static choices, best-first and EAGLE-2's dynamic trees, sampled trees,
adaptive chains."""

from specheads.planner.adaptive import AdaptiveChain
from specheads.planner.best_first import BestFirstTree
from specheads.planner.dynamic import DynamicTree
from specheads.planner.named import as_plan, tree_named
from specheads.planner.plan import MAX_NODES, Expand, Idle, Plan, Scored, limited
from specheads.planner.sampled import SampledTree
from specheads.planner.static import StaticTree, chain, comb, default_static

__all__ = [
    "MAX_NODES", "AdaptiveChain", "BestFirstTree", "DynamicTree", "Expand", "Idle", "Plan", "SampledTree", "Scored",
    "StaticTree", "as_plan", "chain", "comb", "default_static", "limited", "tree_named",
]  # fmt: skip
