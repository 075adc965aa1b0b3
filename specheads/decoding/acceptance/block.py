"""Block: verification of a sampled chain as one block, which accepts more tokens than one by one.

p is the target's law, q the draft's. Shapes: B batch rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specheads.decoding.acceptance.exact import Exact, residual
from specheads.decoding.acceptance.rule import Acceptance, TargetProbs, Verdict


@dataclass(frozen=True)
class Block(Acceptance):
    """Lossless, for chains. arXiv:2403.10444.

    P₀ = 1, Pᵢ = min(1, Pᵢ₋₁ p/q); with S = Σ(Pᵢ p − q)₊ over the next token, i tokens stand with probability
    S / (S + 1 − Pᵢ), all of them with the last P. The most for which a coin says so are kept, and the next token is
    drawn from norm((Pᵢ p − q)₊), behind the whole chain from p. Never accepts less than `Exact` on average. A point
    mass is walked by `Exact`, which is as good there. ValueError for a sampled tree that branches: see `Traversal`.
    """

    name = "block"
    lossless: ClassVar[bool] = True

    def judge(self, laws: TargetProbs) -> Verdict:
        tree, sampler = laws.tree, laws.sampler
        if tree.probs is None:
            return Exact().judge(laws)
        drafted = tree.topology.drafted
        node = torch.arange(tree.num_nodes, device=drafted.device)
        if not tree.is_chain:
            raise ValueError("Block judges chains, and this sampled tree branches; accept by Traversal() or Exact()")
        p, q = laws.p, tree.probs
        share = laws.of_tokens(p) / tree.drawn_probs()
        reached = [torch.ones_like(share[:, 0])]
        for i in range(1, tree.num_nodes):
            reached.append(torch.where(drafted[:, i], (reached[-1] * share[:, i]).clamp(max=1).nan_to_num(0), 0))
        chance = torch.stack(reached, 1)  # (B, N) the P of each node
        # Behind the last node nothing was drafted, so all of P p is left over.
        ahead = torch.cat([q[:, 1:] * drafted[:, 1:].unsqueeze(2), torch.zeros_like(q[:, :1])], 1)
        left = (chance.unsqueeze(2) * p - ahead).clamp_min(0).sum(2)
        left = torch.where(
            left.isnan(), chance, left
        )  # a law that is no number, of which its draw tells if it is reached
        bernoulli = sampler.bernoulli(stop_chance(left, chance))
        last = torch.where(bernoulli, node, 0).amax(1)
        row = torch.arange(len(last), device=last.device)
        bonus = residual(chance[row, last].unsqueeze(1) * p[row, last], ahead[row, last])
        path = torch.minimum(node, last.unsqueeze(1))[:, : tree.max_depth + 1]
        return Verdict(path, last + 1, sampler.draw(bonus))


def stop_chance(left: Tensor, reached: Tensor) -> Tensor:
    """S / (S + 1 − P): how likely a path that is reached with P stands by itself, where S is left over of P p behind
    what was drafted there. 1 where S = 0 and P = 1: what was drafted then never falls."""
    return (left / stop_norm(left, reached)).nan_to_num(nan=1)


def stop_norm(left: Tensor, reached: Tensor) -> Tensor:
    """S + 1 − P."""
    return left + (1 - reached)  # in this order, so that P = 1 leaves exactly S
