"""Lenient: the exact rule's coins, weighted towards acceptance."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specheads.decoding.acceptance.exact import kept_in_order, residual_after_children
from specheads.decoding.acceptance.rule import LevelRule, TargetProbs
from specheads.decoding.sampler import Sampler


@dataclass(frozen=True)
class Lenient(LevelRule):
    """Keep x with probability min(1, p(x) / (leniency · q(x))). Lossless at leniency 1 and at temperature 0 alone.

    leniency in (0, 1]: no token is emitted more than 1/leniency times as often as the target would. q is the law x was
    drawn from, which is one-hot for a token chosen without a coin, so that 1 is exact whatever the draft. Siblings are
    judged in draft order; a refusal is followed as in `Exact`. Leviathan et al., arXiv:2211.17192.
    """

    name = "lenient"
    threshold_field = "leniency"

    leniency: float

    def __post_init__(self) -> None:
        if not 0 < self.leniency <= 1:
            raise ValueError(f"leniency={self.leniency} must be above 0 and at most 1 (1 is exact)")

    @property
    def lossless(self) -> bool:
        return self.leniency == 1

    def is_exact(self, sampler: Sampler) -> bool:
        return self.lossless or not sampler.do_sample

    def kept(self, laws: TargetProbs) -> Tensor:
        return kept_in_order(laws, laws.p, self.leniency)

    def rest(self, laws: TargetProbs, node: Tensor) -> Tensor:
        return residual_after_children(laws.p_at(node), laws, node)
