"""What a drafter that was not asked has missed: kept, so that it reads all of it in one pass when it is asked again.

Shapes: B batch rows, P new positions of a step, F features.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from specheads.decoding.drafters.base import Context


@dataclass
class UnreadPositions:
    """The committed positions that one drafter has not read. memory: that drafter's own part of a context's.

    columns: of all steps held, padding included.
    """

    memory: dict[str, Any] = field(default_factory=dict)
    columns: int = 0
    _parts: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def add(self, context: Context) -> None:
        """The positions of one step; every step must be added."""
        self._parts.append((context.features, context.following, context.new))
        self.columns += context.features.shape[1]

    def keep(self) -> None:
        """Copy the newest step's tensors: those of a captured graph are overwritten by the next step."""
        features, following, new = self._parts[-1]
        self._parts[-1] = features.clone(), following.clone(), new.clone()

    def take(self, context: Context) -> Context:
        """The newest context with all unread positions, packed left; they count as read."""
        parts, self._parts, self.columns = self._parts, [], 0
        if len(parts) == 1:
            return replace(context, memory=self.memory)
        features, following = (torch.cat([part[i] for part in parts], 1) for i in (0, 1))
        committed = torch.cat(
            [torch.arange(part[0].shape[1], device=part[2].device) < part[2].unsqueeze(1) for part in parts], 1
        )
        order = committed.logical_not().to(torch.int8).argsort(dim=1, stable=True)  # (B, ΣP)
        new = committed.sum(1)
        return replace(
            context, features=features.gather(1, order.unsqueeze(-1).expand_as(features)),
            following=following.gather(1, order), new=new, last=(new - 1).clamp_min(0), memory=self.memory,
        )  # fmt: skip
