"""walk(), by which every rule judges a tree, and Exact: token by token, so that text has the target's distribution.

p: target probabilities, q: draft probabilities. Shapes: B batch rows, N nodes, V vocabulary, F nodes with several
children.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from specheads.decoding.acceptance.rule import Acceptance, LevelRule, TargetProbs, Verdict, accepted_path
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree


@dataclass(frozen=True)
class Exact(LevelRule):
    """Lossless: emitted text has the target's distribution.

    Point-mass drafts: each node draws its next token from p, and the path continues while a child has that token; the
    text is the one that the same random numbers give without drafts. Sampled children are judged in order: x is
    accepted with probability min(1, p(x)/q(x)); after a rejection p becomes norm((p − q)₊), and q loses x. SpecInfer
    arXiv:2305.09781, Sequoia arXiv:2402.12374.
    """

    on_device: ClassVar[bool] = True

    name = "exact"
    lossless: ClassVar[bool] = True

    def is_exact(self, sampler: Sampler) -> bool:
        return True

    def judge(self, target: TargetProbs) -> Verdict:
        if target.sampler.do_sample and target.tree.probs is not None:
            return super().judge(target)
        if target.sampler.needs_prefix:
            return follow_node_by_node(target)
        return follow_tokens(target, *target.draws)

    def accept_mask(self, target: TargetProbs) -> Tensor:
        return draw_accept_mask(target, target.p)

    def bonus_weights(self, target: TargetProbs, node: Tensor) -> Tensor:
        if not target.sampler.do_sample:  # a child with the likeliest token would have been accepted
            return target.scores_at(node)
        return residual_after_rejections(target.p_at(node), target, node)


def follow_tokens(target: TargetProbs, token: Tensor, finite: Tensor) -> Verdict:
    """The path on which each node has the token (B, N) drawn at its parent; finite (B, N): could it be drawn?"""
    path, length, end = accepted_path(target.tree, target.at_parent(token) == target.tree.tokens)
    if target.sampler.do_sample:
        target.sampler.note_finite(finite.gather(1, path))
    return Verdict(path, length, target.at(token, end))


def follow_node_by_node(target: TargetProbs) -> Verdict:
    """The same path for processors that depend on the prefix: they are called only for the nodes on it."""
    tree = target.tree
    end = token = torch.zeros_like(tree.tokens[:, 0])
    going = torch.ones_like(end, dtype=torch.bool)
    path, length = [end], torch.ones_like(end)
    for depth in range(tree.max_depth + 1):
        token = torch.where(going, target.draw_at(end), token)
        found, child = (target.at(tree.topology.children, end) & (tree.tokens == token.unsqueeze(1))).max(1)
        going = going & found
        if depth == tree.max_depth or not bool(going.any()):  # prefixes are read on the host anyway
            break
        end = torch.where(going, child, end)
        length = length + going
        path.append(end)
    path += path[-1:] * (tree.max_depth + 1 - len(path))
    return Verdict(torch.stack(path, 1), length, token)


def draw_accept_mask(target: TargetProbs, p: Tensor, leniency: float = 1.0) -> Tensor:
    """(B, N) bool: siblings in order, x is accepted with probability min(1, p(x) / (leniency · q(x))); p (B, N, V).

    After a rejection p becomes norm((p − q)₊), and q loses x. The q of a point mass is one-hot at each x.
    """
    return target.sampler.bernoulli(accept_probs(target, p, leniency))


def accept_probs(target: TargetProbs, p: Tensor, leniency: float = 1.0) -> Tensor:
    """(B, N) the probability (≥ 1: certain) that a node is accepted, given that its parent is, and no earlier sibling.

    Meaningless at the root and at unused slots."""
    tree, own = target.tree, target.token_probs(p)
    if tree.probs is None:
        ratio = own / leniency
        if not tree.is_chain:  # p has lost the tokens of earlier siblings
            ratio = ratio / (1 - (tree.topology.earlier_siblings * own.unsqueeze(1)).sum(2)).clamp_min(tiny(p))
        return ratio
    q = tree.drawn_probs()  # above 0 for what was drawn
    ratio = own / (q if leniency == 1 else leniency * q)
    if not tree.siblings_drawn:
        return ratio
    return torch.where(tree.topology.first_siblings, ratio, later_accept_probs(target, p, leniency))


def later_accept_probs(target: TargetProbs, p: Tensor, leniency: float = 1.0) -> Tensor:
    """(B, N) `accept_probs` of the nodes drawn after a sibling; meaningless at others."""
    tree, (parent, siblings) = target.tree, target.tree.topology.sibling_groups
    assert tree.probs is not None
    left = p.flatten(0, 1).index_select(0, parent)  # (F, V)
    q = tree.probs.flatten(0, 1).index_select(0, siblings[0])
    found, x = left.new_zeros(tree.tokens.numel()), tree.tokens.take(siblings[0]).unsqueeze(1)
    for rank, child in enumerate(siblings[1:], 1):
        left, left_mass = positive_part(left, q)  # x was rejected
        q.scatter_(1, x, 0)
        q_mass, x = q.sum(1, keepdim=True), tree.tokens.take(child).unsqueeze(1)
        p_x, q_x = left.gather(1, x) * q_mass, q.gather(1, x) * left_mass
        ratio = p_x / (q_x if leniency == 1 else leniency * q_x).clamp_min(tiny(q))
        found.index_copy_(0, child, ratio.squeeze(1))  # a missing child writes to a root's entry, which is not read
        if rank + 1 < len(siblings):
            left.div_(left_mass.clamp_min(tiny(q)))
            q.div_(q_mass.clamp_min(tiny(q)))
    return found.view_as(tree.tokens)


def residual_after_rejections(p: Tensor, target: TargetProbs, node: Tensor) -> Tensor:
    """(B, V) the residual of p (B, V) once all children of node (B,) are rejected: `bonus_weights` of an exact rule."""
    tree = target.tree
    if tree.probs is None:  # p without their tokens
        is_child = target.at(tree.topology.children, node)
        left = p.scatter_reduce(1, tree.tokens, (~is_child).to(p.dtype), "prod")
        return with_fallback(left, left.sum(-1, keepdim=True), p)
    children = tree.topology.child_table.index_select(0, target.flat_index(node))  # (B, most children)
    q = tree.probs.flatten(0, 1).index_select(0, children[:, 0])
    for rank in range(children.shape[1]):
        if rank > 0:  # q loses the previous sibling, and is scaled to p's remaining mass
            q = q.scatter(1, tree.tokens.take(children[:, rank - 1 : rank]), 0)
            q *= p.sum(1, keepdim=True) / q.sum(1, keepdim=True).clamp_min(tiny(q))
        p = residual(p, q * (children[:, rank : rank + 1] > 0))
    return p


def tiny(like: Tensor) -> float:
    return torch.finfo(like.dtype).tiny


def normalised(weights: Tensor) -> Tensor:
    """Rows scaled to sum 1; an all-zero row stays zero."""
    return weights / weights.sum(-1, keepdim=True).clamp_min(tiny(weights))


def positive_part(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """(p − q)₊, and the sum of each row (…, 1)."""
    left = (p - q).clamp_min_(0)
    return left, left.sum(-1, keepdim=True)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """(p − q)₊, the unnormalised distribution of the token after a rejection; p if p = q, where nothing is rejected."""
    return with_fallback(*positive_part(p, q), p)


def with_fallback(left: Tensor, mass: Tensor, p: Tensor) -> Tensor:
    """Rows of left, or of p where their mass (…, 1) is 0."""
    return torch.where(mass > 0, left, p)


def walk(
    tree: DraftTree,
    logits: Tensor,
    accept: Acceptance,
    sampler: Sampler,
    history: Sequence[Sequence[int]] = (),
    *,
    ends: Tensor | None = None,
    numbers: Tensor | None = None,
    keep_scores: bool = False,
    keep_divergences: bool = False,
) -> Verdict:
    """The rule's verdict on the tree, for all rows at once.

    logits (B, N, V): the target's. history, ends, numbers: as in `TargetProbs`. keep_scores: include the scores of each
    token. keep_divergences: include those of every node, from a rule that measures them.
    """
    target = TargetProbs(tree, logits, sampler, history, ends, numbers)
    rule = Exact() if tree.num_nodes == 1 or accept.is_exact(sampler) else accept
    verdict = rule.judge(target)
    if keep_divergences and tree.num_nodes > 1:
        # After the verdict: a "random" divergence draws numbers, and must not change those that the rule draws.
        verdict = replace(verdict, divergences=accept.divergences(target))
    if not keep_scores:
        return verdict
    return replace(verdict, scores=tuple((target.at(logits, node), target.scores_at(node)) for node in verdict.path.T))
