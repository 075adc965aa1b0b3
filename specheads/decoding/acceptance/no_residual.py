"""NoResidual: the exact rule's coins, without the residual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from specheads.decoding.acceptance.exact import kept_in_order
from specheads.decoding.acceptance.rule import LevelRule, TargetProbs
from specheads.decoding.sampler import Sampler


@dataclass(frozen=True)
class NoResidual(LevelRule):
    """Keep x with probability min(1, p(x)/q(x)), and behind a refusal draw from p. Not lossless but at temperature 0.

    Without the residual norm((p − q)₊) what the draft likes comes twice: it is emitted with probability
    min(p, q) + (1 − Σ min(p, q)) p. The skip_sample_adjustment of https://github.com/romsto/Speculative-Decoding.
    """

    name = "no_residual"
    lossless: ClassVar[bool] = False

    def is_exact(self, sampler: Sampler) -> bool:
        return not sampler.do_sample

    def kept(self, laws: TargetProbs) -> Tensor:
        return kept_in_order(laws, laws.p)

    def rest(self, laws: TargetProbs, node: Tensor) -> Tensor:
        return laws.p_at(node)
