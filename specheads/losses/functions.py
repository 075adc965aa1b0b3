"""Losses of head training, one value per row.

p: target probabilities, q: draft probabilities, both given as logarithms. Shapes: R rows, X outcomes (the draft
vocabulary, or the likeliest tokens and the rest), H hidden, S depths.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from specheads.decoding.probs.divergences import forward_kl, js, reverse_kl, tv
from specheads.decoding.probs.precision import at_least_float32
from specheads.options import refuse_unknown, shown

DistributionLoss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(log_q: Tensor, log_p: Tensor) -> Tensor:
    """−Σ p log q: (R, X) both → (R,). Its gradient in q is that of KL(p ‖ q)."""
    return -(log_p.exp() * log_q).sum(-1)


def overlap(log_q: Tensor, log_p: Tensor) -> Tensor:
    """α = Σ min(p, q), the chance that a draft sampled from q is accepted."""
    return torch.minimum(log_q, log_p).exp().sum(-1)


def lk(log_q: Tensor, log_p: Tensor) -> Tensor:
    """−log α. LK losses, arXiv:2602.23881."""
    return -torch.minimum(log_q, log_p).logsumexp(-1)


def lk_hybrid(log_q: Tensor, log_p: Tensor, sharpness: float = 3.0) -> Tensor:
    """λ KL(p ‖ q) + (1 − λ)(1 − α) with λ = exp(−sharpness · α), detached: KL where the draft is far off, acceptance
    where it is close. LK losses, arXiv:2602.23881."""
    alpha = overlap(log_q, log_p)
    share = (-sharpness * alpha.detach()).exp()
    return share * forward_kl(log_q, log_p) + (1 - share) * (1 - alpha)


# By option name: "kl" is the forward KL(p‖q), "kl_reversed" the reverse KL(q‖p).
DISTRIBUTION_LOSSES: dict[str, DistributionLoss] = {
    "ce": cross_entropy, "kl": forward_kl, "kl_reversed": reverse_kl, "js": js, "tv": tv, "lk": lk,
    "lk_hybrid": lk_hybrid,
}  # fmt: skip
HARD = "hard"  # −log q(the next token of the text), which needs no target probabilities


@cache
def parse_loss(text: str) -> tuple[tuple[str, float], ...]:
    """'lk' or 'hard:0.1,tv:1.8' → ((name, weight), …). ValueError for an unknown name or a weight not above 0."""
    parts = []
    for part in str(text).split(","):
        name, _, weight = part.strip().partition(":")
        refuse_unknown([name], [HARD, *DISTRIBUTION_LOSSES], what="loss")
        try:
            value = float(weight) if weight else 1.0
        except ValueError:
            value = -1.0
        if not 0 < value < float("inf"):
            raise ValueError(
                f"loss {shown(text)}: the weight of {name!r} is {shown(weight)}; expected a number above 0"
            )
        parts.append((name, value))
    if len({name for name, _ in parts}) < len(parts):
        raise ValueError(f"loss {shown(text)} names one loss twice")
    return tuple(parts)


def feature_distance(predicted: Tensor, features: Tensor) -> Tensor:
    """Mean smooth-L1 distance of each row: (R, H) both → (R,). EAGLE, arXiv:2401.15077."""
    return F.smooth_l1_loss(at_least_float32(predicted), at_least_float32(features), reduction="none").mean(-1)


def position_weights(chances: Tensor, floor: float) -> Tensor:
    """D-PACE: the draft's probability of each depth's token (R, S) → weights (R, S), the expected accepted tokens that
    depend on depth j: w_j = Σ_{m ≥ j} Π_{i ≤ m} q̃_i with q̃ = (1 − floor) q + floor. arXiv:2605.18810."""
    reached = ((1 - floor) * chances + floor).cumprod(1)
    return reached.flip(1).cumsum(1).flip(1)
