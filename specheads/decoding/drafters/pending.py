"""What automatic drafts add to a head: the positions that it has missed while idle, which it reads all at once when it
drafts again, and copies in place of its trees in some rows of a batch, combined on the device.

Shapes: B batch rows, P new positions of a step, F features, N tree nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specheads.decoding.drafters.base import Context, DeviceDraft, Drafter
from specheads.decoding.planner import NoDraft, Plan, StaticTree
from specheads.decoding.planner.plan import ReserveSlots
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree, TreeTopology


class _Part(NamedTuple):
    """One step's positions: features (B, P, F), following (B, P) as in `Context`, and how many of the P a row has."""

    features: Tensor
    following: Tensor
    counts: list[int]


@dataclass
class PendingFeatures:
    """The committed positions that one drafter has not read.

    memory: that drafter's own part of a context's. columns: of all steps held, padding included. read: how many
    positions of each row the drafter has read; known: how many there were after the last step added; both are counted
    from the first position with features, `start` of each row.
    """

    memory: dict[str, Any] = field(default_factory=dict)
    columns: int = 0
    read: list[int] = field(default_factory=list)
    known: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    _parts: list[_Part] = field(default_factory=list)

    def add(self, context: Context) -> None:
        """Add the positions of one step. Every step must be added, except one with which all rows ended: of a row that
        then gets no prompt, that step's positions are lost, and nothing is drafted for it again."""
        if not self.known:
            self.read = self.known = [0] * len(context.history)
            kept = context.target.kept
            self.start = self.known if kept is None else kept.tolist()
        before = self.known
        self.known = [len(row) - 1 - start for row, start in zip(context.history, self.start, strict=True)]
        width = context.features.shape[1]
        counts = [min(now - then, width) for now, then in zip(self.known, before, strict=True)]
        self._parts.append(_Part(context.features, context.following, counts))
        self.columns += width

    @property
    def has_read(self) -> bool:
        """Has the drafter read the prompts?"""
        return any(self.read)

    @property
    def count(self) -> int:
        """The most unread positions of any row."""
        return max(known - read for known, read in zip(self.known, self.read, strict=True))

    def propose(self, drafter: Drafter, context: Context, sampler: Sampler, plan: Plan) -> DraftTree:
        """The drafter's tree after it has read what it missed: for one row in one pass, for several in passes of no
        more positions than the plan has slots, so that no row is fed far beyond the text's limit."""
        at_once = None if len(context.history) == 1 else max(plan.drafting_slots, plan.depth + 1)
        *passes, last = self.read_passes(context, at_once)
        for one in passes:
            drafter.propose(one, sampler, NoDraft(plan))
        return drafter.propose(last, sampler, plan)

    def device_draft(
        self, drafter: Drafter, module: Any, context: Context, tree: StaticTree, *, at_once: int, slots: int
    ) -> DeviceDraft:
        """The draft that `drafter` makes on the device, with the weights of `module`, in a pass of `at_once` columns.
        What does not fit is read now. slots: drafting slots of its cache, which the first draft allocates."""
        *passes, last = self.read_passes(context, at_once, static=True)
        for one in passes:
            drafter.propose(one, Sampler(), NoDraft(ReserveSlots(tree, slots)))
        return DeviceDraft(last, drafter, tree, module if isinstance(module, nn.Module) else None, tree.depth)

    def read_passes(self, context: Context, at_once: int | None, *, static: bool = False) -> list[Context]:
        """The contexts of the passes that read all that was missed; the drafter drafts from the last.

        at_once: the most positions of a pass; None: all in one pass, as always before the first draft, when the prompts
        are read. static: the last pass has exactly at_once columns, padded if need be, and prompts are read before it.
        """
        parts, self._parts, self.columns = self._parts, [], 0
        most, fresh, self.read = self.count, not self.has_read, self.known
        context = replace(context, memory=self.memory)
        if len(parts) == 1 and not static:
            return [context]
        if at_once is None or (fresh and not static):
            at_once = most
        elif not static:
            at_once = min(most, at_once)
        if len(parts) == 1 and not fresh and parts[0].features.shape[1] <= at_once:
            missing = at_once - parts[0].features.shape[1]
            features, following = F.pad(context.features, (0, 0, 0, missing)), F.pad(context.following, (0, missing))
            return [replace(context, features=features, following=following)]
        widths = [at_once] * -(-most // at_once)
        if fresh and static:
            widths = [max(1, most - at_once), at_once]
        features = torch.cat([part.features for part in parts], 1)
        following = torch.cat([part.following for part in parts], 1)
        context = replace(context, features=features, following=following)
        columns, passes = _committed_columns(parts), []
        for width in reversed(widths):  # every row's newest position is in the last pass, from which the drafter drafts
            passes.append(_only_columns(context, [row[-width:] for row in columns], width))
            columns = [row[:-width] for row in columns]
        return passes[::-1]

    def refill(self, drafter: Drafter, context: Context, rows: list[int], prompts: Context, plan: Plan) -> None:
        """As `Drafter.refill`: these rows now hold `prompts`, whose last position comes with the next `add`. If the
        drafter has read the earlier prompts, it reads the others now."""
        index, batch = prompts.new.new_tensor(rows), len(self.known)
        lengths = dict(zip(rows, (len(history) - 2 for history in prompts.history), strict=True))
        for part in self._parts:
            part.counts[:] = (0 if row in lengths else count for row, count in enumerate(part.counts))
        self.known = [lengths.get(row, known) for row, known in enumerate(self.known)]
        if self.has_read:
            drafter.refill(replace(context, memory=self.memory), rows, prompts, plan)
            self.read = [lengths.get(row, read) for row, read in enumerate(self.read)]
            return
        features, following = (
            values.new_zeros(batch, *values.shape[1:]).index_copy(0, index, values)
            for values in (prompts.features, prompts.following)
        )
        self._parts.append(_Part(features, following, [lengths.get(row, 0) for row in range(batch)]))
        self.columns += prompts.features.shape[1]


def _committed_columns(parts: Sequence[_Part]) -> list[list[int]]:
    """By row, the columns that hold its positions when the parts are concatenated."""
    columns: list[list[int]] = [[] for _ in parts[0].counts]
    first = 0
    for part in parts:
        for row, count in zip(columns, part.counts, strict=True):
            row += range(first, first + count)
        first += part.features.shape[1]
    return columns


def _only_columns(context: Context, columns: Sequence[Sequence[int]], width: int) -> Context:
    """The context with only these columns of each row, padded to `width`."""
    index = context.following.new_tensor([[*row, *[0] * (width - len(row))] for row in columns])
    features = context.features.gather(1, index.unsqueeze(-1).expand(-1, -1, context.features.shape[-1]))
    new = index.new_tensor([len(row) for row in columns])
    last, following = (new - 1).clamp_min(0), context.following.gather(1, index)
    return replace(context, features=features, following=following, new=new, last=last)


COPIES = "copies"  # in a context's memory


@dataclass(frozen=True, eq=False)
class HeadOrCopy(Drafter):
    """Drafts with `head`, then replaces the trees of some rows by copies (see `put_copies`)."""

    head: Drafter

    @property
    def layers(self) -> tuple[int, ...]:
        return self.head.layers

    def default_plan(self, device: torch.device, do_sample: bool) -> Plan:
        return self.head.default_plan(device, do_sample)

    def propose(self, context: Context, sampler: Sampler, plan: Plan) -> DraftTree:
        tree = self.head.propose(context, sampler, plan)
        return overlay(tree, *context.memory[COPIES]) if plan.depth else tree


def put_copies(memory: dict[str, Any], context: Context, copies: Sequence[Sequence[int]], nodes: int) -> None:
    """Put each row's copied ids, for trees of `nodes` nodes, into the memory that the head drafts with.

    A row without ids keeps the head's tree."""
    padded = [[row[-1], *ids, *[row[-1]] * (nodes - 1 - len(ids))]
              for ids, row in zip(copies, context.history, strict=True)]  # fmt: skip
    counts = [len(ids) for ids in copies]
    device = context.root.device
    memory[COPIES] = torch.tensor(padded, device=device), torch.tensor(counts, device=device)


def overlay(tree: DraftTree, copies: Tensor, counts: Tensor) -> DraftTree:
    """The tree, in which a row with counts (B,) > 0 is the chain of its first `counts` copies (B, N) after the root."""
    num, depth = copies.shape[1], max(copies.shape[1] - 1, tree.max_depth)
    in_line = tree.num_nodes == tree.max_depth + 1
    tree, copied, index = tree.padded(num, depth), counts.unsqueeze(1) > 0, torch.arange(num, device=copies.device)
    line = torch.where(index <= counts.unsqueeze(1), index - 1, -1)
    tokens = torch.where(copied & (index > 0), copies, tree.tokens)
    parents = torch.where(copied, line, tree.parents)
    return DraftTree(tokens, parents, depth, topology=TreeTopology.of(parents, depth, in_line=in_line))
