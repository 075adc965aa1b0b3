"""One step on the device as functions of tensors: the loop calls `step_after_draft`, and torch.compile traces it, alone
or with the draft before it (`whole_step`). What only the host can add is in `HostPart`.

Shapes: B batch rows, N tree nodes, P = depth of the tree + 1, V vocabulary, K top tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from specheads.decoding.acceptance import Acceptance, Verdict, walk
from specheads.decoding.drafters.base import Advance, Context, Drafter
from specheads.decoding.planner import Plan
from specheads.decoding.probs.randomness import ACCEPT, DRAFT
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree
from specheads.decoding.verify.masks import gather_nodes
from specheads.decoding.verify.verifier import TargetOutput, Verifier


class Rows(NamedTuple):
    """What a step reads of the batch's rows.

    root (B,); active (B,) bool: those that take part; numbers (B, P): as in `TargetProbs`. counts (B,): each row's new
    tokens so far, on which the random numbers of a draft and of a rule depend; limits (B,): the most new tokens, past
    which drafts are not judged. None in a graph where drafts influence only how fast the text comes.
    """

    root: Tensor
    active: Tensor
    numbers: Tensor | None
    counts: Tensor | None = None
    limits: Tensor | None = None


@dataclass
class HostPart:
    """What the host adds to a step and reads of it; a compiled step has none.

    history, ends: as in `TargetProbs`, for logits processors that depend on the prefix. keep_scores, keep_divergences:
    as in `walk`. verify: the target's pass, which may be compiled alone. end_part: see `loop.part_timer`. Set by the
    step: logits (B, N, V), the target's, and the verdict.
    """

    history: Sequence[Sequence[int]]
    ends: Tensor | None
    keep_scores: bool
    keep_divergences: bool
    verify: Callable[[DraftTree], TargetOutput]
    end_part: Callable[[str], None] | None
    logits: Tensor = field(init=False)
    verdict: Verdict = field(init=False)


def whole_step(
    target: Verifier, accept: Acceptance, sampler: Sampler, drafter: Drafter | None, plan: Plan | None,
    context: Context, rows: Rows, num_top: int,
) -> Advance:  # fmt: skip
    """Draft, verify, judge and commit."""
    if drafter is None or plan is None:
        tree = DraftTree.root_only(context.root)
    else:
        if rows.counts is not None and sampler.do_sample:
            sampler.begin(DRAFT, rows.counts)
        tree = drafter.propose(context, sampler, plan)
    if rows.counts is not None and rows.limits is not None:
        tree = tree.within(rows.limits - rows.counts - 1)
    return step_after_draft(target, accept, sampler, tree, rows, num_top)


def step_after_draft(
    target: Verifier, accept: Acceptance, sampler: Sampler, tree: DraftTree, rows: Rows, num_top: int,
    host: HostPart | None = None,
) -> Advance:  # fmt: skip
    """Verify, judge and commit a drafted tree."""
    out = target.verify(tree) if host is None else host.verify(tree)
    if host is not None and host.end_part is not None:
        host.end_part("verify")
    if rows.counts is not None and (sampler.do_sample or host is not None):  # a rule may be random at temperature 0
        sampler.begin(ACCEPT, rows.counts)
    if host is None:
        verdict = freeze_inactive(walk(tree, out.logits, accept, sampler, numbers=rows.numbers), rows)
    else:
        verdict = walk(
            tree, out.logits, accept, sampler, host.history, ends=host.ends, numbers=rows.numbers,
            keep_scores=host.keep_scores, keep_divergences=host.keep_divergences,
        )  # fmt: skip
        verdict = freeze_inactive(verdict, rows)
        host.logits, host.verdict = out.logits, verdict
        if host.end_part is not None:
            host.end_part("accept")
    return commit(target, sampler, tree, out, verdict, num_top)


def verify(target: Verifier, tree: DraftTree) -> TargetOutput:
    """The target's pass over the tree."""
    return target.verify(tree)


def freeze_inactive(verdict: Verdict, rows: Rows) -> Verdict:
    """Inactive rows gain nothing and keep their root."""
    active = rows.active
    return replace(verdict, length=verdict.length * active, bonus=torch.where(active, verdict.bonus, rows.root))


def commit(
    target: Verifier, sampler: Sampler, tree: DraftTree, out: TargetOutput, verdict: Verdict, num_top: int
) -> Advance:
    """Add the accepted tokens to the target's cache → what the next step and the host need."""
    path, topology, following = verdict.path, tree.topology, verdict.following(tree)
    target.commit(path, verdict.length)
    # argmax picks a NaN if there is one, so the emitted token's logit shows it and the other logits need not be read.
    emitted = out.logits.flatten(1).gather(1, path * out.logits.shape[-1] + following)
    unread = torch.arange(path.shape[1], device=path.device) >= verdict.length.unsqueeze(1)
    valid = sampler.finite.to(path.device) & (unread | ~emitted.isnan()).all()
    finite = valid.expand(len(following), 1)
    ranks, length = topology.ranks.gather(1, path), verdict.length.unsqueeze(1)
    top = top_tokens(out.logits, num_top)
    return Advance(
        verdict.bonus, verdict.length, verdict.last, following, gather_nodes(out.features, path),
        None if top is None else gather_nodes(top, path),
        torch.cat([following, ranks, finite, topology.num_drafted, length], 1),
    )  # fmt: skip


def top_tokens(logits: Tensor, count: int) -> Tensor | None:
    """(B, N, V) → the ids (B, N, count) of the largest logits, best first; None if count is 0."""
    return logits.topk(min(count, logits.shape[-1]), dim=-1).indices if count else None
