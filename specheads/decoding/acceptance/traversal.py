"""Traversal: block verification of sampled trees, from the leaves up.

p: target probabilities, q: draft probabilities. Shapes: B batch rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from specheads.decoding.acceptance.block import Block, stop_norm
from specheads.decoding.acceptance.exact import Exact, normalised, positive_part, tiny
from specheads.decoding.acceptance.rule import Acceptance, TargetProbs, Verdict, path_to


@dataclass(frozen=True)
class Traversal(Acceptance):
    """Lossless, for trees and chains. arXiv:2505.12398.

    P is 1 at the root, P(child) = min(1, P(parent) p/q). The first leaf's whole path is accepted with probability
    P(leaf). If it is rejected, the leaf is dropped and its parent gets the residual: S = Σ(P p − q)₊,
    p ← norm((P p − q)₊), P ← S / (S + 1 − P), q without the leaf's token. Then comes the next leaf, which may be the
    parent. The next token is drawn from the p of the accepted node. On a chain it is `Block`. Point masses are judged
    by `Exact`, which is as good there.
    """

    on_device: ClassVar[bool] = True

    name = "traversal"
    lossless: ClassVar[bool] = True

    def judge(self, target: TargetProbs) -> Verdict:
        tree = target.tree
        if tree.probs is None:
            return Exact().judge(target)
        if tree.is_chain:
            return Block().judge(target)
        # A node is judged once all before it in post-order are rejected, so its P depends on no random draw. Compute
        # each node's P, and its P p after the rejection of its children, top down; one draw then picks the accepted
        # node.
        topology, sampler = tree.topology, target.sampler
        tokens, probs = tree.tokens, tree.probs.flatten(0, 1)
        left = sampler.probs_of(target.scores).flatten(0, 1)  # p until the node loses a child, then P p
        reached = torch.ones_like(left[:, :1])
        drafted = None if topology.whole is None else topology.drafted.view(-1, 1)
        for parent, child, earlier in topology.rejection_order:
            q, left_p = probs.index_select(0, child), left.index_select(0, parent)
            reached_before = reached.index_select(0, parent)
            if earlier.shape[1]:  # q has lost the tokens of earlier siblings
                q = normalised(q.scatter_(1, tokens.take(earlier), 0))
            else:
                left_p.mul_(reached_before)
            x = tokens.take(child.unsqueeze(1))
            accept_prob = (left_p.gather(1, x) / q.gather(1, x).clamp_min(tiny(q))).clamp_(max=1)
            if drafted is not None:  # an unused slot is not accepted, and takes nothing from its parent
                q, accept_prob = q * drafted[child], accept_prob * drafted[child]
            reached.index_copy_(0, child, accept_prob.nan_to_num_(0))
            excess, total = positive_part(left_p, q)
            norm = stop_norm(total, reached_before).clamp_min(tiny(q))  # 0 where p = q and P = 1: never rejected
            # If p is NaN, P stays: if the node is accepted, the draw from p reports it.
            reached.index_copy_(0, parent, torch.where(total.isnan(), reached_before, total / norm))
            left.index_copy_(0, parent, excess.div_(norm))
        accept_probs = reached.view_as(tokens).gather(1, topology.postorder)  # 1 at the root, then unused slots
        none_before = torch.cat([torch.ones_like(accept_probs[:, :1]), (1 - accept_probs)[:, :-1]], 1).cumprod(1)
        end = topology.postorder.gather(1, sampler.draw(accept_probs * none_before).unsqueeze(1)).squeeze(1)
        return Verdict(*path_to(tree, end), target.draw_after(end, left.index_select(0, target.flat_index(end))))
