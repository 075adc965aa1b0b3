"""NoResidual: the exact rule's acceptance probabilities, without its residual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from specheads.decoding.acceptance.exact import draw_accept_mask
from specheads.decoding.acceptance.rule import LevelRule, TargetProbs
from specheads.decoding.probs.sampler import Sampler


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
