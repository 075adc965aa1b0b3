"""The draft's logits at the nodes of a tree, for rules that compare draft and target probabilities.

Shapes: B batch rows, N nodes, V vocabulary, Vd draft vocabulary, M distributions a row, R nodes of any rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DraftIds:
    """ids (Vd,): the target id of each draft token. index (V,): the reverse, −1 for tokens that cannot be drafted."""

    ids: Tensor
    index: Tensor

    @classmethod
    def of(cls, ids: Tensor, vocab_size: int) -> DraftIds:
        index = torch.full((vocab_size,), -1, device=ids.device)
        index[ids] = torch.arange(len(ids), device=ids.device)
        return cls(ids, index)


@dataclass(frozen=True, slots=True)
class DraftLogits:
    """The draft's raw logits of the token after each node that has children.

    logits (B, M, Vd). index (B, N): which of the M belongs to a node; meaningless at leaves. ids (Vd,): target ids,
    None if both vocabularies are the same. vocab_size: V.
    """

    logits: Tensor
    index: Tensor
    ids: Tensor | None
    vocab_size: int

    def padded(self, missing: int, num_logits: int) -> DraftLogits:
        """The logits for a tree with so many more unused slots, with at least num_logits distributions."""
        more = max(0, num_logits - self.logits.shape[1])
        logits = torch.cat([self.logits, self.logits[:, :1].expand(-1, more, -1)], 1)
        return replace(self, logits=logits, index=torch.nn.functional.pad(self.index, (0, missing)))

    def at(self, nodes: Tensor) -> Tensor:
        """nodes (R,), where node i of row b is b · N + i → their logits (R, Vd)."""
        batch, num = self.index.shape
        index = self.index.flatten().index_select(0, nodes)
        if batch > 1:
            index = index + nodes // num * self.logits.shape[1]
        return self.logits.flatten(0, 1).index_select(0, index)

    def chance(self, index: Tensor, tokens: Tensor) -> Tensor:
        """(B, N) the probability of tokens (B, N) in distributions `index` (B, N); 0 outside the draft vocabulary."""
        row = torch.arange(len(tokens), device=tokens.device).unsqueeze(1)
        q = self.logits.float().softmax(-1)
        if self.ids is None:
            return q[row, index, tokens]
        draft_tokens = DraftIds.of(self.ids, self.vocab_size).index[tokens]
        return q[row, index, draft_tokens.clamp_min(0)] * (draft_tokens >= 0)

    def over_target(self, logits: Tensor) -> Tensor:
        """Logits (…, Vd) → the same over the target's vocabulary (…, V), −inf outside the draft vocabulary."""
        if self.ids is None:
            return logits
        return logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf).index_copy_(-1, self.ids, logits)
