"""The draft's law at the nodes of a tree, for rules that compare it with the target's.

Shapes: B batch rows, N nodes, V vocabulary, Vd draft vocabulary, M laws a row, k nodes a level.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specheads.decoding.planner import Expand, Plan, Scored
from specheads.decoding.sampler import Sampler
from specheads.decoding.tree import DraftTree
from specheads.losses.teacher_probs import DraftIds


@dataclass(frozen=True, slots=True)
class DraftLogits:
    """The draft's raw logits behind each node that has children.

    logits (B, M, Vd); place (B, N): which of the M is a node's, meaningless at leaves; ids (Vd,): target ids, None if
    the same; vocab_size: V.
    """

    logits: Tensor
    place: Tensor
    ids: Tensor | None
    vocab_size: int

    def at(self, place: Tensor) -> Tensor:
        """Nodes place (R,), counted over all rows, → (R, Vd)."""
        batch, num = self.place.shape
        law = self.place.flatten().index_select(0, place)
        if batch > 1:
            law = law + place // num * self.logits.shape[1]
        return self.logits.flatten(0, 1).index_select(0, law)

    def chance(self, place: Tensor, tokens: Tensor) -> Tensor:
        """(B, N) the probability of tokens (B, N) in the laws place (B, N); 0 outside a draft vocabulary."""
        row = torch.arange(len(tokens), device=tokens.device).unsqueeze(1)
        laws = self.logits.float().softmax(-1)
        if self.ids is None:
            return laws[row, place, tokens]
        own = DraftIds.of(self.ids, self.vocab_size).place[tokens]
        return laws[row, place, own.clamp_min(0)] * (own >= 0)

    def over_target(self, logits: Tensor) -> Tensor:
        """(…, Vd) → (…, V), −inf outside the draft vocabulary."""
        if self.ids is None:
            return logits
        return logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf).index_copy_(-1, self.ids, logits)


@dataclass(frozen=True)
class LawKept:
    """`plan`, whose trees then keep what the drafter's `expand` said of each of their nodes, whatever the plan is."""

    plan: Plan

    @property
    def num_nodes(self) -> int:
        return self.plan.num_nodes

    @property
    def depth(self) -> int:
        return self.plan.depth

    @property
    def drafting_slots(self) -> int:
        return self.plan.drafting_slots

    def limited(self, depth: int) -> LawKept:
        return LawKept(self.plan.limited(depth))

    def grow(self, root: Tensor, expand: Expand, sampler: Sampler, vocab_size: int) -> DraftTree:
        levels: list[tuple[Tensor, Tensor | None, Scored]] = []

        def noted(tokens: Tensor, parents: Tensor | None) -> Scored:
            levels.append((tokens, parents, expand(tokens, parents)))
            return levels[-1][2]

        tree = self.plan.grow(root, noted, sampler, vocab_size)
        if not levels:
            return tree
        shape = tree.shape
        # A tree's node is the expanded one of the same token behind the same expanded node.
        expanded = torch.where(shape.drafted, -1, 0)  # (B, N) each node's number among those expanded at its depth
        place = torch.zeros_like(expanded)
        start = levels[0][2].logits.shape[1]
        for depth, (tokens, parents, scored) in enumerate(levels[1:], start=1):
            assert parents is not None
            above = torch.where(shape.depth == depth, expanded.gather(1, shape.above), -1)
            same = (tree.tokens.unsqueeze(2) == tokens.unsqueeze(1)) & (above.unsqueeze(2) == parents.unsqueeze(1))
            found, number = same.max(2)
            expanded = torch.where(found, number, expanded)
            laws = scored.logits.shape[1]  # 1 where the level shares one
            place = torch.where(found, start + number.clamp(max=laws - 1), place)
            start += laws
        logits = torch.cat([scored.logits for _, _, scored in levels], 1)
        return replace(tree, logits=DraftLogits(logits, place, levels[0][2].ids, vocab_size))
