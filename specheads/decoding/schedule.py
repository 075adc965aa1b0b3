"""What the next step of decoding may do: which rows take part, by which plan they draft, and where a tree must end.

Shapes: B batch rows, N tree nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specheads.decoding.planner import NoDraft, Plan, limit_depth
from specheads.decoding.planner.plan import LimitRows
from specheads.decoding.tree import DraftTree
from specheads.decoding.verify.verifier import Verifier


@dataclass(frozen=True)
class StepSchedule:
    """remaining: how many tokens each row may gain after its root, 0 once it has finished. active: the rows that take
    part. plan: how the trees grow, None if the drafter is not called."""

    remaining: list[int]
    active: list[bool]
    plan: Plan | None


def schedule_step(
    target: Verifier,
    plan: Plan | None,
    running: Sequence[bool],
    history: Sequence[list[int]],
    prompts: Sequence[list[int]],
    limits: Sequence[int],
) -> StepSchedule:
    """The schedule of the next step. history: each row's ids, root included; prompts: the ids it began with; limits:
    the most new tokens of each.

    Trees are no deeper than the longest remaining text, and each row's nodes stay within its own. Nothing is drafted
    where a base whose positions depend on the length could not verify it.
    """
    gained = [len(row) - len(prompt) for row, prompt in zip(history, prompts, strict=True)]
    remaining = [limit - n if runs else 0 for limit, n, runs in zip(limits, gained, running, strict=True)]
    step_plan = limit_depth(plan, max(remaining) - 1) if plan is not None and max(remaining) > 1 else None
    if step_plan is not None and min(filter(None, remaining)) <= step_plan.depth:
        step_plan = limit_rows(step_plan, remaining)
    switch = target.switch
    if switch is None:
        return StepSchedule(remaining, list(running), step_plan)
    fed = [n - 1 for n, runs in zip(gained, running, strict=True) if runs]
    switch.min_fed = min(fed)
    if step_plan is not None and not switch.may_draft(fed, step_plan.depth):
        step_plan = NoDraft(step_plan)
    if not switch.is_past(fed):
        active = [runs and not switch.must_wait(n - 1) for runs, n in zip(running, gained, strict=True)]
        return StepSchedule(remaining, active, step_plan)
    if switch.rereads:
        switch.rereads = False
        target.reread([fit_length(row, len(prompt) + min(fed)) for row, prompt in zip(history, prompts, strict=True)])
    return StepSchedule(remaining, list(running), step_plan)


def limit_rows(plan: Plan, remaining: Sequence[int]) -> Plan:
    """`plan`, except that no row drafts past its own limit and finished rows draft nothing. remaining: as in
    `StepSchedule`."""
    return LimitRows(plan, tuple(max(0, room - 1) for room in remaining))


def fit_length(row: list[int], length: int) -> list[int]:
    """A row's first `length` ids; a finished row that is shorter is filled with zeros."""
    return [*row, *[0] * (length - len(row))][:length]


def cut_past_limits(tree: DraftTree, remaining: Sequence[int]) -> DraftTree:
    """The tree without the nodes past each row's own limit, however far other rows may draft.

    So where drafts influence the text, a row is judged as if it were alone. remaining: as in `StepSchedule`.
    """
    return tree.cut([room - 1 if room else tree.max_depth for room in remaining])


def end_mask(tree: DraftTree, end_ids: Tensor, remaining: list[int]) -> Tensor:
    """(B, N) bool, the nodes that nothing may follow: an id of end_ids (E,), a row's last token, and all below them.

    remaining: as in `StepSchedule`.
    """
    room = torch.tensor(remaining, device=tree.tokens.device).unsqueeze(1)
    last = (tree.topology.depth >= room) | (torch.isin(tree.tokens, end_ids) & tree.topology.drafted)
    return (tree.topology.ancestors & last.unsqueeze(1)).any(2)
