"""Ensemble: drafts are judged by a mixture of the target's distribution and the draft's.

p: target probabilities, q: draft probabilities. Shapes: B batch rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specheads.decoding.acceptance.exact import Exact
from specheads.decoding.acceptance.rule import Acceptance, TargetProbs, Verdict
from specheads.decoding.probs.sampler import Sampler


@dataclass(frozen=True)
class Ensemble(Acceptance):
    """`Exact` with v = weight · p + (1 − weight) · q instead of p at nodes that have children, and p at leaves.

    weight in (0, 1]; lossless at 1 only. At temperature 0 the argmax of v is accepted or emitted. q is the draft's own
    distribution under the logits processors. The rule of transformers' assistant_ensemble_weight, for trees, batches
    and heads too. DIVERSE, arXiv:2604.07622.
    """

    on_device: ClassVar[bool] = True

    name = "ensemble"
    threshold_field = "weight"

    weight: float

    def __post_init__(self) -> None:
        self.require_numbers("weight")
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

    def judge(self, target: TargetProbs) -> Verdict:
        mixed = TargetProbs(target.tree, target.logits, target.sampler, numbers=target.numbers)
        mixed.scores = mixed.soft = self.mixture(target)
        return Exact().judge(mixed)

    def mixture(self, target: TargetProbs) -> Tensor:
        """(B, N, V) v at nodes that have children, p at the others; not yet one-hot at temperature 0."""
        draft, topology = target.tree.logits, target.tree.topology
        if draft is None:
            raise ValueError(
                "Ensemble mixes the draft's probabilities with the target's, and this tree was drafted without any"
            )
        p = target.scores.softmax(-1)
        node = target.flat_index(torch.arange(target.tree.num_nodes, device=p.device).expand(len(p), -1)).flatten()
        q = target.sampler.draft_probs(draft.over_target(draft.at(node))).view_as(p)
        v = q.to(p.dtype).lerp_(p, self.weight)
        if target.sampler.processors:  # tokens they rule out stay ruled out
            v.masked_fill_(target.scores == -torch.inf, 0)
            v /= v.sum(-1, keepdim=True)
        return torch.where(topology.children.any(2, keepdim=True), v, p)
