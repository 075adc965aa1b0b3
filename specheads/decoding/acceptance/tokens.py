"""Rules that judge each drafted token by itself: Typical, TopN, Margin, CSLeniency. None is lossless.

All keep the longest path of tokens that stand, the likeliest under the target among equally long ones, and draw the
token behind it from p. They judge by the law under all logits processors before temperature 0 makes a one-hot of it,
so at temperature 0 they let pass what is nearly as likely, and emit the argmax where they let nothing pass. A token
that a processor rules out never stands. Shapes: B batch rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from specheads.decoding.acceptance.marks import kept_path, path_to, standing
from specheads.decoding.acceptance.rule import Acceptance, TargetProbs, Verdict


class TokenRule(Acceptance):
    """The longest path of tokens that stand."""

    lossless: ClassVar[bool] = False

    @abstractmethod
    def stands(self, laws: TargetProbs, chance: Tensor) -> Tensor:
        """(B, N) does each node's token stand? chance (B, N): its probability in `laws.soft` at its parent."""

    def judge(self, laws: TargetProbs) -> Verdict:
        tree, topology = laws.tree, laws.tree.topology
        chance = laws.of_tokens(laws.soft)
        kept = self.stands(laws, chance) & (chance > 0) & topology.drafted
        if tree.is_chain:
            path, length, end = kept_path(tree, kept)
            return Verdict(path, length, laws.draw_at(end))
        depth = torch.where(standing(tree, kept), topology.depth, -1)
        deepest = depth == depth.max(1, keepdim=True).values
        likelihood = (topology.ancestors * torch.where(kept, chance.log(), 0).unsqueeze(1)).sum(-1)
        end = torch.where(deepest, likelihood, -torch.inf).argmax(1)
        return Verdict(*path_to(tree, end), laws.draw_at(end))


def num_likelier(laws: TargetProbs, chance: Tensor) -> Tensor:
    """(B, N) how many tokens are likelier than each node's own, whose probability is chance (B, N), at its parent.

    Counted as numbers, at a sixth of what topk takes on a CPU, and sums of booleans at a quarter of that."""
    soft = laws.soft.flatten(0, 1).index_select(0, laws.place(laws.tree.topology.parent_index).flatten())
    return (soft > chance.view(-1, 1)).to(soft.dtype).sum(-1).view_as(chance)


@dataclass(frozen=True)
class Typical(TokenRule):
    """x stands where p(x) > min(epsilon, delta · exp(−H(p))), H in nats. Not lossless. Medusa, arXiv:2401.10774."""

    name = "typical"
    threshold_field = "epsilon"

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < 1:
            raise ValueError(f"epsilon={self.epsilon} must be a probability above 0 and below 1")
        if not self.delta > 0:
            raise ValueError(f"delta={self.delta} must be above 0")

    def stands(self, laws: TargetProbs, chance: Tensor) -> Tensor:
        # H = log Σ exp(s) − Σ p s, at a fraction of what p log p takes on a CPU.
        whole = laws.scores.amax(-1) - laws.soft.amax(-1).log()
        entropy = whole - (laws.soft * laws.scores).nansum(-1)
        floor = (self.delta * (-entropy).exp()).clamp(max=self.epsilon)
        return chance > laws.at_parent(floor)


@dataclass(frozen=True)
class TopN(TokenRule):
    """x stands among the n likeliest where p(x) is at most `margin` below the largest p. Not lossless.

    The relaxed acceptance of TensorRT-LLM, whose values for thinking phases are the defaults; no paper.
    """

    name = "topn"
    threshold_field = "margin"

    n: int = 10
    margin: float = 0.6

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"n={self.n} must be at least 1 token")
        if not 0 <= self.margin <= 1:
            raise ValueError(f"margin={self.margin} must be a difference of probabilities, 0 to 1")

    def stands(self, laws: TargetProbs, chance: Tensor) -> Tensor:
        near = chance >= laws.at_parent(laws.soft.amax(-1)) - self.margin
        return near & (num_likelier(laws, chance) < self.n)


@dataclass(frozen=True)
class Margin(TokenRule):
    """The likeliest token stands, and the second where it is more than `ratio` times as likely. Not lossless.

    After MARS, arXiv:2601.15498, which compares logits; a ratio of probabilities does not change when all logits shift.
    """

    name = "margin"
    threshold_field = "ratio"

    ratio: float

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"ratio={self.ratio} must be a ratio of probabilities p₂/p₁, 0 to 1 (1: only the first)")

    def stands(self, laws: TargetProbs, chance: Tensor) -> Tensor:
        likelier = num_likelier(laws, chance)
        return (likelier == 0) | ((likelier == 1) & (chance > self.ratio * laws.at_parent(laws.soft.amax(-1))))


@dataclass(frozen=True)
class CSLeniency(TokenRule):
    """The likeliest token stands, and where leniency > 1 also x with p(x) > q(x) / leniency. Not lossless.

    For reviews of one draft by another, where at leniency 1 and temperature 0 the review is greedy. q is the law x was
    drawn from, else the draft's own there; 1 for a drafter that gives none, such as n-grams. Cascade Speculative
    Drafting, arXiv:2312.11462.
    """

    name = "cs_leniency"
    threshold_field = "leniency"

    leniency: float

    def __post_init__(self) -> None:
        if not self.leniency >= 1:
            raise ValueError(f"leniency={self.leniency} must be 1 (only the likeliest token stands) or more")

    @property
    def uses_draft_probs(self) -> bool:
        return self.leniency > 1

    def stands(self, laws: TargetProbs, chance: Tensor) -> Tensor:
        likeliest = chance >= laws.at_parent(laws.soft.amax(-1))
        q = self._draft_chance(laws) if self.leniency > 1 else 1.0
        return stands_in_review(likeliest, chance, q, self.leniency)

    @staticmethod
    def _draft_chance(laws: TargetProbs) -> Tensor | float:
        """(B, N) q of each node's token."""
        tree, kept = laws.tree, laws.tree.logits
        if tree.probs is not None:
            return tree.drawn_probs()
        if kept is None:
            return 1.0
        place = laws.at_parent(kept.place)
        if laws.sampler.processors:  # which know tokens by their target ids
            every = kept.over_target(kept.logits)
            return laws.of_tokens(laws.sampler.draft_probs(every.flatten(0, 1)).view_as(every), place)
        return kept.chance(place, tree.tokens)


def stands_in_review(likeliest: Any, chance: Any, q: Any, leniency: float) -> Any:
    """CS Drafting's review of x, of numbers or of tensors alike: is it the reviewer's likeliest token, or, where
    leniency > 1, is its chance above q(x) / leniency?"""
    return likeliest if leniency == 1 else likeliest | (chance > q / leniency)
