"""Plans by name, as the command line and the console take them."""

from __future__ import annotations

from typing import Any

from specheads.decoding.planner.best_first import BestFirstTree
from specheads.decoding.planner.dynamic import DynamicTree
from specheads.decoding.planner.plan import Plan
from specheads.decoding.planner.sampled import SampledTree
from specheads.decoding.planner.static import StaticTree, chain, comb, default_static
from specheads.options import nearest, refuse_class, shown

FORMS = (
    "chain:DEPTH, comb:DEPTH[,WIDTH], dynamic:NODES,DEPTH,TOP_K, best:NODES,DEPTH,WIDTH, static[:NODES] or "
    "sampled:WIDTH,WIDTH,…"
)
KINDS = ("chain", "comb", "dynamic", "best", "static", "sampled")
STATIC_DEPTH = 5  # of a static tree for a drafter that names no depth of its own


def tree_named(text: str, depth: int = STATIC_DEPTH) -> Plan:
    """chain:4 | comb:5[,2] | dynamic:60,7,10 | best:64,8,7 | static[:16] | sampled:2,2,1 → the plan.

    depth: of a static tree. ValueError for anything else.
    """
    kind, _, rest = text.partition(":")
    try:
        numbers = [int(part) for part in rest.split(",")] if rest else []
    except ValueError as error:
        raise ValueError(f"{text!r}: {rest!r} is not whole numbers; expected {FORMS}") from error
    try:
        if kind == "chain" and len(numbers) == 1:
            return chain(*numbers)
        if kind == "comb" and len(numbers) in (1, 2):
            return comb(*numbers)
        if kind == "dynamic" and len(numbers) == 3:
            return DynamicTree(*numbers)
        if kind == "best" and len(numbers) == 3:
            return BestFirstTree(*numbers)
        if kind == "sampled" and numbers:
            return SampledTree(tuple(numbers))
        if kind == "static" and len(numbers) <= 1:
            return default_static(numbers[0] if numbers else 16, depth)
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from error
    near = None if kind in KINDS else nearest(kind, KINDS)
    raise ValueError(f"{text!r} is no tree; " + (f"did you mean {near!r}? " if near else "") + f"expected {FORMS}")


def as_plan(tree: Any, drafter: Any = None) -> Plan | None:
    """A plan, its text, or None for the drafter's own → the plan. ValueError for other text, TypeError for what is
    none. drafter: whose depth a static tree has."""
    if tree is None:
        return None
    if isinstance(tree, str):
        return tree_named(tree, getattr(drafter, "fixed_depth", None) or STATIC_DEPTH)
    refuse_class("tree", tree, "plan", "grow")
    if not hasattr(tree, "grow"):
        raise TypeError(
            f"tree={shown(tree)} is no plan; give 'chain:4', DynamicTree(), StaticTree(choices) or the like"
        )
    return tree


def static_choices(tree: StaticTree | str, depth: int = STATIC_DEPTH) -> tuple[tuple[int, ...], ...]:
    """The choices of a static tree, or of its text. ValueError for text whose tree has no shape of its own; depth: as
    in `tree_named`."""
    plan = tree_named(tree, depth) if isinstance(tree, str) else tree
    if not isinstance(plan, StaticTree):
        raise ValueError(f"tree={tree!r} is no static tree; give chain:DEPTH, comb:DEPTH[,WIDTH] or static[:NODES]")
    return plan.choices
