"""Plans by name, as the command line and the console take them."""

from __future__ import annotations

from specheads.planner.best_first import BestFirstTree
from specheads.planner.dynamic import DynamicTree
from specheads.planner.plan import Plan
from specheads.planner.sampled import SampledTree
from specheads.planner.static import chain, comb, default_static

FORMS = (
    "chain:DEPTH, comb:DEPTH[,WIDTH], dynamic:NODES,DEPTH,TOP_K, best:NODES,DEPTH,WIDTH, static[:NODES] or "
    "sampled:WIDTH,WIDTH,…"
)
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
    raise ValueError(f"{text!r} is no tree; expected {FORMS}")
