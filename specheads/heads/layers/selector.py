"""DFlash 2's path selector: the likeliest tokens of a slot, ordered by the token chosen before them.

Of the C likeliest tokens b of a slot by its own logits U, S(a, b) = U(b) + ⟨pred[a] ⊙ (P h), succ[b]⟩, where a is the
token before; no other token is drafted. Chains choose the best, or draw from softmax(S / temperature) over the C, one
slot after the other, as z-lab/dflash, SGLang 0.5.23 and vLLM 0.33 do. So S = U + W z with z = pred[a] ⊙ (P h) and
W = succ. The loss is that of U, plus the cross entropy of S over the C tokens after the text's own token before, where
the label takes the place of the least likely if it is not among them (speculators 0.9).

Shapes: … any leading dimensions, H hidden, r rank, V vocabulary, C candidates.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specheads.heads.layers.markov import Markov


class Selector(Markov):
    choosing = True

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__(hidden_size, rank)
        self.proj = nn.Linear(hidden_size, rank, bias=False)

    def forward(self, hidden: Tensor, before: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return before * self.proj(hidden), None


class Successors(nn.Linear):
    """W (V, r), of which only some tokens' rows are needed at a time."""

    def forward(self, z: Tensor, ids: Tensor | None = None) -> Tensor:
        """z (…, r) and ids (…, C) → (…, C)."""
        assert ids is not None
        # In the module's own forward, where ZeRO-3 has gathered its weight.
        return (F.embedding(ids, self.weight) * z.unsqueeze(-2)).sum(-1)


def select(successors: Successors, unary: Tensor, z: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """U (…, V) and z (…, r), which broadcast → S over all tokens (…, V), −inf outside the candidates; S of the
    candidates and their ids, both (…, C)."""
    best, ids = unary.topk(count, -1)
    ids = ids.expand(*z.shape[:-1], -1)
    scores = best + successors(z, ids)
    every = scores.new_full((*z.shape[:-1], unary.shape[-1]), -torch.inf)
    return every.scatter(-1, ids, scores), scores, ids


def selection_loss(scores: Tensor, ids: Tensor, label: Tensor, of_label: Tensor) -> Tensor:
    """Scores and ids of candidates (R, C), labels and their own S (R,) → cross entropy over the candidates (R,), in
    which a label that is missing takes the last place."""
    missing = (ids != label.unsqueeze(1)).all(1, keepdim=True)
    last = torch.where(missing, of_label.unsqueeze(1), scores[:, -1:])
    return torch.cat([scores[:, :-1], last], 1).logsumexp(1) - of_label
