"""Ensemble: drafts are judged by a mixture of the target's law and the draft's.

p is the target's law, q the draft's. Shapes: B batch rows, N nodes, V vocabulary, R nodes looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specheads.accept.exact import kept_in_order, left_of
from specheads.accept.rule import Laws, LevelRule
from specheads.sampling import Sampler, likeliest


@dataclass(frozen=True)
class Ensemble(LevelRule):
    """`Exact` towards v = weight · p + (1 − weight) · q wherever something is drafted, and towards p behind it.

    weight in (0, 1]; lossless at 1 alone. At temperature 0 the argmax of v stands or is emitted. q is the draft's own
    law under the logits processors. The rule of transformers' assistant_ensemble_weight, here for trees, batches and
    heads too. DIVERSE, arXiv:2604.07622.
    """

    weight: float

    def __post_init__(self) -> None:
        if not 0 < self.weight <= 1:
            raise ValueError(f"weight={self.weight} must be above 0 and at most 1 (1 is exact)")

    @property
    def lossless(self) -> bool:
        return self.weight == 1

    @property
    def needs_draft_law(self) -> bool:
        return not self.lossless

    def is_exact(self, sampler: Sampler) -> bool:
        return self.lossless

    def kept(self, laws: Laws) -> Tensor:
        tree, inner = laws.tree, laws.tree.shape.inner
        v = self.law(laws, inner)
        if not laws.sampler.do_sample:
            best = torch.zeros_like(tree.tokens).flatten().index_copy_(0, inner, likeliest(v))
            return laws.at_parent(best.view_as(tree.tokens)) == tree.tokens
        return kept_in_order(laws, laws.p.flatten(0, 1).index_copy(0, inner, v).view_as(laws.p))

    def rest(self, laws: Laws, node: Tensor) -> Tensor:
        leaf = ~laws.at(laws.tree.shape.children, node).any(1, keepdim=True)
        law = torch.where(leaf, laws.at(laws.soft, node), self.law(laws, laws.place(node)))
        return left_of(law, laws, node) if laws.sampler.do_sample else law

    def law(self, laws: Laws, place: Tensor) -> Tensor:
        """(R, V) v at nodes place (R,), counted over all rows, which have children; before temperature 0."""
        kept = laws.tree.logits
        if kept is None:
            raise ValueError("Ensemble mixes the draft's law with the target's, and this tree was drafted without one")
        p, q = laws.soft.flatten(0, 1).index_select(0, place), laws.sampler.draft_law(kept.over_target(kept.at(place)))
        v = torch.lerp(q.to(p.dtype), p, self.weight)
        if laws.sampler.processors:  # what they rule out stays out
            v = v.masked_fill_(laws.scores.flatten(0, 1).index_select(0, place) == -torch.inf, 0)
            v /= v.sum(-1, keepdim=True)
        return v
