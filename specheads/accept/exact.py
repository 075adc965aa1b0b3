"""Exact: what is emitted has the target's law, judged token by token.

p is the target's law, q the draft's. Shapes: B batch rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specheads.accept.rule import Level, LevelRule
from specheads.sampling import Sampler


@dataclass(frozen=True)
class Exact(LevelRule):
    """Lossless: what is emitted has the target's law.

    A point-mass draft takes the sample walk: draw y from p, descend if a child carries y. Sampled children are
    judged in order, x kept with probability min(1, p(x)/q(x)), p becoming norm((p − q)₊) and q losing x at each
    refusal. SpecInfer arXiv:2305.09781, Sequoia arXiv:2402.12374.
    """

    lossless: ClassVar[bool] = True
    descends_on_draw: ClassVar[bool] = True

    def chances(self, level: Level, sampler: Sampler) -> Tensor:
        return chances_towards(level.p, level)

    def rest(self, level: Level, sampler: Sampler) -> Tensor:
        return left_of(level.p, level)


def chances_towards(p: Tensor, level: Level) -> Tensor:
    """(R, N) as `LevelRule.chances`, such that the token that follows has the law p (R, V), the target's or another."""
    if level.laws.tree.probs is None:  # level.q would be rows of V numbers
        return p.gather(1, level.tokens) * level.is_child
    return chances_in_order(p, level)


def chances_in_order(p: Tensor, level: Level, leniency: float = 1.0) -> Tensor:
    """(R, N): sibling after sibling, x kept with probability min(1, p(x) / (leniency · q(x))).

    A refusal leaves p as norm((p − q)₊) and q without x. The law of a point mass is one-hot at each x.
    """
    bar = (leniency * level.q_of_tokens).clamp_min(torch.finfo(p.dtype).tiny)
    made = (p.gather(1, level.tokens) / bar).clamp(max=1) * level.is_child
    if level.laws.tree.shape.most_siblings < 2:
        return made
    waiting = torch.ones_like(p[:, :1])
    for found, node, left, law in siblings(p, level):
        x = level.tokens.gather(1, node)
        bar = (leniency * law.gather(1, x)).clamp_min(torch.finfo(law.dtype).tiny)
        kept = (left.gather(1, x) / bar).clamp(max=1) * found
        made.scatter_(1, node, torch.where(found, waiting * kept, made.gather(1, node)))
        waiting = waiting * (1 - kept)
    return made


def left_of(p: Tensor, level: Level) -> Tensor:
    """(R, V) what is left of p when all children have been refused: `LevelRule.rest` towards p."""
    if level.q is None:  # p without their tokens
        drafted = torch.zeros_like(p).scatter_add_(1, level.tokens, level.is_child.to(p.dtype))
        return residual(p, p * drafted)
    for found, _, left, law in siblings(p, level):
        p = torch.where(found, residual(left, law), left)
    return p


def siblings(p: Tensor, level: Level) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """The children of each node in draft order, each behind the refusal of those before it: is there one (R, 1), which
    (R, 1), what is left of p (R, V), and the law it was drawn from (R, V)."""
    q, order = level.q, level.is_child.cumsum(1) * level.is_child  # 1 for the first sibling, 2 for the second …
    most = level.laws.tree.shape.most_siblings
    for rank in range(1, most + 1):
        found, node = (order == rank).max(1, keepdim=True)
        x = level.tokens.gather(1, node)
        law = torch.zeros_like(p).scatter(1, x, 1) if q is None else q
        yield found, node, p, law
        if rank < most:
            p = torch.where(found, residual(p, law), p)
            q = q if q is None else torch.where(found, normalised(q.scatter(1, x, 0)), q)


def normalised(weights: Tensor) -> Tensor:
    """Rows scaled to sum 1; an all-zero row stays zero."""
    return weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm((p − q)₊), the law of the token after a refusal; p where p = q, which is never refused."""
    excess = (p - q).clamp_min(0)
    return torch.where(excess.sum(-1, keepdim=True) > 0, normalised(excess), p)
