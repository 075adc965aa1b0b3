"""Trees of the likeliest nodes, by the draft probability of each node's whole path: best first, and EAGLE-2's.

Shapes: B batch rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specheads.decoding.planner.plan import MAX_NODES, MAX_SLOTS, Expand, require_at_most, require_positive
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree
from specheads.decoding.tree.topology import cached_property
from specheads.options import require_whole


@dataclass(frozen=True)
class BestFirstTree:
    """The budget − 1 likeliest nodes, at most `depth` levels deep and with at most `width` children each: the tree with
    the most expected accepted tokens under the draft probabilities.

    budget: nodes, root included; fewer where width and depth allow no more. beams: the most nodes to expand per level,
    likeliest first; None for all that can have a child in the tree. Cheap for drafters that need no forward pass per
    level. JetSpec, arXiv:2606.18394, over the marginals of a block.
    """

    budget: int = 64
    depth: int = 8
    width: int = 7
    beams: int | None = None

    def __post_init__(self) -> None:
        for name in ("depth", "width"):
            require_at_most(name, getattr(self, name), MAX_NODES - 1)
        require_whole("budget", self.budget)
        if not 2 <= self.budget <= MAX_NODES:
            raise ValueError(f"budget={self.budget} must be 2 (the root and a draft) to {MAX_NODES} nodes")
        if self.beams is not None:
            require_positive("beams", self.beams)

    @cached_property
    def level_beams(self) -> tuple[int, ...]:
        """How many nodes of each level below the root are expanded."""
        beams, candidates = [], self.width
        for level in range(1, self.depth):
            # If a node of this level has a child in the tree, `level` other nodes are in it too: the level − 1 above,
            # and the child. A node with budget − 1 − level likelier ones on its level thus has no child in the tree.
            count = min(candidates, self.budget - 1 - level, self.beams or candidates)
            if count < 1:
                break
            beams.append(count)
            candidates = count * self.width
        return tuple(beams)

    @property
    def num_nodes(self) -> int:
        return min(self.budget, 1 + self.width * (1 + sum(self.level_beams)))

    @property
    def drafting_slots(self) -> int:
        return sum(self.level_beams)

    def limited(self, depth: int) -> BestFirstTree:
        return replace(self, depth=depth)

    def grow(self, root: Tensor, expand: Expand, sampler: Sampler, vocab_size: int) -> DraftTree:
        return grow_likeliest(root, expand, self.budget, self.width, self.level_beams)


def grow_likeliest(root: Tensor, expand: Expand, budget: int, width: int, level_beams: Sequence[int]) -> DraftTree:
    """The budget − 1 likeliest of these candidates: `width` children of the root, and of the likeliest
    `level_beams[i]` nodes of each level i + 1."""
    batch = root.shape[0]
    logp, ids = expand(root.unsqueeze(1), None).top(width)
    width = logp.shape[-1]  # fewer where the draft vocabulary is smaller
    # Candidate c of the lists below is node c + 1 of the full tree; the root is node 0.
    tokens, scores, parents = [ids[:, 0]], [logp[:, 0]], [torch.zeros_like(ids[:, 0])]
    start = 0  # the number of candidates above the level that is expanded
    for count in level_beams:
        score, best = scores[-1].topk(min(count, scores[-1].shape[1]), dim=1)
        logp, ids = expand(tokens[-1].gather(1, best), best // width).top(width)
        parents.append((1 + start + best).repeat_interleave(width, 1))
        start += scores[-1].shape[1]
        tokens.append(ids.flatten(1))
        scores.append((score.unsqueeze(2) + logp).flatten(1))
    # Where a probability rounds to 1, a child ties with its parent. A stable sort puts the parent first.
    ranked = torch.cat(scores, 1).sort(dim=1, descending=True, stable=True).indices
    chosen = ranked[:, : budget - 1].sort(dim=1).values
    renumber = torch.zeros(batch, 1 + ranked.shape[1], dtype=torch.long, device=root.device)
    renumber.scatter_(1, chosen + 1, torch.arange(1, 1 + chosen.shape[1], device=root.device).expand_as(chosen))
    chosen_tokens = torch.cat(tokens, 1).gather(1, chosen)
    chosen_parents = renumber.gather(1, torch.cat(parents, 1).gather(1, chosen))
    return DraftTree(
        torch.cat([root.unsqueeze(1), chosen_tokens], 1),
        torch.cat([torch.full_like(root, -1).unsqueeze(1), chosen_parents], 1),
        len(level_beams) + 1,
    )


@dataclass(frozen=True)
class DynamicTree:
    """At each depth the top_k likeliest paths get top_k children each; the tree is the budget − 1 best of all nodes.

    budget: nodes, root included; depth: the most levels drafted; top_k: beams, and children per beam. EAGLE-2,
    arXiv:2406.16858.
    """

    budget: int = 60
    depth: int = 7
    top_k: int = 10

    def __post_init__(self) -> None:
        require_whole("budget", self.budget)
        require_positive("top_k", self.top_k)
        require_at_most("depth", self.depth, MAX_NODES - 1)
        require_at_most("depth × top_k", self.depth * self.top_k, MAX_SLOTS)
        most = min(MAX_NODES, _num_candidates(self.depth, self.top_k))
        if not 2 <= self.budget <= most:
            raise ValueError(
                f"budget={self.budget} must be 2 to {most} nodes for depth={self.depth} and top_k={self.top_k}"
            )

    @property
    def num_nodes(self) -> int:
        return self.budget

    @property
    def drafting_slots(self) -> int:
        return (self.depth - 1) * self.top_k

    def limited(self, depth: int) -> DynamicTree:
        return replace(self, depth=depth, budget=min(self.budget, _num_candidates(depth, self.top_k)))

    def grow(self, root: Tensor, expand: Expand, sampler: Sampler, vocab_size: int) -> DraftTree:
        return grow_likeliest(root, expand, self.budget, self.top_k, (self.top_k,) * (self.depth - 1))


def _num_candidates(depth: int, top_k: int) -> int:
    """How many nodes there are to choose from, root included."""
    return 1 + top_k + (depth - 1) * top_k**2
