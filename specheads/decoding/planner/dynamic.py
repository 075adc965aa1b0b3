"""EAGLE-2's dynamic tree: its shape follows the draft's confidence."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from specheads.decoding.planner.best_first import likeliest
from specheads.decoding.planner.plan import MAX_NODES, MAX_SLOTS, Expand, positive, within
from specheads.decoding.sampler import Sampler
from specheads.decoding.tree import DraftTree


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2: at each depth the top_k likeliest paths each get top_k children; the budget − 1 best nodes stay.

    budget: nodes, root included; depth: levels drafted at most; top_k: beams, and children a beam. EAGLE-2,
    arXiv:2406.16858.
    """

    budget: int = 60
    depth: int = 7
    top_k: int = 10

    def __post_init__(self) -> None:
        positive("top_k", self.top_k)
        within("depth", self.depth, MAX_NODES - 1)
        within("depth × top_k", self.depth * self.top_k, MAX_SLOTS)
        most = min(MAX_NODES, _most(self.depth, self.top_k))
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
        return replace(self, depth=depth, budget=min(self.budget, _most(depth, self.top_k)))

    def grow(self, root: Tensor, expand: Expand, sampler: Sampler, vocab_size: int) -> DraftTree:
        return likeliest(root, expand, self.budget, self.top_k, (self.top_k,) * (self.depth - 1))


def _most(depth: int, top_k: int) -> int:
    """The nodes there are to choose from, the root included."""
    return 1 + top_k + (depth - 1) * top_k**2
