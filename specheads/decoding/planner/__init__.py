"""Plans, which decide the size and shape of the next tree: static trees, best-first trees, EAGLE-2's dynamic trees,
sampled trees and adaptive chains."""

from specheads.decoding.planner.adaptive import AdaptiveChain
from specheads.decoding.planner.best_first import BestFirstTree
from specheads.decoding.planner.dynamic import DynamicTree
from specheads.decoding.planner.named import PLANS, as_plan, tree_named
from specheads.decoding.planner.plan import MAX_NODES, ChildLogits, Expand, NoDraft, Plan, limit_depth
from specheads.decoding.planner.sampled import SampledTree
from specheads.decoding.planner.static import StaticTree, chain, comb, default_static

__all__ = [
    "MAX_NODES", "PLANS", "AdaptiveChain", "BestFirstTree", "ChildLogits", "DynamicTree", "Expand", "NoDraft", "Plan",
    "SampledTree", "StaticTree", "as_plan", "chain", "comb", "default_static", "limit_depth", "tree_named",
]  # fmt: skip
