"""HeadReview: the plan with which a head at the front of a cascade reviews the drafts of smaller ones.

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
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree


@dataclass(frozen=True)
class HeadReview:
    """Grows one chain of `depth` tokens in `state`. At each level the head accepts the token drafted there if it is the
    head's likeliest, or by `leniency`; else the head's likeliest replaces it, and write(1, rows) drafts again after it.
    At leniency 1 nothing is written: the result would be the head's own chain anyway.

    drafting_slots: slots of the head's cache, into which an accepted draft is fed whole. rows: the batch rows that
    draft.
    """

    depth: int
    drafting_slots: int
    leniency: float
    state: CascadeState
    rows: list[int]
    write: Callable[[int, list[int]], None]

    @property
    def num_nodes(self) -> int:
        return self.depth + 1

    def limited(self, depth: int) -> HeadReview:
        return replace(self, depth=min(depth, self.depth))

    def grow(self, root: Tensor, expand: Expand, sampler: Sampler, vocab_size: int) -> DraftTree:
        """Leaves the drafts in `state`; the returned tree is the root alone."""
        state, undrafted = self.state, self.rows
        tokens, above = root.unsqueeze(1), None
        for level in range(self.depth):
            if undrafted and self.leniency > 1:
                self.write(1, undrafted)
            children = expand(tokens, above)
            best, ids = children.top(1)
            likeliest, q_likeliest = ids[:, 0, 0].tolist(), best[:, 0, 0].exp().tolist()
            written = [row[start + level : start + level + 1] for row, start in zip(state.ids, state.text, strict=True)]
            p = [0.0] * len(written)  # the reviewer's, here the head's
            if self.leniency > 1:
                written_ids = torch.tensor([row or [0] for row in written], device=root.device)
                p = children.probs_of(written_ids)[:, 0].tolist()
            undrafted = []
            for b in self.rows:
                if not written[b] or not accepted_in_review(
                    likeliest[b] == written[b][0], p[b], state.q[b][level], self.leniency
                ):
                    state.cut(b, state.text[b] + level)
                    state.add(b, likeliest[b : b + 1], q_likeliest[b : b + 1])
                    undrafted.append(b)
            drafted = [row[start + level : start + level + 1] for row, start in zip(state.ids, state.text, strict=True)]
            tokens = torch.tensor([row or [0] for row in drafted], device=root.device)
            above = torch.zeros_like(tokens)
        return DraftTree.root_only(root)
