"""Which blocks a parallel head is trained on: anchors drawn from the rows of a batch, and what their slots are asked.

The draft at depth j of a block anchored at token a is of token a + 1 + j, whichever slot speaks of it. Shapes: B batch
rows, T positions, A anchors of a row, D tokens that a block drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specheads.heads import draws
from specheads.losses.targets import DraftTargets


@dataclass(frozen=True, slots=True)
class AnchoredBlocks:
    """anchors (B, A): their columns, in order; learnt (B, A, D): is the token at depth j asked for? An anchor
    that only fills the row up has none. weights (B, A): how many blocks each stands for."""

    anchors: Tensor
    learnt: Tensor
    weights: Tensor

    @classmethod
    def of(
        cls, supervised: Tensor, documents: Tensor, size: int, most: int | None = None, keys: Tensor | None = None
    ) -> AnchoredBlocks:
        """Blocks that draft `size` tokens: every one that has something to learn, or of each row `most` of them drawn
        by keys (B, T), see TapBatch.keys, which then stand for all.

        supervised (by the token that is predicted) and documents (B, T). A block is asked up to the first token that is
        not supervised, or of another document. In front of an anchor stands a token of its document at least, whose
        features the block reads; whether the anchor itself is supervised is not asked, as with other heads' starts.
        """
        batch, length = supervised.shape
        follows = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] > 0)  # (B, T − 1) token t + 1 token t
        none = supervised.new_zeros(batch, 1, dtype=torch.bool)
        answered = torch.cat([supervised[:, 1:].bool() & follows, none.expand(-1, size)], 1)  # by the token before
        run = answered.unfold(1, size, 1).long().cumprod(2).bool()  # (B, T, D) by the anchor
        run = run & torch.cat([none, follows], 1).unsqueeze(2)
        able = run[:, :, 0]
        count = able.sum(1, keepdim=True)
        assert (most is None) == (keys is None), "what is left out is drawn"
        drawn = length if most is None else most
        order = (able.float() if keys is None else draws.uniform(keys)).masked_fill(~able, -1)
        anchors = order.topk(min(drawn, int(count.max())), 1).indices.sort(1).values
        weights = (count / count.clamp(1, drawn)).expand(-1, anchors.shape[1])
        return cls(anchors, run.gather(1, anchors.unsqueeze(2).expand(-1, -1, size)), weights)

    def asked(self, tokens: Tensor) -> DraftTargets:
        """The drafts that are asked, one by one: a single one of each position (S = 1). tokens (B, T)."""
        length, size = tokens.shape[1], self.learnt.shape[2]
        row, block, slot = self.learnt.nonzero(as_tuple=True)
        starts = row * length + self.anchors[row, block] - 1  # a draft starts where its root is the token behind
        positions = starts + 1 + slot
        return DraftTargets(
            positions, tokens.flatten()[positions + 1], starts.unsqueeze(1), slot.unsqueeze(1),
            self.weights[row, block].unsqueeze(1), tokens.numel(), size,
        )  # fmt: skip
