"""Learning from the text that followed how good a head's drafts were.

B batch rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from specheads.decoding.planner.by_cost.cost_aware import CostAwareTree
from specheads.decoding.planner.by_cost.estimates import Calibration, HeadEstimate
from specheads.decoding.planner.by_cost.shapes import Shape


def learn_static(
    heads: Sequence[HeadEstimate], shape: Shape, ranks: Sequence[Sequence[int]], drafted: Sequence[bool]
) -> None:
    """Learn from a static tree, in the rows where it was drafted: by depth, which child was accepted, if any.

    ranks: the sibling ranks of each row's accepted drafts."""
    for row, accepted, counts in zip(heads, ranks, drafted, strict=True):
        node: tuple[int, ...] = ()
        for depth, rank in enumerate((*accepted, None)) if counts else ():
            children = shape.children.get(node, ())
            if not children:
                break
            row.add(depth, rank, len(children))
            node = children[rank or 0]


def learn_grown(
    heads: Sequence[HeadEstimate], calibration: Calibration, plan: CostAwareTree, gained: Sequence[Sequence[int]]
) -> None:
    """Learn from all candidates of a cost-aware tree, in the tree or not. gained: by row, the tokens that followed."""
    for row, tree, tokens in zip(heads, plan.grown, gained, strict=True):
        node = -1
        for depth, token in enumerate(tokens):
            children = [i for i, parent in enumerate(tree.parents) if parent == node]
            if not children:
                break
            right = [rank for rank, child in enumerate(children) if tree.tokens[child] == token]
            for child in children:
                calibration.add(tree.confidences[child], tree.tokens[child] == token)
            if depth == 0:  # deeper levels are drafted only where the head is sure, a biased sample
                row.add(0, right[0] if right else None, len(children))
            if not right:
                break
            node = children[right[0]]


class Surplus:
    """The tokens of cost-aware trees compared with what static shapes promised for the same time."""

    FADE, WEIGHT = 0.98, 16.0

    def __init__(self) -> None:
        self.tokens = self.expected = 0.0

    def add(self, tokens: float, expected: float) -> None:
        self.tokens, self.expected = self.tokens * self.FADE + tokens, self.expected * self.FADE + expected

    def fade(self) -> None:
        """Decay for a step with a static shape."""
        self.add(0, 0)

    @property
    def pays(self) -> bool:
        return (self.tokens + self.WEIGHT) / (self.expected + self.WEIGHT) >= 1 - 0.02
