"""Traversal: block verification of sampled trees, from the leaves up.

p is the target's law, q the draft's. Shapes: B batch rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from specheads.accept.block import Block, is_chain, stop_chance
from specheads.accept.exact import Exact, normalised, residual
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
        tree, parents = laws.tree, laws.tree.parents
        if tree.probs is None:
            return walk(tree, laws.logits, Exact(), sampler, laws.history)
        if is_chain(tree):
            return Block().judge(laws, sampler)
        row = torch.arange(len(parents), device=parents.device)
        first_child = (parents.unsqueeze(1) == torch.arange(tree.num_nodes, device=row.device).unsqueeze(1)).max(2)
        p, q = laws.p.clone(), tree.probs[row.unsqueeze(1), first_child.indices]  # q of each node's children
        reached = torch.ones_like(p[..., 0])  # (B, N) the P of each node
        waiting = tree.shape.drafted.clone()
        node, settled = torch.zeros_like(row), torch.zeros_like(row, dtype=torch.bool)
        # Each round a row goes down to a child or judges a leaf, which goes if it falls: each node at most once.
        for _ in range(2 * tree.num_nodes - 1):
            inner, child = (waiting & (parents == node.unsqueeze(1))).max(1)
            token = tree.tokens[row, child]
            share = p[row, node, token] / q[row, node, token].clamp_min(torch.finfo(q.dtype).tiny)
            below = (reached[row, node] * share).clamp(max=1)
            reached[row, child] = torch.where(inner, below, reached[row, child])
            leaf = ~inner & ~settled
            stands = sampler.coin(torch.where(leaf, reached[row, node], 0)) & leaf
            falls, above = leaf & ~stands, tree.shape.above[row, node]
            settled = settled | stands
            on_cpu = falls.device.type == "cpu"  # where asking costs nothing
            if on_cpu and settled.all():
                break
            if not on_cpu or falls.any():
                part, gone = falls.unsqueeze(1), tree.tokens[row, node].unsqueeze(1)
                mass, law = reached[row, above].unsqueeze(1) * p[row, above], q[row, above]
                left = stop_chance((mass - law).clamp_min(0).sum(1), reached[row, above])
                p[row, above] = torch.where(part, residual(mass, law), p[row, above])
                q[row, above] = torch.where(part, normalised(law.scatter(1, gone, 0)), law)
                reached[row, above] = torch.where(falls, left, reached[row, above])
                waiting[row, node] = waiting[row, node] & ~falls
            node = torch.where(settled, node, torch.where(inner, child, torch.where(falls, above, node)))
        return Verdict(*path_to(tree, node), sampler.draw(p[row, node]))
