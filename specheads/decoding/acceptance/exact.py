"""Exact: what is emitted has the target's law, judged token by token.

p is the target's law, q the draft's. Shapes: B batch rows, N nodes, V vocabulary, F nodes with siblings below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specheads.decoding.acceptance.marks import kept_path
from specheads.decoding.acceptance.rule import LevelRule, TargetProbs, Verdict
from specheads.decoding.sampler import Sampler


@dataclass(frozen=True)
class Exact(LevelRule):
    """Lossless: what is emitted has the target's law.

    Of a point-mass draft each node draws what follows it from p, and the path goes on while a child carries that: the
    text is the one that the same numbers give without drafts. Sampled children are judged in order, x kept with
    probability min(1, p(x)/q(x)), p becoming norm((p − q)₊) and q losing x at each refusal. SpecInfer
    arXiv:2305.09781, Sequoia arXiv:2402.12374.
    """

    name = "exact"
    lossless: ClassVar[bool] = True

    def is_exact(self, sampler: Sampler) -> bool:
        return True

    def judge(self, laws: TargetProbs) -> Verdict:
        if laws.sampler.do_sample and laws.tree.probs is not None:
            return super().judge(laws)
        if laws.sampler.needs_prefix:
            return node_by_node(laws)
        return path_of_tokens(laws, laws.drawn)

    def kept(self, laws: TargetProbs) -> Tensor:
        return kept_in_order(laws, laws.p)

    def rest(self, laws: TargetProbs, node: Tensor) -> Tensor:
        if not laws.sampler.do_sample:  # a child with the likeliest token would have been kept
            return laws.scores_at(node)
        return residual_after_children(laws.p_at(node), laws, node)


def path_of_tokens(laws: TargetProbs, token: Tensor) -> Verdict:
    """The path along which each node carries the token (B, N) that follows its parent."""
    path, length, end = kept_path(laws.tree, laws.at_parent(token) == laws.tree.tokens)
    if laws.sampler.do_sample:  # a law that is no number is none in its first place too
        laws.sampler.note_finite(~laws.p[..., 0].gather(1, path).isnan())
    return Verdict(path, length, laws.at(token, end))


def node_by_node(laws: TargetProbs) -> Verdict:
    """The same path for processors that look at the prefix, of which only the nodes on it are asked."""
    tree = laws.tree
    end = token = torch.zeros_like(tree.tokens[:, 0])
    going = torch.ones_like(end, dtype=torch.bool)
    path, length = [end], torch.ones_like(end)
    for depth in range(tree.max_depth + 1):
        token = torch.where(going, laws.draw_at(end), token)
        found, child = (laws.at(tree.topology.children, end) & (tree.tokens == token.unsqueeze(1))).max(1)
        going = going & found
        if depth == tree.max_depth or not bool(going.any()):  # prefixes are read on the host in any case
            break
        end = torch.where(going, child, end)
        length = length + going
        path.append(end)
    path += path[-1:] * (tree.max_depth + 1 - len(path))
    return Verdict(torch.stack(path, 1), length, token)


def kept_in_order(laws: TargetProbs, p: Tensor, leniency: float = 1.0) -> Tensor:
    """(B, N) bool: sibling after sibling, x is kept with probability min(1, p(x) / (leniency · q(x))), by laws p
    (B, N, V).

    A refusal leaves p as norm((p − q)₊) and q without x. The law of a point mass is one-hot at each x.
    """
    return laws.sampler.bernoulli(chances_in_order(laws, p, leniency))


def chances_in_order(laws: TargetProbs, p: Tensor, leniency: float = 1.0) -> Tensor:
    """(B, N) how likely each node is kept where its parent is and no sibling before it, for sure from 1 on. Of the root
    and unused slots it says nothing."""
    tree, own = laws.tree, laws.of_tokens(p)
    if tree.probs is None:
        share = own / leniency
        if not tree.is_chain:  # p has lost their tokens
            share = share / (1 - (tree.topology.earlier_siblings * own.unsqueeze(1)).sum(2)).clamp_min(tiny(p))
        return share
    q = tree.drawn_probs()  # above 0 for what was drawn
    share = own / (q if leniency == 1 else leniency * q)
    return (
        torch.where(tree.topology.first, share, later_sibling_chances(laws, p, leniency))
        if tree.siblings_drawn
        else share
    )


def later_sibling_chances(laws: TargetProbs, p: Tensor, leniency: float = 1.0) -> Tensor:
    """(B, N) as `chances_in_order`, of the nodes that were drawn after a sibling; of others it says nothing."""
    tree, (above, siblings) = laws.tree, laws.tree.topology.sibling_groups
    assert tree.probs is not None
    left = p.flatten(0, 1).index_select(0, above)  # (F, V)
    law = tree.probs.flatten(0, 1).index_select(0, siblings[0])
    made, x = left.new_zeros(tree.tokens.numel()), tree.tokens.take(siblings[0]).unsqueeze(1)
    for rank, child in enumerate(siblings[1:], 1):
        left, left_mass = positive_part(left, law)  # x was refused
        law.scatter_(1, x, 0)
        law_mass, x = law.sum(1, keepdim=True), tree.tokens.take(child).unsqueeze(1)
        own, drawn = left.gather(1, x) * law_mass, law.gather(1, x) * left_mass
        chance = own / (drawn if leniency == 1 else leniency * drawn).clamp_min(tiny(law))
        made.index_copy_(0, child, chance.squeeze(1))  # of no child to a root, which nobody asks for
        if rank + 1 < len(siblings):
            left.div_(left_mass.clamp_min(tiny(law)))
            law.div_(law_mass.clamp_min(tiny(law)))
    return made.view_as(tree.tokens)


def residual_after_children(p: Tensor, laws: TargetProbs, node: Tensor) -> Tensor:
    """(B, V) what is left of p (B, V) when all children of node (B,) have been refused: `LevelRule.rest` towards p."""
    tree = laws.tree
    if tree.probs is None:  # p without their tokens
        is_child = laws.at(tree.topology.children, node)
        left = p.scatter_reduce(1, tree.tokens, (~is_child).to(p.dtype), "prod")
        return or_fallback(left, left.sum(-1, keepdim=True), p)
    kids = tree.topology.child_table.index_select(0, laws.place(node))  # (B, most)
    law = tree.probs.flatten(0, 1).index_select(0, kids[:, 0])
    for rank in range(kids.shape[1]):
        if rank > 0:  # the draft has lost the sibling before, and weighs what p does
            law = law.scatter(1, tree.tokens.take(kids[:, rank - 1 : rank]), 0)
            law *= p.sum(1, keepdim=True) / law.sum(1, keepdim=True).clamp_min(tiny(law))
        p = residual(p, law * (kids[:, rank : rank + 1] > 0))
    return p


def tiny(like: Tensor) -> float:
    return torch.finfo(like.dtype).tiny


def normalised(weights: Tensor) -> Tensor:
    """Rows scaled to sum 1; an all-zero row stays zero."""
    return weights / weights.sum(-1, keepdim=True).clamp_min(tiny(weights))


def positive_part(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """(p − q)₊ and, of each row, its sum (…, 1)."""
    left = (p - q).clamp_min_(0)
    return left, left.sum(-1, keepdim=True)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """(p − q)₊, the law of the token after a refusal but for a factor; p where p = q, which is never refused."""
    return or_fallback(*positive_part(p, q), p)


def or_fallback(left: Tensor, mass: Tensor, p: Tensor) -> Tensor:
    """Rows of left, and of p where their mass (…, 1) is none."""
    return torch.where(mass > 0, left, p)
