"""A chain as long as the draft is sure of itself. Shapes: B batch rows, V vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specheads.decoding.planner.plan import MAX_NODES, Expand, within
from specheads.decoding.sampler import Sampler
from specheads.decoding.tree import DraftTree


@dataclass(frozen=True)
class AdaptiveChain:
    """A chain that ends behind its first token of a probability in the draft's law below `confidence`, or at max_depth.
    A head with a confidence output is asked that in place of its law.

    sampled: draw the tokens from the draft's law, which they then carry; else take the likeliest. A token that ends
    the chain is part of it: left out, it would bias what is accepted in its place. A batch goes on until every row
    has met such a token. The rule of transformers' assistant_confidence_threshold.
    """

    max_depth: int = 20
    confidence: float = 0.4
    sampled: bool = False

    def __post_init__(self) -> None:
        within("max_depth", self.max_depth, MAX_NODES - 1)
        if not 0 <= self.confidence <= 1:
            raise ValueError(f"confidence={self.confidence} must be a probability, 0 (never stop early) to 1")

    @property
    def num_nodes(self) -> int:
        return self.max_depth + 1

    @property
    def depth(self) -> int:
        return self.max_depth

    @property
    def drafting_slots(self) -> int:
        return self.max_depth - 1

    def limited(self, depth: int) -> AdaptiveChain:
        return replace(self, max_depth=depth)

    def grow(self, root: Tensor, expand: Expand, sampler: Sampler, vocab_size: int) -> DraftTree:
        first, above = torch.zeros_like(root).unsqueeze(1), None  # every level has one node
        tokens, parents, laws = [root.unsqueeze(1)], [first - 1], []
        unsure = torch.zeros_like(root, dtype=torch.bool)
        while len(tokens) <= self.max_depth and not bool(unsure.all()):
            scored = expand(tokens[-1], above)
            if self.sampled:
                q = scored.probs(sampler, vocab_size)
                empty = q.sum(-1) <= 0  # no token is left to draw: -1 marks the unused slot
                token = sampler.draw(torch.where(empty.unsqueeze(-1), 1.0, q)[:, 0]).unsqueeze(1)
                chance = q.gather(2, token.unsqueeze(2))[:, 0, 0]
                laws.append(q)
                parents.append(torch.where(empty, -1, len(tokens) - 1))
            else:
                best, ids = scored.top(1)
                token, chance = ids[:, 0], best[:, 0, 0].exp()
                parents.append(first + len(tokens) - 1)
            if scored.confidence is not None:
                chance = scored.confidence()[:, 0]
            unsure = unsure | (chance < self.confidence)
            tokens.append(token)
            above = first
        probs = torch.cat([laws[0], *laws], 1) if laws else None  # the root's entry is never read
        return DraftTree(torch.cat(tokens, 1), torch.cat(parents, 1), len(tokens) - 1, probs)
