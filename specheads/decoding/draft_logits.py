"""The draft's law at the nodes of a tree, for rules that compare it with the target's.

Shapes: B batch rows, N nodes, V vocabulary, Vd draft vocabulary, M laws a row, k nodes a level.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specheads.decoding.draft_ids import DraftIds


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
