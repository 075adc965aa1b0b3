"""The protocol of a plan, and what it gets from a drafter.

A plan grows a tree through a drafter's `expand`, which scores the children of one level's nodes:
expand(tokens (B, k), parents (B, k) indices into the level above, or None at the root) → ChildLogits.
Shapes: B batch rows, k nodes of a level, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol, Self

import torch
from torch import Tensor

from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree
from specheads.decoding.tree.draft_logits import DraftLogits
from specheads.options import require_whole

MAX_NODES = 1024  # per tree, root included: the mask of a pass has the square of this
MAX_SLOTS = 8 * MAX_NODES  # nodes a drafter may expand for one tree


@dataclass(frozen=True, slots=True)
class ChildLogits:
    """Draft logits (B, k, Vd) of the token after each node; ids (Vd,) are their target ids, None if the same.

    logits (B, 1, Vd) with width = k: all k nodes share one distribution. confidence() (B, k): the drafter's own
    estimate of the probability that what it drafts after a node is accepted; None without such an output. ended (B,):
    rows without room for these children, to which `top` gives a probability of 0; None if all have room.
    """

    logits: Tensor
    ids: Tensor | None = None
    width: int = 0
    confidence: Callable[[], Tensor] | None = None
    ended: Tensor | None = None

    def top(self, count: int) -> tuple[Tensor, Tensor]:
        """The `count` likeliest tokens: log-probabilities and target ids, both (B, k, count), best first."""
        best, ids = self._top(count)
        log_q = best.float() - self.logits.float().logsumexp(-1, keepdim=True)
        return log_q if self.ended is None else log_q.masked_fill(self.ended.view(-1, 1, 1), -torch.inf), ids

    def top_ids(self, count: int) -> Tensor:
        """The ids of `top` alone, side by side: (B, k · count)."""
        if count > 1 or self.width > 1:
            return self._top(count)[1].flatten(1)
        index = self.logits.argmax(-1)  # a fraction of topk's time
        return index if self.ids is None else self.ids.take(index)  # as self.ids[index], in half the time

    def probs_of(self, tokens: Tensor) -> Tensor:
        """(B, k) the draft probability of target ids tokens (B, k); 0 outside the draft vocabulary."""
        log_q = self.logits.float().log_softmax(-1)
        log_q = log_q.expand(-1, tokens.shape[1], -1)
        if self.ids is None:
            return log_q.gather(2, tokens.unsqueeze(2)).squeeze(2).exp()
        return (log_q.exp() * (self.ids == tokens.unsqueeze(2))).sum(2)

    def probs(self, sampler: Sampler, vocab_size: int) -> Tensor:
        """q (B, k, V) over all target ids, processed by the sampler; all zero where that rules out every token."""
        logits = self.logits.flatten(0, 1)
        if self.ids is not None:  # first, because processors know tokens by their target ids
            logits = logits.new_full((len(logits), vocab_size), -torch.inf).index_copy_(1, self.ids, logits)
        q = sampler.draft_probs(logits).unflatten(0, self.logits.shape[:2])
        return q.expand(-1, self.width, -1) if self.width > 1 else q

    def _top(self, count: int) -> tuple[Tensor, Tensor]:
        best, index = self.logits.topk(min(count, self.logits.shape[-1]), dim=-1)
        ids = index if self.ids is None else self.ids[index]
        if self.width > 1:
            best, ids = best.expand(-1, self.width, -1), ids.expand(-1, self.width, -1)
        return best, ids


Expand = Callable[[Tensor, Tensor | None], ChildLogits]


class Plan(Protocol):
    """A way to grow trees. num_nodes: the most nodes of a tree, root included; depth: the deepest node's."""

    @property
    def num_nodes(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def drafting_slots(self) -> int:
        """How many nodes below the root a drafter expands: the slots it needs for them in its own KV cache. An accepted
        path is read in the same slots, so a drafter allocates at least depth + 1."""
        ...

    def limited(self, depth: int) -> Plan:
        """The same plan with no node deeper than `depth`, which is at least 1 and less than the plan's own depth."""
        ...

    def grow(self, root: Tensor, expand: Expand, sampler: Sampler, vocab_size: int) -> DraftTree:
        """root (B,) → the tree below it."""
        ...


@dataclass(frozen=True)
class NoDraft:
    """Drafts nothing, for a step in which `plan` may not draft. The drafter still reads the new text."""

    plan: Plan

    @property
    def num_nodes(self) -> int:
        return 1

    @property
    def depth(self) -> int:
        return 0

    @property
    def drafting_slots(self) -> int:
        return max(self.plan.drafting_slots, self.plan.depth + 1)

    def limited(self, depth: int) -> Self:
        return self

    def grow(self, root: Tensor, expand: Expand, sampler: Sampler, vocab_size: int) -> DraftTree:
        return DraftTree.root_only(root)


@dataclass(frozen=True)
class WrappedPlan:
    """Grows the trees of `plan`; subclasses change something about them or about the plan's other properties."""

    plan: Plan

    @property
    def num_nodes(self) -> int:
        return self.plan.num_nodes

    @property
    def depth(self) -> int:
        return self.plan.depth

    @property
    def drafting_slots(self) -> int:
        return self.plan.drafting_slots

    def limited(self, depth: int) -> Self:
        return replace(self, plan=self.plan.limited(depth))

    def grow(self, root: Tensor, expand: Expand, sampler: Sampler, vocab_size: int) -> DraftTree:
        return self.plan.grow(root, expand, sampler, vocab_size)


@dataclass(frozen=True)
class ReserveSlots(WrappedPlan):
    """`plan` with as many drafting slots as any later plan of the same drafter may need: they are allocated once."""

    slots: int

    @property
    def drafting_slots(self) -> int:
        return self.slots


@dataclass(frozen=True)
class LimitRows(WrappedPlan):
    """`plan`, except that trees of the likeliest nodes choose among nodes no deeper than depths[b] in row b.

    A tree of a fixed shape grows equally deep in every row, to be cut afterwards (`DraftTree.cut`).
    """

    depths: tuple[int, ...]

    def grow(self, root: Tensor, expand: Expand, sampler: Sampler, vocab_size: int) -> DraftTree:
        depths, level = root.new_tensor(self.depths), count()

        def limited(tokens: Tensor, parents: Tensor | None) -> ChildLogits:
            return replace(expand(tokens, parents), ended=depths <= next(level))

        return self.plan.grow(root, limited, sampler, vocab_size)


def unwrapped_plan(plan: Plan | None) -> Plan | None:
    """The innermost plan, which grows the trees."""
    while isinstance(plan, WrappedPlan):
        plan = plan.plan
    return plan


def with_grown(plan: Plan, grown: Plan) -> Plan:
    """`plan` with its innermost plan replaced by `grown`."""
    return replace(plan, plan=with_grown(plan.plan, grown)) if isinstance(plan, WrappedPlan) else grown


def limit_depth(plan: Plan, depth: int) -> Plan:
    """`plan` with no node deeper than `depth`, but the drafting slots of the whole plan: the same object if it has no
    deeper node, a `NoDraft` at depth 0."""
    if depth >= plan.depth:
        return plan
    whole = NoDraft(plan)
    return ReserveSlots(plan.limited(depth), whole.drafting_slots) if depth > 0 else whole


def require_positive(name: str, value: int) -> None:
    """ValueError unless value is 1 or more, TypeError unless it is a whole number."""
    require_whole(name, value)
    if value < 1:
        raise ValueError(f"{name}={value} must be at least 1")


def require_at_most(name: str, value: int, most: int) -> None:
    """ValueError unless value is 1 to most: a larger plan would take memory before it drafted anything."""
    require_positive(name, value)
    if value > most:
        raise ValueError(f"{name}={value} must be at most {most}")


@dataclass(frozen=True)
class RecordDraftLogits(WrappedPlan):
    """`plan`, with the logits of the drafter's `expand` recorded in its trees."""

    def grow(self, root: Tensor, expand: Expand, sampler: Sampler, vocab_size: int) -> DraftTree:
        levels: list[tuple[Tensor, Tensor | None, ChildLogits]] = []

        def record(tokens: Tensor, parents: Tensor | None) -> ChildLogits:
            levels.append((tokens, parents, expand(tokens, parents)))
            return levels[-1][2]

        tree = self.plan.grow(root, record, sampler, vocab_size)
        if not levels:
            return tree
        topology = tree.topology
        # A node of the tree is the expanded node with the same token and the same parent.
        expanded = torch.where(topology.drafted, -1, 0)  # (B, N) each node's index among the expanded ones of its depth
        logit_index = torch.zeros_like(expanded)
        start = levels[0][2].logits.shape[1]
        for depth, (tokens, parents, children) in enumerate(levels[1:], start=1):
            assert parents is not None
            above = torch.where(topology.depth == depth, expanded.gather(1, topology.parent_index), -1)
            same = (tree.tokens.unsqueeze(2) == tokens.unsqueeze(1)) & (above.unsqueeze(2) == parents.unsqueeze(1))
            found, index = same.max(2)
            expanded = torch.where(found, index, expanded)
            num_logits = children.logits.shape[1]  # 1 where the level shares one distribution
            logit_index = torch.where(found, start + index.clamp(max=num_logits - 1), logit_index)
            start += num_logits
        logits = torch.cat([children.logits for _, _, children in levels], 1)
        return replace(tree, logits=DraftLogits(logits, logit_index, levels[0][2].ids, vocab_size))
