"""Traversal: block verification of sampled trees, from the leaves up.

p is the target's law, q the draft's. Shapes: B batch rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from specheads.decoding.acceptance.block import Block, stop_norm
from specheads.decoding.acceptance.exact import Exact, normalised, positive_part, tiny
from specheads.decoding.acceptance.marks import path_to
from specheads.decoding.acceptance.rule import Acceptance, TargetProbs, Verdict


@dataclass(frozen=True)
class Traversal(Acceptance):
    """Lossless, for trees and chains. arXiv:2505.12398.

    P is 1 at the root, P(child) = min(1, P(parent) p/q). The first leaf's whole path stands with probability P(leaf).
    Where it falls the leaf goes, and its parent keeps what is left: S = Σ(P p − q)₊, p ← norm((P p − q)₊),
    P ← S / (S + 1 − P), q without the leaf's token; then the next leaf, which may be the parent. The next token is
    drawn from the p of the last node that stands. On a chain it is `Block`. A point mass is walked by `Exact`, which
    is as good there.
    """

    name = "traversal"
    lossless: ClassVar[bool] = True

    def judge(self, laws: TargetProbs) -> Verdict:
        tree = laws.tree
        if tree.probs is None:
            return Exact().judge(laws)
        if tree.is_chain:
            return Block().judge(laws)
        # A node is judged when all before it have fallen, and what it then stands with depends on nothing drawn. So
        # each node's P and P p after the fall of its children, the upper levels first; one draw says which stands.
        topology, sampler = tree.topology, laws.sampler
        tokens, probs = tree.tokens, tree.probs.flatten(0, 1)
        left = sampler.probs_of(laws.scores).flatten(0, 1)  # p till the node loses a child, then P p
        reached = torch.ones_like(left[:, :1])
        for above, child, elder in topology.rejection_order:
            law, mass, before = (
                one.index_select(0, at) for one, at in ((probs, child), (left, above), (reached, above))
            )
            if elder.shape[1]:  # the draft has lost their tokens
                law = normalised(law.scatter_(1, tokens.take(elder), 0))
            else:
                mass.mul_(before)
            x = tokens.take(child.unsqueeze(1))
            reached.index_copy_(
                0, child, (mass.gather(1, x) / law.gather(1, x).clamp_min(tiny(law))).clamp_(max=1).nan_to_num_(0)
            )
            rest, total = positive_part(mass, law)
            norm = stop_norm(total, before).clamp_min(tiny(law))  # 0 where p = q and P = 1: then the child never falls
            reached.index_copy_(
                0, above, torch.where(total.isnan(), before, total / norm)
            )  # if it stands, it is told of
            left.index_copy_(0, above, rest.div_(norm))
        stands = reached.view_as(tokens).gather(1, topology.postorder)  # the root for sure, unused slots behind it
        fallen = torch.cat([torch.ones_like(stands[:, :1]), (1 - stands)[:, :-1]], 1).cumprod(1)
        end = topology.postorder.gather(1, sampler.draw(stands * fallen).unsqueeze(1)).squeeze(1)
        return Verdict(*path_to(tree, end), sampler.draw(left.index_select(0, laws.place(end))))
