"""Fuzzy: drafts stand where the draft's law is near the target's.

p is the target's law, q the draft's. Shapes: B batch rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specheads import host
from specheads.accept.divergences import FORMS, NAMES, divergence
from specheads.accept.exact import Exact, chances_in_order, with_younger
from specheads.accept.marks import reached
from specheads.accept.rule import Acceptance, Laws, LevelRule
from specheads.losses import wide
from specheads.options import refuse_unknown
from specheads.sampling import Sampler

MODES = ("divergence", "rescue")


@dataclass(frozen=True)
class Fuzzy(LevelRule):
    """The first child stands where D(q, p) is within `threshold`, whichever token it is. FSD, arXiv:2502.20704.

    mode "divergence": D ≤ threshold alone decides, and elsewhere `Exact` does, so that a token is drawn from p there as
    in the paper, whose code ends the step with it even where a child carries it. Not lossless.
    mode "rescue": `Exact` decides, and D < threshold only where it keeps no child. Not lossless, but at threshold 0.
    divergence: "kl" is KL(q‖p), "kl_reversed" KL(p‖q), "js" the true Jensen-Shannon (at most log 2), "tv" total
    variation, "js_paper" what the paper's code has for JS; "top_k_…" (kl, js, tv) over the target's k likeliest tokens
    and one for all the rest; "top_p_…" over its nucleus, renormalised; "random": a uniform number in D's place.
    processed: compare the laws under the logits processors; else the raw ones, at temperature 1. The draft's sees no
    processor that depends on the prefix.

    The first child in draft order is the draft's likeliest, or the first drawn; one that a logits processor rules out
    for the target is passed over. Needs the draft's law, which heads and draft models give ("random" does not).
    """

    threshold: float
    divergence: str = "js"
    mode: str = "divergence"
    k: int = 50
    top_p: float = 0.9
    processed: bool = False

    def __post_init__(self) -> None:
        refuse_unknown([self.divergence], [*NAMES, "random"], "divergence")
        refuse_unknown([self.mode], MODES, "mode of Fuzzy")
        if not self.threshold >= 0:
            raise ValueError(f"threshold={self.threshold} must be a divergence of 0 or more")
        if self.k < 1:
            raise ValueError(f"k={self.k} must be at least 1 token")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")

    @property
    def lossless(self) -> bool:
        return self.mode == "rescue" and self.threshold == 0

    @property
    def needs_draft_law(self) -> bool:
        return self.divergence != "random" and not self.lossless

    def is_exact(self, sampler: Sampler) -> bool:
        return self.lossless

    def kept(self, laws: Laws) -> host.Marks:
        sampled = laws.sampler.do_sample
        kept = laws.sampler.coins(chances_in_order(laws, laws.p)) if sampled else host.marks(laws.carried())
        if not (sampled and laws.tree.siblings_drawn):
            return self.with_near(laws, kept, laws.first_allowed)
        if self.mode == "divergence":  # which decides before a younger sibling may
            return with_younger(self.with_near(laws, kept, laws.tree.shape.drafted), laws, laws.p)
        return self.with_near(laws, with_younger(kept, laws, laws.p, maybe=laws.first_allowed), laws.first_allowed)

    def with_near(self, laws: Laws, kept: host.Marks, maybe: Tensor) -> host.Marks:
        """kept (B, N) by `Exact`, with the first children that stand because the laws are near. maybe (B, N): where
        else than to a node that is kept a path may lead."""
        tree, first, above = laws.tree, laws.first_allowed, laws.tree.shape.above
        rescue = self.mode == "rescue"  # only where Exact keeps no child at all
        if isinstance(kept, Tensor):  # it would wait to be told where to look
            settled = kept
            if rescue:
                settled = torch.zeros_like(above).scatter_add_(1, above, (kept & tree.shape.drafted).long()) > 0
                settled = laws.at_parent(settled)
            near = self.near(self.distance(laws, laws.place(above).flatten())).view_as(kept)
            return kept | (first & ~settled & near)
        rows = zip(kept, maybe.tolist(), first.tolist(), tree.shape.parent_lists, strict=True)
        doubts = []
        for row, (marks, open_, firsts, parents) in enumerate(rows):
            leads, decided = reached(marks, open_, parents)
            for node, parent in enumerate(parents):
                if firsts[node] and leads[parent] and not (decided[parent] if rescue else marks[node]):
                    doubts.append((row, node, row * tree.num_nodes + parent))
        if not doubts:
            return kept
        distances = self.distance(laws, torch.tensor([place for _, _, place in doubts]))
        for (row, node, _), distance in zip(doubts, distances.tolist(), strict=True):
            kept[row][node] = self.near(distance)
        return kept

    def rest(self, laws: Laws, node: Tensor) -> Tensor:
        return Exact().rest(laws, node)

    def near(self, distance: Any) -> Any:
        """Is a distance, or each of a tensor's, within `threshold`?"""
        return distance < self.threshold if self.mode == "rescue" else distance <= self.threshold

    def distance(self, laws: Laws, place: Tensor) -> Tensor:
        """(R,) D(q, p) at nodes place (R,), counted over all rows."""
        if self.divergence == "random":
            return laws.sampler.uniform(place)
        kept, ids = laws.tree.logits, None
        if kept is None:
            raise ValueError("Fuzzy compares the draft's law with the target's, and this tree was drafted without one")
        # Where tokens are drawn the law at every node has been made, and without processors it is the raw one.
        known = laws.sampler.do_sample and (self.processed or not laws.sampler.processors)
        known = known and FORMS[self.divergence].takes_law(self.top_p)
        target = laws.soft if known else laws.scores if self.processed else laws.logits
        target, draft = target.flatten(0, 1).index_select(0, place), kept.at(place)
        if self.processed:  # processors know tokens by their target ids
            draft = laws.sampler.draft_law(kept.over_target(draft)).log()
        else:
            target, draft, ids = wide(target), wide(draft), kept.ids
        return divergence(self.divergence, draft, target, k=self.k, top_p=self.top_p, ids=ids, p_is_law=known)


def fuzzy_from(
    fsd_div_type: str | None = "js_div", fsd_div_threshold: float | None = None, **options: Any
) -> Acceptance:
    """The rule that the official FSD code's arguments ask for; a threshold of None, and type "sd", are `Exact`.

    "kl_div", "top_k_js_div" … are Fuzzy's divergences; "…_processed" compares processed laws. options are Fuzzy's own.
    """
    name = "sd" if fsd_div_type is None else fsd_div_type
    plain = name.removesuffix("_processed").replace("_div", "")
    refuse_unknown([plain], [*NAMES, "random", "sd"], "fsd_div_type")
    if plain == "sd" or fsd_div_threshold is None:
        return Exact()
    return Fuzzy(fsd_div_threshold, plain, **{"processed": name.endswith("_processed"), **options})
