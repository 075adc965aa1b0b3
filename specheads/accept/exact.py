"""Exact: what is emitted has the target's law, judged token by token.

p is the target's law, q the draft's. Shapes: B batch rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specheads.accept.rule import Level, LevelRule, known_all
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

    def choose(self, level: Level, sampler: Sampler) -> tuple[Tensor, Tensor]:
        return towards(level.p, level, sampler)


def towards(p: Tensor, level: Level, sampler: Sampler) -> tuple[Tensor, Tensor]:
    """The child and token as `choose`, such that the token has the law p (R, V), the target's or another."""
    if level.q is not None:
        return judged_in_order(p, level, sampler)
    token = sampler.draw(p)
    found, child = (level.is_child & (level.tokens == token.unsqueeze(1))).max(1)
    return torch.where(found, child, -1), token


def judged_in_order(p: Tensor, level: Level, sampler: Sampler, leniency: float = 1.0) -> tuple[Tensor, Tensor]:
    """Sibling after sibling, x kept with probability min(1, p(x) / (leniency · q(x))); the child and token as `choose`.

    A refusal leaves p as norm((p − q)₊) and q without x. The law of a point mass is one-hot at each x.
    """
    q = level.q
    child = torch.full_like(level.tokens[:, 0], -1)
    order = level.is_child.cumsum(1) * level.is_child  # 1 for the first sibling, 2 for the second …
    for rank in range(1, int(order.max()) + 1):
        judged, node = (order == rank).max(1)
        judged = judged & (child < 0)
        x = level.tokens.gather(1, node.unsqueeze(1))
        law = torch.zeros_like(p).scatter(1, x, 1) if q is None else q
        chance = p.gather(1, x) / (leniency * law.gather(1, x)).clamp_min(torch.finfo(law.dtype).tiny)
        kept = sampler.coin(torch.where(judged, chance.squeeze(1).clamp(max=1), 0))
        child = torch.where(kept, node, child)
        if known_all(child >= 0):
            break
        refused = (judged & ~kept).unsqueeze(1)
        p = torch.where(refused, residual(p, law), p)
        q = q if q is None else torch.where(refused, normalised(q.scatter(1, x, 0)), q)
    return level.followed(child, lambda: sampler.draw(p))


def normalised(weights: Tensor) -> Tensor:
    """Rows scaled to sum 1; an all-zero row stays zero."""
    return weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm((p − q)₊), the law of the token after a refusal; p where p = q, which is never refused."""
    excess = (p - q).clamp_min(0)
    return torch.where(excess.sum(-1, keepdim=True) > 0, normalised(excess), p)
