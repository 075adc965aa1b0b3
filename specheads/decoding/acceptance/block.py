"""Block: verifies a sampled chain as one block, which accepts more tokens than judging them one by one.

p: target probabilities, q: draft probabilities. Shapes: B batch rows, N nodes, V vocabulary.
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

    P₀ = 1, Pᵢ = min(1, Pᵢ₋₁ p/q). With S = Σ(Pᵢ p − q)₊ over the next token, a draw accepts i tokens with probability
    S / (S + 1 − Pᵢ), all of them with the last P; the largest accepted i counts. The next token is drawn from
    norm((Pᵢ p − q)₊), after the whole chain from p. On average it accepts at least as much as `Exact`, to which it
    leaves point masses, where both are equal. ValueError for a sampled tree that branches: see `Traversal`.
    """

    on_device: ClassVar[bool] = True

    name = "block"
    lossless: ClassVar[bool] = True

    def judge(self, target: TargetProbs) -> Verdict:
        tree, sampler = target.tree, target.sampler
        if tree.probs is None:
            return Exact().judge(target)
        drafted = tree.topology.drafted
        node = torch.arange(tree.num_nodes, device=drafted.device)
        if not tree.is_chain:
            raise ValueError("Block judges chains, and this sampled tree branches; accept by Traversal() or Exact()")
        p, q = target.p, tree.probs
        ratio = target.token_probs(p) / tree.drawn_probs()
        reached = [torch.ones_like(ratio[:, 0])]
        for i in range(1, tree.num_nodes):
            reached.append(torch.where(drafted[:, i], (reached[-1] * ratio[:, i]).clamp(max=1).nan_to_num(0), 0))
        path_probs = torch.stack(reached, 1)  # (B, N) the P of each node
        # After the last node nothing was drafted, so all of P p is left.
        ahead = torch.cat([q[:, 1:] * drafted[:, 1:].unsqueeze(2), torch.zeros_like(q[:, :1])], 1)
        left = (path_probs.unsqueeze(2) * p - ahead).clamp_min(0).sum(2)
        # If p is NaN, the draw from it reports that, if the path gets there.
        left = torch.where(left.isnan(), path_probs, left)
        bernoulli = sampler.bernoulli(stop_prob(left, path_probs))
        last = torch.where(bernoulli, node, 0).amax(1)
        row = torch.arange(len(last), device=last.device)
        bonus = residual(path_probs[row, last].unsqueeze(1) * p[row, last], ahead[row, last])
        path = torch.minimum(node, last.unsqueeze(1))[:, : tree.max_depth + 1]
        return Verdict(path, last + 1, target.draw_after(last, bonus))


def stop_prob(left: Tensor, reached: Tensor) -> Tensor:
    """S / (S + 1 − P): the probability that a path reached with P ends at a node with residual mass S = Σ(P p − q)₊.

    1 where S = 0 and P = 1: what was drafted there is never rejected."""
    return (left / stop_norm(left, reached)).nan_to_num(nan=1)


def stop_norm(left: Tensor, reached: Tensor) -> Tensor:
    """S + 1 − P."""
    return left + (1 - reached)  # in this order, so that P = 1 leaves exactly S
