"""The exact rule with higher acceptance probabilities (Lenient), and without its residual (NoResidual)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from specheads.decoding.acceptance.exact import draw_accept_mask, residual_after_rejections
from specheads.decoding.acceptance.rule import LevelRule, TargetProbs
from specheads.decoding.probs.sampler import Sampler


@dataclass(frozen=True)
class Lenient(LevelRule):
    """Accept x with probability min(1, p(x) / (leniency · q(x))). Lossless at leniency 1 and at temperature 0 only.

    leniency in (0, 1]: no token is emitted more than 1/leniency times as often as by the target. q is the distribution
    x was drawn from, one-hot for a token that was not drawn, so that 1 is exact for every draft. Siblings are judged in
    draft order; after a rejection all is as in `Exact`. Leviathan et al., arXiv:2211.17192.
    """

    on_device: ClassVar[bool] = True

    name = "lenient"
    threshold_field = "leniency"

    leniency: float

    def __post_init__(self) -> None:
        self.require_numbers("leniency")
        if not 0 < self.leniency <= 1:
            raise ValueError(f"leniency={self.leniency} must be above 0 and at most 1 (1 is exact)")

    @property
    def lossless(self) -> bool:
        return self.leniency == 1

    def is_exact(self, sampler: Sampler) -> bool:
        return self.lossless or not sampler.do_sample

    def accept_mask(self, target: TargetProbs) -> Tensor:
        return draw_accept_mask(target, target.p, self.leniency)

    def bonus_weights(self, target: TargetProbs, node: Tensor) -> Tensor:
        return residual_after_rejections(target.p_at(node), target, node)


@dataclass(frozen=True)
class NoResidual(LevelRule):
    """Accept x with probability min(1, p(x)/q(x)); after a rejection draw from p. Lossless at temperature 0 only.

    Without the residual norm((p − q)₊), tokens that the draft favours are emitted too often: x with probability
    min(p, q) + (1 − Σ min(p, q)) p. The skip_sample_adjustment of https://github.com/romsto/Speculative-Decoding.
    """

    on_device: ClassVar[bool] = True

    name = "no_residual"
    lossless: ClassVar[bool] = False

    def is_exact(self, sampler: Sampler) -> bool:
        return not sampler.do_sample

    def accept_mask(self, target: TargetProbs) -> Tensor:
        return draw_accept_mask(target, target.p)

    def bonus_weights(self, target: TargetProbs, node: Tensor) -> Tensor:
        return target.p_at(node)
