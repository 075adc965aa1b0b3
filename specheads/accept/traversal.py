"""Traversal: block verification of sampled trees, from the leaves up.

p is the target's law, q the draft's. Shapes: B batch rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from specheads.accept.block import Block, stop_chance
from specheads.accept.exact import Exact, normalised, surplus, tiny
from specheads.accept.paths import path_to, walk
from specheads.accept.rule import Laws, PathRule, Verdict
from specheads.sampling import Sampler


@dataclass(frozen=True)
class Traversal(PathRule):
    """Lossless, for trees and chains. arXiv:2505.12398.

    P is 1 at the root, P(child) = min(1, P(parent) p/q). The first leaf's whole path stands with probability P(leaf).
    Where it falls the leaf goes, and its parent keeps what is left: S = Σ(P p − q)₊, p ← norm((P p − q)₊),
    P ← S / (S + 1 − P), q without the leaf's token; then the next leaf, which may be the parent. The next token is
    drawn from the p of the last node that stands. On a chain it is `Block`. A point mass is walked by `Exact`, which
    is as good there.
    """

    lossless: ClassVar[bool] = True

    def judge(self, laws: Laws, sampler: Sampler) -> Verdict:
        tree, shape = laws.tree, laws.tree.shape
        if tree.probs is None:
            return walk(tree, laws.logits, Exact(), sampler, laws.history)
        if tree.is_chain:
            return Block().judge(laws, sampler)
        # A node is judged when all before it have fallen, and what it then stands with depends on nothing drawn: each
        # node's p and P after the fall of its children, the upper levels first, and one draw says which node stands.
        tokens, probs = tree.tokens, tree.probs.flatten(0, 1)
        p = sampler.law_of(laws.scores).flatten(0, 1)  # written to below
        reached = torch.ones_like(p[:, :1])
        for above, child, elder in shape.falls:
            law = probs.index_select(0, child)
            if elder.shape[1]:  # the draft has lost their tokens
                law = normalised(law.scatter_(1, tokens.take(elder), 0))
            before = reached.index_select(0, above)
            mass, x = p.index_select(0, above).mul_(before), tokens.take(child.unsqueeze(1))
            reached.index_copy_(0, child, (mass.gather(1, x) / law.gather(1, x).clamp_min(tiny(p))).clamp(max=1))
            left, rest = surplus(mass, law)
            reached.index_copy_(0, above, stop_chance(rest, before))
            p.index_copy_(0, above, torch.where(rest > 0, left / rest.clamp_min(tiny(p)), mass))
        stands = reached.view_as(tree.tokens).gather(1, shape.leaves_first)  # the root for sure, unused slots behind it
        fallen = torch.cat([torch.ones_like(stands[:, :1]), (1 - stands)[:, :-1]], 1).cumprod(1)
        end = shape.leaves_first.gather(1, sampler.draw(stands * fallen).unsqueeze(1)).squeeze(1)
        return Verdict(*path_to(tree, end), sampler.draw(p.index_select(0, laws.place(end))))
