"""One step on the device, whole or from the draft on, as functions that torch.compile can trace.

Shapes: B batch rows, N tree nodes, P = depth of the tree + 1, V vocabulary, K top tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specheads.decoding.acceptance import Acceptance, Verdict, walk
from specheads.decoding.drafters.base import Advance, Context, Drafter
from specheads.decoding.planner import Plan
from specheads.decoding.probs.randomness import ACCEPT, DRAFT
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree
from specheads.decoding.verify.cache import gather_nodes
from specheads.decoding.verify.verifier import TargetOutput, Verifier


def whole_step(
    target: Verifier, drafter: Drafter | None, plan: Plan | None, accept: Acceptance, sampler: Sampler,
    context: Context, numbers: Tensor | None, active: Tensor, num_top: int, count: Tensor | None = None,
    limits: Tensor | None = None,
) -> Advance:  # fmt: skip
    """Draft, verify, judge and commit. numbers (B, P) as in `TargetProbs`, active (B,) bool.

    Given where drafts influence the text: count (B,) as in `step_after_draft`, and limits (B,), the most tokens of
    each row; drafts past them are not judged.
    """
    if drafter is None or plan is None:
        tree = DraftTree.root_only(context.root)
    else:
        if count is not None and sampler.do_sample:
            sampler.begin(DRAFT, count)
        tree = drafter.propose(context, sampler, plan)
    if count is not None and limits is not None:
        tree = tree.within(limits - count - 1)
    return step_after_draft(target, accept, sampler, context.root, tree, numbers, active, num_top, count)


def step_after_draft(
    target: Verifier, accept: Acceptance, sampler: Sampler, root: Tensor, tree: DraftTree, numbers: Tensor | None,
    active: Tensor, num_top: int, count: Tensor | None = None,
) -> Advance:  # fmt: skip
    """Verify, judge and commit a drafted tree. count (B,): each row's new tokens so far, given if the rule draws
    random numbers, which depend on it."""
    out = target.verify(tree)
    if count is not None and sampler.do_sample:
        sampler.begin(ACCEPT, count)
    verdict = hold_inactive(walk(tree, out.logits, accept, sampler, numbers=numbers), root, active)
    return commit(target, sampler, tree, out, verdict, num_top)


def verify(target: Verifier, tree: DraftTree) -> TargetOutput:
    """The target's pass over the tree."""
    return target.verify(tree)


def hold_inactive(verdict: Verdict, root: Tensor, active: Tensor) -> Verdict:
    """Inactive rows gain nothing and keep their root (B,)."""
    return replace(verdict, length=verdict.length * active, bonus=torch.where(active, verdict.bonus, root))


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
