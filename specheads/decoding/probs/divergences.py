"""Divergences between the target's distribution p and the draft's q, each defined here once.

Arguments: log q and log p, (…, X) normalised log-probabilities over the same outcomes; −inf for probability 0. Result
(…) in nats, ≥ 0 up to rounding. Differentiable in both. Shapes: X outcomes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def forward_kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    """KL(p‖q) = Σ p log(p / q), mode-covering. Infinite if q lacks an outcome of p."""
    return (log_p.exp() * (log_p - log_q).masked_fill(log_p == -torch.inf, 0)).sum(-1)


def reverse_kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    """KL(q‖p) = Σ q log(q / p), mode-seeking. Infinite if p lacks an outcome of q."""
    return forward_kl(log_p, log_q)


def log_mixture(log_q: Tensor, log_p: Tensor) -> Tensor:
    """log m of m = (p + q) / 2."""
    neither = (log_q == -torch.inf) & (log_p == -torch.inf)  # logaddexp of two −inf has no gradient
    mixed = torch.logaddexp(log_q.masked_fill(neither, 0), log_p.masked_fill(neither, 0)) - math.log(2)
    return mixed.masked_fill(neither, -torch.inf)


def js(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Jensen–Shannon: ½ KL(p‖m) + ½ KL(q‖m) with m = (p + q) / 2. At most log 2."""
    log_m = log_mixture(log_q, log_p)
    return (forward_kl(log_m, log_p) + forward_kl(log_m, log_q)) / 2


def tv(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Total variation ½ Σ |p − q|: the chance that a draft sampled from q is rejected. At most 1."""
    return (log_q.exp() - log_p.exp()).abs().sum(-1) / 2
