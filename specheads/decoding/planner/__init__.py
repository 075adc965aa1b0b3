"""Plans, which decide the size and shape of the next tree: static trees, best-first trees, EAGLE-2's dynamic trees,
sampled trees and adaptive chains; and plans by text, as generate() and the command line take them: `chain:4`.

A new plan is one file and one entry in PLANS.
"""

from collections.abc import Callable
from typing import Any

from specheads.decoding.planner.adaptive import AdaptiveChain
from specheads.decoding.planner.best_first import BestFirstTree, DynamicTree
from specheads.decoding.planner.plan import MAX_NODES, ChildLogits, Expand, NoDraft, Plan, limit_depth
from specheads.decoding.planner.sampled import SampledTree
from specheads.decoding.planner.static import StaticTree, chain, comb, default_static
from specheads.decoding.registry import Registry
from specheads.options import refuse_class, shown

__all__ = [
    "MAX_NODES", "PLANS", "AdaptiveChain", "BestFirstTree", "ChildLogits", "DynamicTree", "Expand", "NoDraft", "Plan",
    "SampledTree", "StaticTree", "as_plan", "chain", "comb", "default_static", "limit_depth", "tree_named",
]  # fmt: skip


STATIC_DEPTH = 5  # of a static tree for a drafter without a fixed depth


def static_tree(nodes: int = 16, *, draft_depth: int = STATIC_DEPTH) -> StaticTree:
    """The static tree of so many nodes, at most `draft_depth` deep."""
    return default_static(nodes, draft_depth)


PLANS: Registry[Callable[..., Plan]] = Registry(
    "tree", "tree",
    {
        "chain": chain, "adaptive": AdaptiveChain, "comb": comb, "dynamic": DynamicTree, "best": BestFirstTree,
        "static": static_tree, "sampled": SampledTree,
    },
    commas=True,
)  # fmt: skip


def tree_named(text: str, depth: int | None = None) -> Plan:
    """chain:4 | adaptive:8 | comb:5[,2] | dynamic:60,7,10 | best:64,8,7 | static[:16] | sampled:2,2,1 → the plan.

    depth: of a static tree; None: STATIC_DEPTH. ValueError for anything else.
    """
    return PLANS.build(text, draft_depth=depth or STATIC_DEPTH)


def as_plan(tree: Any, drafter: Any = None) -> Plan | None:
    """A plan or its text → the plan; None stays None. ValueError for other text, TypeError for what is no plan.
    drafter: gives a static tree its depth."""
    if tree is None:
        return None
    if isinstance(tree, str):
        return tree_named(tree, None if drafter is None else drafter.fixed_depth)
    refuse_class("tree", tree, "plan", "grow")
    if not hasattr(tree, "grow"):
        raise TypeError(
            f"tree={shown(tree)} is no plan; give 'chain:4', DynamicTree(), StaticTree(choices) or the like"
        )
    return tree


def static_choices(tree: StaticTree | str, depth: int | None = None) -> tuple[tuple[int, ...], ...]:
    """The choices of a static tree or its text. ValueError for text of a tree that is not static; depth: as in
    `tree_named`."""
    plan = tree_named(tree, depth) if isinstance(tree, str) else tree
    if not isinstance(plan, StaticTree):
        raise ValueError(f"tree={tree!r} is no static tree; give chain:DEPTH, comb:DEPTH[,WIDTH] or static[:NODES]")
    return plan.choices
