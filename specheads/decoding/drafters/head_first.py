"""HeadReview: what a head at the front of a cascade takes for a plan, so that it reviews what smaller drafts wrote.

Shapes: B batch rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specheads.decoding.acceptance.tokens import accepted_in_review
from specheads.decoding.drafters.cascade_state import CascadeState
from specheads.decoding.planner import Expand
from specheads.decoding.sampler import Sampler
from specheads.decoding.tree import DraftTree


@dataclass(frozen=True)
class HeadReview:
    """Grows one chain of `depth` tokens in `working`: at each level the token written there stays if the head finds it
    likeliest, or lets it pass by `leniency`; else the head puts its own, and write(1, rows) is asked again behind it.
    At leniency 1 nothing is asked: what stands would be the head's own chain in any case.

    drafting_slots: slots of its cache, into which an accepted draft is fed whole. rows: the batch rows that draft.
    """

    depth: int
    drafting_slots: int
    leniency: float
    working: CascadeState
    rows: list[int]
    write: Callable[[int, list[int]], None]

    @property
    def num_nodes(self) -> int:
        return self.depth + 1

    def limited(self, depth: int) -> HeadReview:
        return replace(self, depth=min(depth, self.depth))

    def grow(self, root: Tensor, expand: Expand, sampler: Sampler, vocab_size: int) -> DraftTree:
        """The drafts are left in `working`; the tree returned is the root."""
        working, asked = self.working, self.rows
        tokens, above = root.unsqueeze(1), None
        for level in range(self.depth):
            if asked and self.leniency > 1:
                self.write(1, asked)
            scored = expand(tokens, above)
            best, ids = scored.top(1)
            likeliest, q_likeliest = ids[:, 0, 0].tolist(), best[:, 0, 0].exp().tolist()
            written = [
                row[start + level : start + level + 1] for row, start in zip(working.ids, working.text, strict=True)
            ]
            chance = [0.0] * len(written)
            if self.leniency > 1:
                given = torch.tensor([row or [0] for row in written], device=root.device)
                chance = scored.chance(given)[:, 0].tolist()
            asked = []
            for b in self.rows:
                if not written[b] or not accepted_in_review(
                    likeliest[b] == written[b][0], chance[b], working.q[b][level], self.leniency
                ):
                    working.cut(b, working.text[b] + level)
                    working.add(b, likeliest[b : b + 1], q_likeliest[b : b + 1])
                    asked.append(b)
            drafted = [
                row[start + level : start + level + 1] for row, start in zip(working.ids, working.text, strict=True)
            ]
            tokens = torch.tensor([row or [0] for row in drafted], device=root.device)
            above = torch.zeros_like(tokens)
        return DraftTree.root_only(root)
