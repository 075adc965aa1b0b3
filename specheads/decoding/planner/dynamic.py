"""EAGLE-2's dynamic tree, whose shape follows the draft probabilities."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from specheads.decoding.planner.best_first import grow_likeliest
from specheads.decoding.planner.plan import MAX_NODES, MAX_SLOTS, Expand, require_at_most, require_positive
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree
from specheads.options import require_whole


@dataclass(frozen=True)
class DynamicTree:
    """At each depth the top_k likeliest paths get top_k children each; the tree is the budget − 1 best of all nodes.

    budget: nodes, root included; depth: the most levels drafted; top_k: beams, and children per beam. EAGLE-2,
    arXiv:2406.16858.
    """

    budget: int = 60
    depth: int = 7
    top_k: int = 10

    def __post_init__(self) -> None:
        require_whole("budget", self.budget)
        require_positive("top_k", self.top_k)
        require_at_most("depth", self.depth, MAX_NODES - 1)
        require_at_most("depth × top_k", self.depth * self.top_k, MAX_SLOTS)
        most = min(MAX_NODES, _num_candidates(self.depth, self.top_k))
        if not 2 <= self.budget <= most:
            raise ValueError(
                f"budget={self.budget} must be 2 to {most} nodes for depth={self.depth} and top_k={self.top_k}"
            )

    @property
    def num_nodes(self) -> int:
        return self.budget

    @property
    def drafting_slots(self) -> int:
        return (self.depth - 1) * self.top_k

    def limited(self, depth: int) -> DynamicTree:
        return replace(self, depth=depth, budget=min(self.budget, _num_candidates(depth, self.top_k)))

    def grow(self, root: Tensor, expand: Expand, sampler: Sampler, vocab_size: int) -> DraftTree:
        return grow_likeliest(root, expand, self.budget, self.top_k, (self.top_k,) * (self.depth - 1))


def _num_candidates(depth: int, top_k: int) -> int:
    """How many nodes there are to choose from, root included."""
    return 1 + top_k + (depth - 1) * top_k**2
