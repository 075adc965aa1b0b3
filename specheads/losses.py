"""Losses of head training, summed over the positions that count.

Shapes: R positions, V vocabulary, H hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def hard_cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    """Σ −log q(token): logits (R, V), tokens (R,)."""
    return F.cross_entropy(logits.float(), tokens, reduction="sum")


def soft_cross_entropy(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Σ −Σ_x p(x) log q(x), p the teacher's law over the same tokens: both (R, V)."""
    return -(teacher_logits.float().softmax(-1) * logits.float().log_softmax(-1)).sum()


def feature_distance(predicted: Tensor, features: Tensor) -> Tensor:
    """Σ over positions of the mean smooth-L1 distance: both (R, H). EAGLE, arXiv:2401.15077."""
    return F.smooth_l1_loss(predicted.float(), features.float(), reduction="none").mean(-1).sum()


def add_uniform_noise(features: Tensor, width: float) -> Tensor:
    """features + U(−width, width). EAGLE, arXiv:2401.15077."""
    return features + torch.empty_like(features).uniform_(-width, width) if width else features
