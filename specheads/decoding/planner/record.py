"""A plan that keeps what the drafter said of each node of its trees, for rules that compare it with the target.

Shapes: B batch rows, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specheads.decoding.draft_logits import DraftLogits
from specheads.decoding.planner.plan import Expand, Plan, Scored
from specheads.decoding.sampler import Sampler
from specheads.decoding.tree import DraftTree


@dataclass(frozen=True)
class RecordDraftLogits:
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

    def limited(self, depth: int) -> RecordDraftLogits:
        return RecordDraftLogits(self.plan.limited(depth))

    def grow(self, root: Tensor, expand: Expand, sampler: Sampler, vocab_size: int) -> DraftTree:
        levels: list[tuple[Tensor, Tensor | None, Scored]] = []

        def noted(tokens: Tensor, parents: Tensor | None) -> Scored:
            levels.append((tokens, parents, expand(tokens, parents)))
            return levels[-1][2]

        tree = self.plan.grow(root, noted, sampler, vocab_size)
        if not levels:
            return tree
        topology = tree.topology
        # A tree's node is the expanded one of the same token behind the same expanded node.
        expanded = torch.where(topology.drafted, -1, 0)  # (B, N) each node's number among those expanded at its depth
        place = torch.zeros_like(expanded)
        start = levels[0][2].logits.shape[1]
        for depth, (tokens, parents, scored) in enumerate(levels[1:], start=1):
            assert parents is not None
            above = torch.where(topology.depth == depth, expanded.gather(1, topology.parent_index), -1)
            same = (tree.tokens.unsqueeze(2) == tokens.unsqueeze(1)) & (above.unsqueeze(2) == parents.unsqueeze(1))
            found, number = same.max(2)
            expanded = torch.where(found, number, expanded)
            laws = scored.logits.shape[1]  # 1 where the level shares one
            place = torch.where(found, start + number.clamp(max=laws - 1), place)
            start += laws
        logits = torch.cat([scored.logits for _, _, scored in levels], 1)
        return replace(tree, logits=DraftLogits(logits, place, levels[0][2].ids, vocab_size))
