"""Exact: what is emitted has the target's law, judged token by token.

p is the target's law, q the draft's. Shapes: B batch rows, N nodes, V vocabulary, F nodes with siblings below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

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
        if laws.tree.probs is None or not laws.sampler.do_sample:
            return laws.chance * laws.tree.shape.drafted
        return chances_in_order(laws, laws.p)

    def rest(self, laws: Laws, node: Tensor) -> Tensor:
        if not laws.sampler.do_sample:  # a child with the likeliest token would have been kept
            return laws.scores_at(node)
        return left_of(laws.p_at(node), laws, node)


def chances_in_order(laws: Laws, p: Tensor, leniency: float = 1.0) -> Tensor:
    """(B, N): sibling after sibling, x kept with probability min(1, p(x) / (leniency · q(x))), by laws p (B, N, V).

    A refusal leaves p as norm((p − q)₊) and q without x. The law of a point mass is one-hot at each x.
    """
    tree, shape = laws.tree, laws.tree.shape
    own, siblings = laws.of_tokens(p), shape.most_siblings > 1
    if tree.probs is None:
        kept = own / leniency
        if siblings:  # p has lost their tokens
            kept = kept / (1 - (shape.elder * own.unsqueeze(1)).sum(2)).clamp_min(tiny(p))
    else:
        q = tree.probs.gather(2, tree.tokens.unsqueeze(2)).squeeze(2)
        kept = own / (q if leniency == 1 else leniency * q).clamp_min(tiny(p))
        if siblings:
            kept = with_younger(kept, laws, p, leniency)
    kept = kept.clamp(max=1) * shape.drafted
    if not siblings:
        return kept
    return kept * torch.where(shape.elder, 1 - kept.unsqueeze(1), 1).prod(2)


def with_younger(kept: Tensor, laws: Laws, p: Tensor, leniency: float) -> Tensor:
    """kept (B, N) with p(x) / (leniency · q(x)) at those that have siblings before them, by what the refusal of these
    leaves of p (B, N, V) and q."""
    tree, (above, children) = laws.tree, laws.tree.shape.families
    assert tree.probs is not None
    tokens = tree.tokens.flatten()[children]  # (F, most)
    left, law = p.flatten(0, 1)[above], tree.probs.flatten(0, 1)[children[:, 0]]  # (F, V)
    made = kept.flatten().clone()
    for rank in range(1, children.shape[1]):
        left, law = refused(left, law, tokens[:, rank - 1 : rank])
        x = tokens[:, rank : rank + 1]
        share = left.gather(1, x) / (leniency * law.gather(1, x)).clamp_min(tiny(law))
        made.index_copy_(0, children[:, rank], share.squeeze(1))  # where there is no child, to a root: not asked for
    return made.view_as(kept)


def left_of(p: Tensor, laws: Laws, node: Tensor) -> Tensor:
    """(B, V) what is left of p (B, V) when all children of node (B,) have been refused: `LevelRule.rest` towards p."""
    tree = laws.tree
    is_child = laws.at(tree.shape.children, node)  # (B, N)
    if tree.probs is None:  # p without their tokens
        left = p.scatter_reduce(1, tree.tokens, (~is_child).to(p.dtype), "prod")
        return torch.where(left.sum(-1, keepdim=True) > 0, left, p)
    any_child, eldest = is_child.max(1)
    law = laws.at(tree.probs, eldest)
    p = torch.where(any_child.unsqueeze(1), residual(p, law), p)
    if tree.is_chain:
        return p
    count, order = is_child.sum(1, keepdim=True), is_child.cumsum(1)
    most = int(count.max()) if count.device.type == "cpu" else tree.shape.most_siblings
    for rank in range(2, most + 1):  # the draft has lost the sibling before
        before = (order < rank - 1).sum(1, keepdim=True).clamp(max=tree.num_nodes - 1)
        law = normalised(law.scatter(1, tree.tokens.gather(1, before), 0))
        p = torch.where(count >= rank, residual(normalised(p), law), p)
    return p


def refused(p: Tensor, law: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """What the refusal of x (R, 1), drawn from law (R, V), leaves of p (R, V) and of the law."""
    return normalised(residual(p, law)), normalised(law.scatter(1, x, 0))


def tiny(like: Tensor) -> float:
    return torch.finfo(like.dtype).tiny


def normalised(weights: Tensor) -> Tensor:
    """Rows scaled to sum 1; an all-zero row stays zero."""
    return weights / weights.sum(-1, keepdim=True).clamp_min(tiny(weights))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """(p − q)₊, the law of the token after a refusal but for a factor; p where p = q, which is never refused."""
    excess = (p - q).clamp_min_(0)
    return torch.where(excess.sum(-1, keepdim=True) > 0, excess, p)
