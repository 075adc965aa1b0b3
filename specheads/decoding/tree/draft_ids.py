"""A draft vocabulary smaller than the target's: which tokens a head can draft, and the index of each in it.

V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

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
