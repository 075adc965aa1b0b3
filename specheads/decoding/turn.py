"""What the next step of decoding may do: which rows take part, by which plan they draft, and what nothing follows.

Shapes: B batch rows, N tree nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specheads.decoding.planner import NoDraft, Plan, limit_depth
from specheads.decoding.target.causal import Target
from specheads.decoding.tree import DraftTree


@dataclass(frozen=True)
class Turn:
    """left: how many tokens each row may gain after its root, 0 where it has ended. going: the rows that take part.
    plan: of the trees, None where no drafter is asked."""

    left: list[int]
    going: list[bool]
    plan: Plan | None


def next_turn(
    target: Target,
    plan: Plan | None,
    running: Sequence[bool],
    history: Sequence[list[int]],
    prompts: Sequence[list[int]],
    max_new_tokens: int,
) -> Turn:
    """The next turn of rows whose ids up to and with the root are history, of which prompts are the beginnings.

    Nothing is drafted that no row has room for, nor where a base whose positions depend on the length cannot verify it.
    """
    gained = [len(row) - len(prompt) for row, prompt in zip(history, prompts, strict=True)]
    left = [max_new_tokens - n if going else 0 for n, going in zip(gained, running, strict=True)]
    now = limit_depth(plan, max(left) - 1) if plan is not None and max(left) > 1 else None
    switch = target.switch
    if switch is None:
        return Turn(left, list(running), now)
    fed = [n - 1 for n, going in zip(gained, running, strict=True) if going]
    target.pace = min(fed)
    if now is not None and not switch.may_draft(fed, now.depth):
        now = NoDraft(now)
    if not switch.beyond(fed):
        return Turn(left, [going and not switch.waits(n - 1) for going, n in zip(running, gained, strict=True)], now)
    if switch.rereads:
        switch.rereads = False
        target.reread([fitted(row, len(prompt) + min(fed)) for row, prompt in zip(history, prompts, strict=True)])
    return Turn(left, list(running), now)


def fitted(row: list[int], length: int) -> list[int]:
    """A row's ids up to `length`; one that is shorter, which has ended, with any ids after its end."""
    return [*row, *[0] * (length - len(row))][:length]


def ended(tree: DraftTree, end_ids: Tensor, left: list[int]) -> Tensor:
    """(B, N) the nodes that nothing follows: at or below one of end_ids (E,) or the last token a row may gain.

    left: as in `Turn`.
    """
    room = torch.tensor(left, device=tree.tokens.device).unsqueeze(1)
    last = (tree.topology.depth >= room) | (torch.isin(tree.tokens, end_ids) & tree.topology.drafted)
    return (tree.topology.ancestors & last.unsqueeze(1)).any(2)
