"""A chain that ends where the drafter is unsure. Shapes: B batch rows, V vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specheads.decoding.planner.plan import MAX_NODES, Expand, require_at_most
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree
from specheads.options import require_number


@dataclass(frozen=True)
class AdaptiveChain:
    """A chain that ends after its first token with a draft probability below `confidence`, or at max_depth. For a head
    with a confidence output, that output is used instead of the probability.

    sampled: draw the tokens from the draft distribution, which the tree then carries; else take the likeliest. The
    token that ends the chain is part of it: leaving it out would bias what is accepted in its place. A batch drafts
    until every row that has room for more has had such a token, but each row's chain ends at its own, so that no row
    changes another's text. The rule of transformers' assistant_confidence_threshold.
    """

    max_depth: int = 20
    confidence: float = 0.4
    sampled: bool = False

    def __post_init__(self) -> None:
        require_at_most("max_depth", self.max_depth, MAX_NODES - 1)
        require_number("confidence", self.confidence)
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
        tokens, parents, probs = [root.unsqueeze(1)], [first - 1], []
        unsure = torch.zeros_like(root, dtype=torch.bool)
        while len(tokens) <= self.max_depth and not bool(unsure.all()):
            children = expand(tokens[-1], above)
            if children.ended is not None and bool((unsure := unsure | children.ended).all()):
                break
            if self.sampled:
                q = children.probs(sampler, vocab_size)
                empty = q.sum(-1) <= 0  # no token is left to draw: -1 marks the unused slot
                token = sampler.draw(torch.where(empty.unsqueeze(-1), 1.0, q)[:, 0]).unsqueeze(1)
                q_token = q.gather(2, token.unsqueeze(2))[:, 0, 0]
                probs.append(q)
                unused = empty | unsure.unsqueeze(1)
            else:
                best, ids = children.top(1)
                token, q_token = ids[:, 0], best[:, 0, 0].exp()
                unused = unsure.unsqueeze(1)
            # A row's own chain ends where it was unsure; what is drafted there for longer rows is not part of it.
            parents.append(torch.where(unused, -1, len(tokens) - 1))
            confidence = q_token if children.confidence is None else children.confidence()[:, 0]
            unsure = unsure | (confidence < self.confidence)
            tokens.append(token)
            above = first
        all_probs = torch.cat([probs[0], *probs], 1) if probs else None  # the root's entry is never read
        return DraftTree(torch.cat(tokens, 1), torch.cat(parents, 1), len(tokens) - 1, all_probs)
