"""Ensemble: drafts are judged by a mixture of the target's law and the draft's.

p is the target's law, q the draft's. Shapes: B batch rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specheads.decoding.acceptance.exact import Exact
from specheads.decoding.acceptance.rule import Acceptance, TargetProbs, Verdict
from specheads.decoding.sampler import Sampler


@dataclass(frozen=True)
class Ensemble(Acceptance):
    """`Exact` towards v = weight · p + (1 − weight) · q wherever something is drafted, and towards p behind it.

    weight in (0, 1]; lossless at 1 alone. At temperature 0 the argmax of v stands or is emitted. q is the draft's own
    law under the logits processors. The rule of transformers' assistant_ensemble_weight, here for trees, batches and
    heads too. DIVERSE, arXiv:2604.07622.
    """

    name = "ensemble"
    threshold_field = "weight"

    weight: float

    def __post_init__(self) -> None:
        if not 0 < self.weight <= 1:
            raise ValueError(f"weight={self.weight} must be above 0 and at most 1 (1 is exact)")

    @property
    def lossless(self) -> bool:
        return self.weight == 1

    @property
    def requires_draft_probs(self) -> bool:
        return not self.lossless

    def is_exact(self, sampler: Sampler) -> bool:
        return self.lossless

    def judge(self, laws: TargetProbs) -> Verdict:
        mixed = TargetProbs(laws.tree, laws.logits, laws.sampler, numbers=laws.numbers)
        mixed.scores = mixed.soft = self.mixture(laws)
        return Exact().judge(mixed)

    def mixture(self, laws: TargetProbs) -> Tensor:
        """(B, N, V) v at nodes that have children, p at the others; before temperature 0."""
        kept, topology = laws.tree.logits, laws.tree.topology
        if kept is None:
            raise ValueError("Ensemble mixes the draft's law with the target's, and this tree was drafted without one")
        p = laws.scores.softmax(-1)
        node = laws.place(torch.arange(laws.tree.num_nodes, device=p.device).expand(len(p), -1)).flatten()
        q = laws.sampler.draft_probs(kept.over_target(kept.at(node))).view_as(p)
        v = q.to(p.dtype).lerp_(p, self.weight)
        if laws.sampler.processors:  # what they rule out stays out
            v.masked_fill_(laws.scores == -torch.inf, 0)
            v /= v.sum(-1, keepdim=True)
        return torch.where(topology.children.any(2, keepdim=True), v, p)
