"""A plan whose trees keep the draft logits of their nodes, for rules that compare draft and target.

Shapes: B batch rows, N nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specheads.decoding.planner.plan import ChildLogits, Expand, WrappedPlan
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree
from specheads.decoding.tree.draft_logits import DraftLogits


@dataclass(frozen=True)
class RecordDraftLogits(WrappedPlan):
    """`plan`, with the logits of the drafter's `expand` recorded in its trees."""

    def grow(self, root: Tensor, expand: Expand, sampler: Sampler, vocab_size: int) -> DraftTree:
        levels: list[tuple[Tensor, Tensor | None, ChildLogits]] = []

        def record(tokens: Tensor, parents: Tensor | None) -> ChildLogits:
            levels.append((tokens, parents, expand(tokens, parents)))
            return levels[-1][2]

        tree = self.plan.grow(root, record, sampler, vocab_size)
        if not levels:
            return tree
        topology = tree.topology
        # A node of the tree is the expanded node with the same token and the same parent.
        expanded = torch.where(topology.drafted, -1, 0)  # (B, N) each node's index among the expanded ones of its depth
        logit_index = torch.zeros_like(expanded)
        start = levels[0][2].logits.shape[1]
        for depth, (tokens, parents, children) in enumerate(levels[1:], start=1):
            assert parents is not None
            above = torch.where(topology.depth == depth, expanded.gather(1, topology.parent_index), -1)
            same = (tree.tokens.unsqueeze(2) == tokens.unsqueeze(1)) & (above.unsqueeze(2) == parents.unsqueeze(1))
            found, index = same.max(2)
            expanded = torch.where(found, index, expanded)
            num_logits = children.logits.shape[1]  # 1 where the level shares one distribution
            logit_index = torch.where(found, start + index.clamp(max=num_logits - 1), logit_index)
            start += num_logits
        logits = torch.cat([children.logits for _, _, children in levels], 1)
        return replace(tree, logits=DraftLogits(logits, logit_index, levels[0][2].ids, vocab_size))
