"""Fuzzy: drafts are accepted where the draft's distribution is close to the target's.

p: target probabilities, q: draft probabilities. Shapes: B batch rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from specheads.decoding.acceptance.divergences import NAMES, add_to_probs, divergence
from specheads.decoding.acceptance.exact import Exact, accept_probs
from specheads.decoding.acceptance.rule import LevelRule, TargetProbs
from specheads.decoding.probs.precision import at_least_float32
from specheads.decoding.probs.sampler import Sampler
from specheads.options import refuse_unknown, require_whole, shown

MODES = ("divergence", "rescue")
WARPERS = {
    "temperature": hf.TemperatureLogitsWarper, "top_k": hf.TopKLogitsWarper, "top_p": hf.TopPLogitsWarper,
}  # fmt: skip


@dataclass(frozen=True)
class Fuzzy(LevelRule):
    """Accepts the first child where D(q, p) is within `threshold`, whatever its token. FSD, arXiv:2502.20704.

    mode "divergence": accept where D ≤ threshold; elsewhere `Exact` decides, so that a token is drawn from p as in the
    paper (whose code then ends the step even if a child has that token). Not lossless.
    mode "rescue": `Exact` decides; where it accepts no child, accept if D < threshold. Lossless at threshold 0 only.
    divergence: "kl" is the reverse KL(q‖p), "kl_reversed" the forward KL(p‖q), "js" the true Jensen–Shannon (at most
    log 2), "tv" total variation, "js_paper" the paper's code's version of JS, ½KL(m‖p) + ½KL(m‖q), unbounded;
    "top_k_…" (kl, js, js_paper, tv) over the target's k likeliest tokens and one outcome for all others; "top_p_…" (the
    same) over its nucleus, renormalised; "random": a uniform number instead of D.
    processed: compare the distributions under the logits processors (the draft's without those that depend on the
    prefix); else the raw ones, at temperature 1. warpers: compare them under only these of the call's processors, as in
    "temperature+top_p" (and "top_k"); raw if it has none of them. epsilon: added to each processed probability before
    the comparison, so that a token that was ruled out does not make the divergence infinite.

    The first child in draft order is the draft's likeliest, or the first drawn; one that a logits processor rules out
    for the target is skipped. Needs draft probabilities, which heads and draft models give, except for "random".
    """

    name = "fuzzy"
    positional = ("divergence", "threshold", "mode")
    threshold_field = "threshold"

    threshold: float
    divergence: str = "js"
    mode: str = "divergence"
    k: int = 50
    top_p: float = 0.9
    processed: bool = False
    warpers: str = ""
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        refuse_unknown([self.divergence], [*NAMES, "random"], "divergence")
        refuse_unknown([self.mode], MODES, "mode of Fuzzy")
        self.require_numbers("threshold", "top_p", "epsilon")
        require_whole("k", self.k)
        if not self.threshold >= 0:
            raise ValueError(f"threshold={self.threshold} must be a divergence of 0 or more")
        if self.k < 1:
            raise ValueError(f"k={self.k} must be at least 1 token")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")
        if not isinstance(self.warpers, str):
            raise TypeError(f"warpers={shown(self.warpers)} must be names in one text, as in 'temperature+top_p'")
        refuse_unknown(self._warper_names, WARPERS, "warper of Fuzzy")
        if self.processed and self.warpers:
            raise ValueError(f"processed=True is under all processors, warpers={self.warpers!r} under some; give one")
        if not 0 <= self.epsilon < 1:
            raise ValueError(f"epsilon={self.epsilon} must be a probability to add, 0 or more and below 1")

    @property
    def _warper_names(self) -> list[str]:
        return self.warpers.split("+") if self.warpers else []

    @property
    def lossless(self) -> bool:
        return self.mode == "rescue" and self.threshold == 0

    @property
    def requires_draft_probs(self) -> bool:
        return self.divergence != "random" and not self.lossless

    @property
    def on_device(self) -> bool:
        return self.divergence != "random"  # "random" draws unseeded numbers where nothing is sampled

    @property
    def tensor_options(self) -> tuple[str, ...]:
        return ("threshold",) if self.mode == "divergence" else ()  # rescue is lossless at 0

    def is_exact(self, sampler: Sampler) -> bool:
        return self.lossless

    def accept_mask(self, target: TargetProbs) -> Tensor:
        tree, sampler = target.tree, target.sampler
        exact = sampler.bernoulli(accept_probs(target, target.p)) if sampler.do_sample else target.is_target_argmax()
        near = target.first_allowed & self.near(target.at_parent(self.distance(target)))
        if self.mode == "divergence":
            return exact | near
        parent = tree.topology.parent_index  # rescue: only where Exact accepts no child
        num_accepted = torch.zeros_like(parent).scatter_add_(1, parent, (exact & tree.topology.drafted).long())
        return exact | (near & target.at_parent(num_accepted == 0))

    def divergences(self, target: TargetProbs) -> Tensor:
        distance = self.distance(target)  # siblings share their parent's
        if self.processed and target.sampler.needs_prefix:  # undefined after a token that is ruled out
            distance = distance.masked_fill((target.scores == 0).all(-1), torch.nan)
        return target.at_parent(distance).masked_fill(~target.tree.topology.drafted, torch.nan)

    def bonus_weights(self, target: TargetProbs, node: Tensor) -> Tensor:
        return Exact().bonus_weights(target, node)

    def near(self, distance: Tensor) -> Tensor:
        """Is each distance within `threshold`?"""
        return distance < self.threshold if self.mode == "rescue" else distance <= self.threshold

    def distance(self, target: TargetProbs) -> Tensor:
        """(B, N) D(q, p) at each node, measured once; meaningless at leaves, after which nothing was drafted."""
        if target.distance is None:
            target.distance = self._measure(target)
        return target.distance

    def _measure(self, target: TargetProbs) -> Tensor:
        tree, sampler, draft = target.tree, target.sampler, target.tree.logits
        if self.divergence == "random":
            return sampler.uniforms(tree.tokens.shape, target.logits.device)
        if draft is None:
            raise ValueError(
                "Fuzzy compares the draft's probabilities with the target's, and this tree was drafted without any"
            )
        warpers = {WARPERS[name] for name in self._warper_names} & {type(one) for one in sampler.processors}
        node = torch.arange(tree.num_nodes, device=target.logits.device).expand_as(tree.tokens)
        p = (target.scores if self.processed else target.logits).flatten(0, 1)  # (B · N, V) logits of p, then of q
        q, ids = draft.at(target.flat_index(node).flatten()), None
        if self.processed or warpers:  # processors know tokens by their target ids
            kinds = None if self.processed else tuple(warpers)
            q_probs = sampler.draft_probs(draft.over_target(q), kinds)
            if not self.processed:
                p = sampler.draft_probs(p, kinds).log()
            if self.epsilon:
                q_probs, p = add_to_probs(q_probs, self.epsilon), add_to_probs(p.softmax(-1), self.epsilon).log()
            q = q_probs.log()
        else:
            p, q, ids = at_least_float32(p), at_least_float32(q), draft.ids
        return divergence(self.divergence, q, p, k=self.k, top_p=self.top_p, ids=ids).view_as(tree.tokens)
