"""Fuzzy: drafts stand where the draft's law is near the target's.

p is the target's law, q the draft's. Shapes: B batch rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from specheads.decoding.acceptance.divergences import NAMES, add_to_probs, divergence
from specheads.decoding.acceptance.exact import Exact, chances_in_order
from specheads.decoding.acceptance.rule import LevelRule, TargetProbs
from specheads.decoding.precision import at_least_float32
from specheads.decoding.sampler import Sampler
from specheads.options import refuse_unknown

MODES = ("divergence", "rescue")
WARPERS = {
    "temperature": hf.TemperatureLogitsWarper, "top_k": hf.TopKLogitsWarper, "top_p": hf.TopPLogitsWarper,
}  # fmt: skip


@dataclass(frozen=True)
class Fuzzy(LevelRule):
    """The first child stands where D(q, p) is within `threshold`, whichever token it is. FSD, arXiv:2502.20704.

    mode "divergence": D ≤ threshold alone decides, and elsewhere `Exact` does, so that a token is drawn from p there as
    in the paper, whose code ends the step with it even where a child carries it. Not lossless.
    mode "rescue": `Exact` decides, and D < threshold only where it keeps no child. Not lossless, but at threshold 0.
    divergence: "kl" is KL(q‖p), "kl_reversed" KL(p‖q), "js" the true Jensen-Shannon (at most log 2), "tv" total
    variation, "js_paper" what the paper's code has for JS, ½KL(m‖p) + ½KL(m‖q), unbounded; "top_k_…" (kl, js, js_paper,
    tv) over the target's k likeliest tokens and one for all the rest; "top_p_…" (the same) over its nucleus,
    renormalised; "random": a uniform number in D's place.
    processed: compare the laws under the logits processors; else the raw ones, at temperature 1. The draft's sees no
    processor that depends on the prefix. warpers: compare them under these of the call's processors alone, as in
    "temperature+top_p" (and "top_k"); raw where it has none of them. epsilon: added to each probability that processors
    have made before the two are compared, so that a token ruled out makes no divergence infinite.

    The first child in draft order is the draft's likeliest, or the first drawn; one that a logits processor rules out
    for the target is passed over. Needs the draft's law, which heads and draft models give ("random" does not).
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
        if not self.threshold >= 0:
            raise ValueError(f"threshold={self.threshold} must be a divergence of 0 or more")
        if self.k < 1:
            raise ValueError(f"k={self.k} must be at least 1 token")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")
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

    def is_exact(self, sampler: Sampler) -> bool:
        return self.lossless

    def kept(self, laws: TargetProbs) -> Tensor:
        tree, sampler = laws.tree, laws.sampler
        kept = sampler.bernoulli(chances_in_order(laws, laws.p)) if sampler.do_sample else laws.is_target_argmax()
        apart = laws.at_parent(self.distance(laws)) if laws.divergences is None else laws.divergences
        near = laws.first_allowed & self.near(apart)
        if self.mode == "divergence":
            return kept | near
        above = tree.topology.parent_index  # rescue: only where Exact keeps no child at all
        num_kept = torch.zeros_like(above).scatter_add_(1, above, (kept & tree.topology.drafted).long())
        return kept | (near & laws.at_parent(num_kept == 0))

    def divergences(self, laws: TargetProbs) -> Tensor:
        distance = self.distance(laws)  # siblings share their parent's
        if self.processed and laws.sampler.needs_prefix:  # below a token that processors rule out there is none
            distance = distance.masked_fill((laws.scores == 0).all(-1), torch.nan)
        return laws.at_parent(distance).masked_fill(~laws.tree.topology.drafted, torch.nan)

    def rest(self, laws: TargetProbs, node: Tensor) -> Tensor:
        return Exact().rest(laws, node)

    def near(self, distance: Tensor) -> Tensor:
        """Is each distance within `threshold`?"""
        return distance < self.threshold if self.mode == "rescue" else distance <= self.threshold

    def distance(self, laws: TargetProbs) -> Tensor:
        """(B, N) D(q, p) behind each node; of leaves, behind which nothing was drafted, it says nothing."""
        if self.divergence == "random":
            return laws.sampler.uniforms(laws.tree.tokens.shape, laws.logits.device)
        kept, ids = laws.tree.logits, None
        if kept is None:
            raise ValueError("Fuzzy compares the draft's law with the target's, and this tree was drafted without one")
        sampler = laws.sampler
        warpers = {WARPERS[name] for name in self._warper_names} & {type(one) for one in sampler.processors}
        target = laws.scores if self.processed else laws.logits
        node = laws.place(torch.arange(laws.tree.num_nodes, device=target.device).expand(len(target), -1)).flatten()
        target, draft = target.flatten(0, 1), kept.at(node)
        if self.processed or warpers:  # processors know tokens by their target ids
            kinds = None if self.processed else tuple(warpers)
            draft = sampler.draft_probs(kept.over_target(draft), kinds)
            if not self.processed:
                target = sampler.draft_probs(target, kinds).log()
            if self.epsilon:
                draft, target = add_to_probs(draft, self.epsilon), add_to_probs(target.softmax(-1), self.epsilon).log()
            draft = draft.log()
        else:
            target, draft, ids = at_least_float32(target), at_least_float32(draft), kept.ids
        apart = divergence(self.divergence, draft, target, k=self.k, top_p=self.top_p, ids=ids)
        return apart.view_as(laws.tree.tokens)
