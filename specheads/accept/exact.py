"""Exact: what is emitted has the target's law, judged token by token.

p is the target's law, q the draft's. Shapes: B batch rows, N nodes, V vocabulary, F nodes with siblings below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specheads import host
from specheads.accept.rule import Laws, LevelRule
from specheads.sampling import Sampler


@dataclass(frozen=True)
class Exact(LevelRule):
    """Lossless: what is emitted has the target's law.

    A point-mass draft takes the sample walk: draw y from p, descend if a child carries y. Sampled children are
    judged in order, x kept with probability min(1, p(x)/q(x)), p becoming norm((p − q)₊) and q losing x at each
    refusal. SpecInfer arXiv:2305.09781, Sequoia arXiv:2402.12374.
    """

    lossless: ClassVar[bool] = True

    def is_exact(self, sampler: Sampler) -> bool:
        return True

    def chances(self, laws: Laws) -> Tensor:
        if laws.sampler.do_sample:
            return chances_in_order(laws, laws.p)
        return laws.chance * laws.tree.shape.drafted

    def rest(self, laws: Laws, node: Tensor) -> Tensor:
        if not laws.sampler.do_sample:  # a child with the likeliest token would have been kept
            return laws.scores_at(node)
        return left_of(laws.p_at(node), laws, node)


def chances_in_order(laws: Laws, p: Tensor, leniency: float = 1.0) -> Tensor:
    """(B, N): sibling after sibling, x kept with probability min(1, p(x) / (leniency · q(x))), by laws p (B, N, V).

    A refusal leaves p as norm((p − q)₊) and q without x. The law of a point mass is one-hot at each x.
    """
    tree, own, siblings = laws.tree, laws.of_tokens(p), not laws.tree.is_chain
    if tree.probs is None:
        share = own / leniency
        if siblings:  # p has lost their tokens
            share = share / (1 - (tree.shape.elder * own.unsqueeze(1)).sum(2)).clamp_min(tiny(p))
    else:
        q = tree.probs.gather(2, tree.tokens.unsqueeze(2)).squeeze(2)
        share = own / (q if leniency == 1 else leniency * q).clamp_min(tiny(p))
        if siblings:
            share = with_younger(share, laws, p, leniency)
    return torch.minimum(share, tree.shape.ceiling)


def with_younger(share: Tensor, laws: Laws, p: Tensor, leniency: float) -> Tensor:
    """share (B, N), p(x) / (leniency · q(x)), with that of those that have siblings before them, by what the refusal of
    these leaves of p (B, N, V) and q."""
    tree, (above, children) = laws.tree, laws.tree.shape.families
    assert tree.probs is not None
    tokens = tree.tokens.take(children)  # (F, most)
    left = p.flatten(0, 1).index_select(0, above)  # (F, V)
    law = tree.probs.flatten(0, 1).index_select(0, children[:, 0])
    made, most = share.flatten(), children.shape[1]
    for rank in range(1, most):
        x, y = tokens[:, rank - 1 : rank], tokens[:, rank : rank + 1]  # the one refused and the next
        left, left_mass = surplus(left, law)
        law.scatter_(1, x, 0)
        law_mass = law.sum(1, keepdim=True)
        own, drawn = left.gather(1, y) * law_mass, left_mass * (leniency * law.gather(1, y))
        # Where there is no child it goes to a root, which nobody asks for.
        made = made.index_copy(0, children[:, rank], (own / drawn.clamp_min(tiny(law))).squeeze(1))
        if rank + 1 < most:
            left.div_(left_mass.clamp_min(tiny(law)))
            law.div_(law_mass.clamp_min(tiny(law)))
    return made.view_as(share)


def left_of(p: Tensor, laws: Laws, node: Tensor) -> Tensor:
    """(B, V) what is left of p (B, V) when all children of node (B,) have been refused: `LevelRule.rest` towards p."""
    tree = laws.tree
    if tree.probs is None:  # p without their tokens
        is_child = laws.at(tree.shape.children, node)
        left = p.scatter_reduce(1, tree.tokens, (~is_child).to(p.dtype), "prod")
        return torch.where(left.sum(-1, keepdim=True) > 0, left, p)
    kids = tree.shape.kids.index_select(0, laws.place(node))  # (B, most)
    has = kids > 0
    fewest, most = 0, kids.shape[1]
    if host.reads(kids):
        counts = [sum(row) for row in has.tolist()]
        fewest, most = min(counts), max(counts)
    law = tree.probs.flatten(0, 1).index_select(0, kids[:, 0])
    for rank in range(most):
        if rank > 0:  # the draft has lost the sibling before
            p, law = normalised(p), normalised(law.scatter(1, tree.tokens.take(kids[:, rank - 1 : rank]), 0))
        p = residual(p, law if rank < fewest else law * has[:, rank : rank + 1])
    return p


def tiny(like: Tensor) -> float:
    return torch.finfo(like.dtype).tiny


def normalised(weights: Tensor) -> Tensor:
    """Rows scaled to sum 1; an all-zero row stays zero."""
    return weights / weights.sum(-1, keepdim=True).clamp_min(tiny(weights))


def surplus(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """(p − q)₊ and, of each row, its sum (…, 1)."""
    left = (p - q).clamp_min_(0)
    return left, left.sum(-1, keepdim=True)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """(p − q)₊, the law of the token after a refusal but for a factor; p where p = q, which is never refused."""
    left, mass = surplus(p, q)
    if host.reads(mass) and min(mass.flatten().tolist()) > 0:
        return left
    return torch.where(mass > 0, left, p)
