"""Traversal: block verification of sampled trees, from the leaves up.

p is the target's law, q the draft's. Shapes: B batch rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from specheads.accept.block import Block, stop_chance
from specheads.accept.exact import Exact, refused, tiny
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
        # node's p, q and P after the fall of its children, the upper levels first, and one draw says which node stands.
        tokens, every = tree.tokens.flatten().unsqueeze(1), tree.probs.flatten(0, 1)
        p = laws.p.flatten(0, 1).clone()
        q, reached = torch.empty_like(p), torch.ones_like(p[:, :1])
        for above, child, eldest in shape.falls:
            law, mass = every[child] if eldest else q[above], reached[above] * p[above]
            x = tokens[child]
            reached[child] = (mass.gather(1, x) / law.gather(1, x).clamp_min(tiny(p))).clamp(max=1)
            left = (mass - law).clamp_min(0).sum(1, keepdim=True)
            reached[above] = stop_chance(left, reached[above])
            p[above], q[above] = refused(mass, law, x)
        stands = reached.view_as(tree.tokens).gather(1, shape.leaves_first)  # the root for sure, unused slots behind it
        fallen = torch.cat([torch.ones_like(stands[:, :1]), (1 - stands)[:, :-1]], 1).cumprod(1)
        end = shape.leaves_first.gather(1, sampler.draw(stands * fallen).unsqueeze(1)).squeeze(1)
        return Verdict(*path_to(tree, end), sampler.draw(laws.at(p.view_as(laws.p), end)))
