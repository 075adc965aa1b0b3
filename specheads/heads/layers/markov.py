"""What the tokens drafted before a slot change about its logits: a bias of low rank, logits = U + W z.

U is a slot's logits by itself, h its output, e the embedding of the token before it (r values). z is, by `markov_type`:
  vanilla   z = e                                       a first-order Markov chain: DSpark, arXiv:2607.05147
  gated     z = σ(A [h; e] + a) ⊙ e                     SpecForge and DeepSpec
  rnn       [g; c; o] = A [s; e; h] + a,  z = tanh(o),  s' = σ(g) ⊙ s + (1 − σ(g)) ⊙ tanh(c),  s = 0 at the anchor
and in files of their own: `domino.py`, `selector.py`. With W = 0, as at the start, none changes anything.

Shapes: … any leading dimensions, H hidden, r rank, E size of what is read of the token before, S size of the state.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Markov(nn.Module):
    """The vanilla form, and the interface of the others.

    embeds: whether the token before is read through a table (V, r) of the head's own; if not, through the base's
    embeddings. carries: whether a state passes along the path, so that z depends on every token drafted since the
    anchor. plain: drafts at the start of a block without the bias. choosing: the bias only orders the likeliest tokens.
    """

    embeds, carries, plain, choosing = True, False, 0, False

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()

    def forward(self, hidden: Tensor, before: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """h (…, H), the token before (…, E), the state before it (…, S), None at the anchor → z (…, r), the state."""
        return before, None

    def along(self, hidden: Tensor, before: Tensor) -> Tensor:
        """h (…, D, H) and the tokens before (…, D, E), for all D drafts of a block → z (…, D, r)."""
        if not self.carries:
            return self(hidden, before, None)[0]
        state, steps = None, []
        for h, e in zip(hidden.unbind(-2), before.unbind(-2), strict=True):
            z, state = self(h, e, state)
            steps.append(z)
        return torch.stack(steps, -2)


class GatedMarkov(Markov):
    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__(hidden_size, rank)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def forward(self, hidden: Tensor, before: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return self.gate_proj(torch.cat([hidden, before], -1)).sigmoid() * before, None


class RecurrentMarkov(Markov):
    carries = True

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__(hidden_size, rank)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def forward(self, hidden: Tensor, before: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        state = torch.zeros_like(before) if state is None else state
        gate, candidate, output = self.joint_proj(torch.cat([state, before, hidden], -1)).chunk(3, -1)
        gate = gate.sigmoid()
        return output.tanh(), gate * state + (1 - gate) * candidate.tanh()
