"""What a drafter that was not asked has missed: kept, so that it reads all of it at once when it is asked again.

Shapes: B batch rows, P new positions of a step, F features.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from specheads.decoding.drafters.base import Context, Drafter
from specheads.decoding.planner import NoDraft, Plan
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree


@dataclass
class UnreadPositions:
    """The committed positions that one drafter has not read.

    memory: that drafter's own part of a context's. columns: of all steps held, padding included. read: how many
    positions of each row the drafter has read.
    """

    memory: dict[str, Any] = field(default_factory=dict)
    columns: int = 0
    read: list[int] = field(default_factory=list)
    _parts: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def add(self, context: Context) -> None:
        """The positions of one step; every step must be added."""
        self.read = self.read or [0] * len(context.history)
        self._parts.append((context.features, context.following, context.new))
        self.columns += context.features.shape[1]

    def keep(self) -> None:
        """Copy the newest step's tensors: those of a captured graph are overwritten by the next step."""
        features, following, new = self._parts[-1]
        self._parts[-1] = features.clone(), following.clone(), new.clone()

    def count(self, context: Context) -> int:
        """The most unread positions of a row."""
        return max(len(row) - 1 - read for row, read in zip(context.history, self.read, strict=True))

    def propose(self, drafter: Drafter, context: Context, sampler: Sampler, plan: Plan) -> DraftTree:
        """The drafter's tree, once it has read what it missed: in one pass, or, where rows differ, in passes of no more
        positions than the plan has slots, so that no row is fed far beyond the text's limit."""
        parts, self._parts, self.columns = self._parts, [], 0
        unread = [len(row) - 1 - read for row, read in zip(context.history, self.read, strict=True)]
        fresh, self.read = not any(self.read), [len(row) - 1 for row in context.history]
        if len(parts) == 1:
            return drafter.propose(replace(context, memory=self.memory), sampler, plan)
        most = max(unread)
        at_once = most if fresh or len(unread) == 1 else min(most, max(plan.drafting_slots, plan.depth + 1))
        features, following = (torch.cat([part[i] for part in parts], 1) for i in (0, 1))
        committed = torch.cat(
            [torch.arange(part[0].shape[1], device=part[2].device) < part[2].unsqueeze(1) for part in parts], 1
        )
        order = committed.logical_not().to(torch.int8).argsort(dim=1, stable=True)  # (B, ΣP), a row's unread first
        total = torch.tensor(unread, device=order.device)
        for left in range(-(-most // at_once) - 1, -1, -1):  # passes after this one
            # Every row's newest position is in the last pass, from which the drafter drafts.
            end = (total - left * at_once).clamp_min(0)
            start = (end - at_once).clamp_min(0)
            new = end - start
            index = (start.unsqueeze(1) + torch.arange(at_once, device=order.device)).clamp(max=order.shape[1] - 1)
            columns = order.gather(1, index)
            passed = replace(
                context, features=features.gather(1, columns.unsqueeze(-1).expand(-1, -1, features.shape[-1])),
                following=following.gather(1, columns), new=new, last=(new - 1).clamp_min(0), memory=self.memory,
            )  # fmt: skip
            tree = drafter.propose(passed, sampler, NoDraft(plan) if left else plan)
        return tree
