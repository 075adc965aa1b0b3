"""A draft vocabulary smaller than the target's: which tokens a head can draft, and where each is in it.

V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DraftIds:
    """Which tokens a head can draft: ids (Vd,) the target id of each, place (V,) the reverse, −1 for the others."""

    ids: Tensor
    place: Tensor

    @classmethod
    def of(cls, ids: Tensor, vocab_size: int) -> DraftIds:
        place = torch.full((vocab_size,), -1, device=ids.device)
        place[ids] = torch.arange(len(ids), device=ids.device)
        return cls(ids, place)
