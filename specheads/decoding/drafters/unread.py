"""What a drafter that was not asked has missed: kept, so that it reads all of it at once when it is asked again.

Shapes: B batch rows, P new positions of a step, F features.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specheads.decoding.drafters.base import Context, DeviceDraft, Drafter
from specheads.decoding.planner import NoDraft, Plan, StaticTree
from specheads.decoding.planner.plan import ReserveSlots
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

    @property
    def has_read(self) -> bool:
        """Has the drafter read the prompts?"""
        return any(self.read)

    def count(self, context: Context) -> int:
        """The most unread positions of a row."""
        return max(len(row) - 1 - read for row, read in zip(context.history, self.read, strict=True))

    def propose(self, drafter: Drafter, context: Context, sampler: Sampler, plan: Plan) -> DraftTree:
        """The drafter's tree, once it has read what it missed: in one pass, or, where rows differ, in passes of no more
        positions than the plan has slots, so that no row is fed far beyond the text's limit."""
        at_once = None if len(context.history) == 1 else max(plan.drafting_slots, plan.depth + 1)
        *passes, last = self.read_passes(context, at_once)
        for one in passes:
            drafter.propose(one, sampler, NoDraft(plan))
        return drafter.propose(last, sampler, plan)

    def device_draft(
        self, drafter: Drafter, module: Any, context: Context, tree: StaticTree, *, at_once: int, slots: int
    ) -> DeviceDraft:
        """The draft that `drafter` makes on the device, with the weights of `module`, in a pass of `at_once` columns.
        What does not fit is read now. slots: of the cache, made with the first draft."""
        *passes, last = self.read_passes(context, at_once, static=True)
        for one in passes:
            drafter.propose(one, Sampler(), NoDraft(ReserveSlots(tree, slots)))
        return DeviceDraft(last, drafter, tree, module if isinstance(module, nn.Module) else None, tree.depth)

    def read_passes(self, context: Context, at_once: int | None, *, static: bool = False) -> list[Context]:
        """The contexts of passes that read all that was missed; from the last one the drafter drafts.

        at_once: the most positions of a pass; None: all in one. Before the first draft, when the prompts are read, all
        in one whatever it is. static: the last pass has as many columns, some of them perhaps without a position, and
        the prompts are read before it."""
        parts, self._parts, self.columns = self._parts, [], 0
        unread = [len(row) - 1 - read for row, read in zip(context.history, self.read, strict=True)]
        fresh, self.read = not self.has_read, [len(row) - 1 for row in context.history]
        context = replace(context, memory=self.memory)
        if len(parts) == 1 and not static:
            return [context]
        most = max(unread)
        if at_once is None or (fresh and not static):
            at_once = most
        elif not static:
            at_once = min(most, at_once)
        if len(parts) == 1 and not fresh and parts[0][0].shape[1] <= at_once:
            missing = at_once - parts[0][0].shape[1]
            features, following = F.pad(context.features, (0, 0, 0, missing)), F.pad(context.following, (0, missing))
            return [replace(context, features=features, following=following)]
        features, following = (torch.cat([part[i] for part in parts], 1) for i in (0, 1))
        committed = torch.cat(
            [torch.arange(part[0].shape[1], device=part[2].device) < part[2].unsqueeze(1) for part in parts], 1
        )
        order = committed.logical_not().to(torch.int8).argsort(dim=1, stable=True)  # (B, ΣP), a row's unread first
        total, passes = torch.tensor(unread, device=order.device), []
        widths = [at_once] * -(-most // at_once)
        if fresh and static:
            widths = [max(1, most - at_once), at_once]
        for i, width in enumerate(widths):
            # Every row's newest position is in the last pass, from which the drafter drafts.
            end = (total - sum(widths[i + 1 :])).clamp_min(0)
            start = (end - width).clamp_min(0)
            new = end - start
            index = (start.unsqueeze(1) + torch.arange(width, device=order.device)).clamp(max=order.shape[1] - 1)
            columns = order.gather(1, index)
            passes.append(replace(
                context, features=features.gather(1, columns.unsqueeze(-1).expand(-1, -1, features.shape[-1])),
                following=following.gather(1, columns), new=new, last=(new - 1).clamp_min(0),
            ))  # fmt: skip
        return passes

    def refill(self, drafter: Drafter, context: Context, rows: list[int], prompts: Context, plan: Plan) -> None:
        """`Drafter.refill`: these rows hold the prompts of another context, of which the next `add` brings the last
        position. The drafter reads the others now if it has read those before."""
        index = prompts.new.new_tensor(rows)
        self._parts = [(*held, new.index_fill(0, index, 0)) for *held, new in self._parts]  # type: ignore[misc]
        if self.has_read:
            drafter.refill(replace(context, memory=self.memory), rows, prompts, plan)
            for row, history in zip(rows, prompts.history, strict=True):
                self.read[row] = len(history) - 2
            return
        held, batch = (prompts.features, prompts.following, prompts.new - 1), len(self.read)
        self._parts.append(tuple(t.new_zeros(batch, *t.shape[1:]).index_copy(0, index, t) for t in held))  # type: ignore[arg-type]
        self.columns += prompts.features.shape[1]
