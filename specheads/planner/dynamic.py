"""EAGLE-2's dynamic tree: its shape follows the draft's confidence. Shapes: B batch rows, k beams."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specheads.planner.plan import Expand, positive
from specheads.sampling import Sampler
from specheads.tree import DraftTree


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2: at each depth the top_k likeliest paths each get top_k children; the budget − 1 best nodes stay.

    budget: nodes, root included; depth: levels drafted at most; top_k: beams, and children a beam. EAGLE-2,
    arXiv:2406.16858.
    """

    budget: int = 60
    depth: int = 7
    top_k: int = 10

    def __post_init__(self) -> None:
        for name in ("depth", "top_k"):
            positive(name, getattr(self, name))
        most = 1 + self.top_k + (self.depth - 1) * self.top_k**2
        if not 2 <= self.budget <= most:
            raise ValueError(
                f"budget={self.budget} must be 2 to {most} nodes for depth={self.depth} and top_k={self.top_k}"
            )

    @property
    def num_nodes(self) -> int:
        return self.budget

    @property
    def drafting_slots(self) -> int:
        return (self.depth - 1) * self.top_k

    def grow(self, root: Tensor, expand: Expand, sampler: Sampler, vocab_size: int) -> DraftTree:
        batch, k = root.shape[0], self.top_k
        logp, ids = expand(root.unsqueeze(1), None).top(k)
        k = logp.shape[-1]  # fewer where the draft vocabulary is smaller
        beams, score = ids[:, 0], logp[:, 0]  # (B, k)
        # Candidate c of the lists below is node c + 1 of the full tree; the root is node 0.
        tokens, scores, parents = [beams], [score], [torch.zeros_like(beams)]
        place = torch.arange(1, k + 1, device=root.device).expand(batch, k)
        above = torch.zeros_like(beams)  # each beam's index in the level before
        made = k
        for _ in range(1, self.depth):
            logp, ids = expand(beams, above).top(k)
            reached = (score.unsqueeze(2) + logp).flatten(1)  # (B, k · k)
            tokens.append(ids.flatten(1))
            scores.append(reached)
            parents.append(place.repeat_interleave(k, 1))
            score, best = reached.topk(k, dim=1)
            beams, above, place = ids.flatten(1).gather(1, best), best // k, made + 1 + best
            made += k * k
        every, kept = torch.cat(scores, 1), self.budget - 1
        # Where a probability rounds to 1 a child ties with its parent. The stable sort keeps the earlier, the parent.
        chosen = every.sort(dim=1, descending=True, stable=True).indices[:, :kept].sort(dim=1).values
        tokens_kept = torch.cat(tokens, 1).gather(1, chosen)
        full_parents = torch.cat(parents, 1).gather(1, chosen)
        renumber = torch.zeros(batch, made + 1, dtype=torch.long, device=root.device)
        renumber.scatter_(1, chosen + 1, torch.arange(1, chosen.shape[1] + 1, device=root.device).expand_as(chosen))
        return DraftTree(
            torch.cat([root.unsqueeze(1), tokens_kept], 1),
            torch.cat([torch.full_like(root, -1).unsqueeze(1), renumber.gather(1, full_parents)], 1),
            self.depth,
        )
