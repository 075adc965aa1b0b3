"""Domino's correction: a GRU reads the drafted tokens, and logits = U + W z with z = SiLU(A [h; s]).

s is the GRU's state after the embeddings of the anchor and of every token drafted since, h the slot's output. The first
drafts of a block, usually one, have no correction. Training compares U with the base too: the loss is
(1 − λ) loss(U + W z) + λ loss(U), where λ falls from 1 to 0 over the first half of a run. As in SpecForge, NeMo
Automodel and SGLang 0.5.23.

Shapes: … any leading dimensions, H hidden, r rank, S size of the state.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specheads.heads.layers.markov import Markov


class Domino(Markov):
    embeds, carries = False, True

    def __init__(self, hidden_size: int, rank: int, state_size: int, plain: int) -> None:
        super().__init__(hidden_size, rank)
        self.plain = plain
        self.gru = nn.GRUCell(hidden_size, state_size, bias=False)
        self.proj = nn.Linear(hidden_size + state_size, rank, bias=False)

    def forward(self, hidden: Tensor, before: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        rows = self.gru(before.flatten(0, -2), None if state is None else state.flatten(0, -2))
        state = rows.unflatten(0, before.shape[:-1])
        return F.silu(self.proj(torch.cat([hidden, state], -1))), state

    def along(self, hidden: Tensor, before: Tensor) -> Tensor:
        z = super().along(hidden, before)
        corrected = torch.arange(z.shape[-2], device=z.device) >= self.plain
        return z * corrected.unsqueeze(-1)


def base_share(progress: float) -> float:
    """λ of the loss, after that share of a run."""
    return max(0.0, 1 - 2 * progress)
