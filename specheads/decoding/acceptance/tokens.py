"""Rules that judge each drafted token by itself: Typical, TopN, Margin, CSLeniency. None is lossless.

All accept the longest path of acceptable tokens, the likeliest under the target on ties, and draw the token after it
from p. They judge by p under all logits processors before temperature 0 makes it one-hot: at temperature 0 they accept
tokens that are nearly as likely as the argmax, and emit the argmax where nothing is accepted. A token that a processor
rules out is never accepted. Shapes: B batch rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from specheads.decoding.acceptance.rule import (
    Acceptance,
    TargetProbs,
    Verdict,
    accepted_path,
    accepted_to_root,
    path_to,
)
from specheads.options import require_whole


class TokenRule(Acceptance):
    """Accepts the longest path of tokens that pass `accepts`."""

    lossless: ClassVar[bool] = False

    @abstractmethod
    def accepts(self, target: TargetProbs, token_probs: Tensor) -> Tensor:
        """(B, N) bool: does each node's token pass? token_probs (B, N): its probability in `target.soft`."""

    def judge(self, target: TargetProbs) -> Verdict:
        tree, topology = target.tree, target.tree.topology
        token_probs = target.token_probs(target.soft)
        accept_mask = self.accepts(target, token_probs) & (token_probs > 0) & topology.drafted
        if tree.is_chain:
            path, length, end = accepted_path(tree, accept_mask)
            return Verdict(path, length, target.draw_at(end))
        depth = torch.where(accepted_to_root(tree, accept_mask), topology.depth, -1)
        deepest = depth == depth.max(1, keepdim=True).values
        likelihood = (topology.ancestors * torch.where(accept_mask, token_probs.log(), 0).unsqueeze(1)).sum(-1)
        end = torch.where(deepest, likelihood, -torch.inf).argmax(1)
        return Verdict(*path_to(tree, end), target.draw_at(end))


def num_likelier(target: TargetProbs, token_probs: Tensor) -> Tensor:
    """(B, N) how many tokens are likelier at each node's parent than its own, which has probability token_probs (B, N).

    Counted in floats, which on a CPU takes a sixth of the time of topk and a quarter of that of a sum of booleans."""
    soft = target.soft.flatten(0, 1).index_select(0, target.flat_index(target.tree.topology.parent_index).flatten())
    return (soft > token_probs.view(-1, 1)).to(soft.dtype).sum(-1).view_as(token_probs)


@dataclass(frozen=True)
class Typical(TokenRule):
    """Accepts x where p(x) > min(epsilon, delta · exp(−H(p))), H in nats. Not lossless. Medusa, arXiv:2401.10774."""

    on_device: ClassVar[bool] = True
    tensor_options: ClassVar[tuple[str, ...]] = ("epsilon", "delta")

    name = "typical"
    threshold_field = "epsilon"

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        self.require_numbers("epsilon", "delta")
        if not 0 < self.epsilon < 1:
            raise ValueError(f"epsilon={self.epsilon} must be a probability above 0 and below 1")
        if not self.delta > 0:
            raise ValueError(f"delta={self.delta} must be above 0")

    def accepts(self, target: TargetProbs, token_probs: Tensor) -> Tensor:
        # H = log Σ exp(s) − Σ p s, in a fraction of the time of p log p on a CPU.
        whole = target.scores.amax(-1) - target.soft.amax(-1).log()
        entropy = whole - (target.soft * target.scores).nansum(-1)
        floor = (self.delta * (-entropy).exp()).clamp(max=self.epsilon)
        return token_probs > target.at_parent(floor)


@dataclass(frozen=True)
class TopN(TokenRule):
    """Accepts x among the n likeliest if p(x) is at most `margin` below the largest p. Not lossless.

    The relaxed acceptance of TensorRT-LLM; the defaults are its values for thinking phases. No paper.
    """

    on_device: ClassVar[bool] = True
    tensor_options: ClassVar[tuple[str, ...]] = ("margin",)

    name = "topn"
    threshold_field = "margin"

    n: int = 10
    margin: float = 0.6

    def __post_init__(self) -> None:
        require_whole("n", self.n)
        self.require_numbers("margin")
        if self.n < 1:
            raise ValueError(f"n={self.n} must be at least 1 token")
        if not 0 <= self.margin <= 1:
            raise ValueError(f"margin={self.margin} must be a difference of probabilities, 0 to 1")

    def accepts(self, target: TargetProbs, token_probs: Tensor) -> Tensor:
        near = token_probs >= target.at_parent(target.soft.amax(-1)) - self.margin
        return near & (num_likelier(target, token_probs) < self.n)


@dataclass(frozen=True)
class Margin(TokenRule):
    """Accepts the likeliest token, and the second if it is more than `ratio` times as likely. Not lossless.

    After MARS, arXiv:2601.15498, which compares logits; a ratio of probabilities is invariant to a shift of all logits.
    """

    on_device: ClassVar[bool] = True
    tensor_options: ClassVar[tuple[str, ...]] = ("ratio",)

    name = "margin"
    threshold_field = "ratio"

    ratio: float

    def __post_init__(self) -> None:
        self.require_numbers("ratio")
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"ratio={self.ratio} must be a ratio of probabilities p₂/p₁, 0 to 1 (1: only the first)")

    def accepts(self, target: TargetProbs, token_probs: Tensor) -> Tensor:
        likelier = num_likelier(target, token_probs)
        return (likelier == 0) | ((likelier == 1) & (token_probs > self.ratio * target.at_parent(target.soft.amax(-1))))


@dataclass(frozen=True)
class CSLeniency(TokenRule):
    """Accepts the likeliest token, and where leniency > 1 also x with p(x) > q(x) / leniency. Not lossless.

    For reviews of one draft by another; at leniency 1 and temperature 0 the review is greedy. q is the distribution x
    was drawn from, or the draft's own at that node; q(x) is 1 for a drafter that gives none, such as n-grams. Cascade
    Speculative Drafting, arXiv:2312.11462.
    """

    on_device: ClassVar[bool] = True

    name = "cs_leniency"
    threshold_field = "leniency"

    leniency: float

    def __post_init__(self) -> None:
        self.require_numbers("leniency")
        if not self.leniency >= 1:
            raise ValueError(f"leniency={self.leniency} must be 1 (only the likeliest token is accepted) or more")

    @property
    def uses_draft_probs(self) -> bool:
        return self.leniency > 1

    def accepts(self, target: TargetProbs, token_probs: Tensor) -> Tensor:
        likeliest = token_probs >= target.at_parent(target.soft.amax(-1))
        q = self._draft_token_probs(target) if self.leniency > 1 else 1.0
        return accepted_in_review(likeliest, token_probs, q, self.leniency)

    @staticmethod
    def _draft_token_probs(target: TargetProbs) -> Tensor | float:
        """(B, N) q of each node's token."""
        tree, draft = target.tree, target.tree.logits
        if tree.probs is not None:
            return tree.drawn_probs()
        if draft is None:
            return 1.0
        index = target.at_parent(draft.index)
        if target.sampler.processors:  # they know tokens by their target ids
            logits = draft.over_target(draft.logits)
            return target.token_probs(target.sampler.draft_probs(logits.flatten(0, 1)).view_as(logits), index)
        return draft.chance(index, tree.tokens)


def accepted_in_review(likeliest: Any, p: Any, q: Any, leniency: float) -> Any:
    """CS Drafting's review of x, for numbers and tensors: is it the reviewer's likeliest token, or, where leniency > 1,
    is its probability p above q / leniency?"""
    return likeliest if leniency == 1 else likeliest | (p > q / leniency)
