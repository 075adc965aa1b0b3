"""Ensemble: drafts are judged by a mixture of the target's law and the draft's.

p is the target's law, q the draft's. Shapes: B batch rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specheads.accept.exact import chances_towards, left_of
from specheads.accept.rule import Level, LevelRule
from specheads.sampling import Sampler


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

    def chances(self, level: Level, sampler: Sampler) -> Tensor:
        return chances_towards(self.law(level, sampler), level)

    def rest(self, level: Level, sampler: Sampler) -> Tensor:
        return left_of(self.law(level, sampler), level)

    def law(self, level: Level, sampler: Sampler) -> Tensor:
        """(R, V) what the token that follows each node is drawn from."""
        if self.lossless or level.tokens.shape[1] == 1:
            return level.p
        if level.draft is None:
            raise ValueError("Ensemble mixes the draft's law with the target's, and this tree was drafted without one")
        p = level.soft
        v = self.weight * p + (1 - self.weight) * sampler.draft_law(level.draft).to(p.dtype)
        v = torch.where(level.scores > -torch.inf, v, 0)  # what a processor rules out stays out
        v = v / v.sum(-1, keepdim=True)
        law = v if sampler.do_sample else torch.zeros_like(v).scatter_(-1, v.argmax(-1, keepdim=True), 1.0)
        return torch.where(level.is_child.any(1, keepdim=True), law, level.p)
