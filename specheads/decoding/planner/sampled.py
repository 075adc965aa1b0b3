"""Trees whose nodes are drawn from the draft's law. Shapes: B batch rows, V vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specheads.decoding.planner.plan import MAX_NODES, Expand, positive, within
from specheads.decoding.sampler import Sampler
from specheads.decoding.tree import DraftTree, TreeTopology


@dataclass(frozen=True)
class SampledTree:
    """Children drawn from the draft's law without replacement, branches[d] of them for each node at depth d.

    Worth it at temperature ≥ 1; each node carries the law it was drawn from. Sequoia, arXiv:2402.12374.
    """

    branches: tuple[int, ...] = (2, 2, 1)

    def __post_init__(self) -> None:
        if not self.branches:
            raise ValueError("branches=() must name at least one level, for instance (2, 2, 1)")
        within("levels of branches", len(self.branches), MAX_NODES - 1)
        for width in self.branches:
            positive("each entry of branches", width)
        within("nodes below the root", self.num_nodes - 1, MAX_NODES - 1)

    @property
    def depth(self) -> int:
        return len(self.branches)

    @property
    def _widths(self) -> list[int]:
        widths = [1]
        for branch in self.branches:
            widths.append(widths[-1] * branch)
        return widths

    @property
    def num_nodes(self) -> int:
        return sum(self._widths)

    @property
    def drafting_slots(self) -> int:
        return sum(self._widths[1:-1])

    def limited(self, depth: int) -> SampledTree:
        made: dict[int, SampledTree] = self.__dict__.setdefault("_limited", {})
        if depth not in made:
            made[depth] = replace(self, branches=self.branches[:depth])
        return made[depth]

    def grow(self, root: Tensor, expand: Expand, sampler: Sampler, vocab_size: int) -> DraftTree:
        batch, device = root.shape[0], root.device
        level, above, start = root.unsqueeze(1), None, 0
        tokens, parents, laws = [level], [torch.full_like(level, -1)], []
        for branch in self.branches:
            scored = expand(level, above)
            width = level.shape[1]
            q = scored.probs(sampler, vocab_size).flatten(0, 1)
            # The last sibling of all may be drawn for sure from what is left, however little: no product underflows.
            q = q.masked_fill(q < 1e-30, 0)
            left, drawn = q, []
            for _ in range(branch):
                # A law with fewer tokens than branches is exhausted: -1 marks the empty slot.
                empty = left.sum(-1) <= 0
                token = sampler.draw(torch.where(empty.unsqueeze(1), 1.0, left))
                drawn.append(torch.where(empty, -1, token))
                left = left.scatter(1, token.unsqueeze(1), 0)
            children = torch.stack(drawn, 1).view(batch, width * branch)
            own = torch.arange(width, device=device).repeat_interleave(branch).expand(batch, -1)
            parents.append(torch.where(children < 0, -1, start + own))
            laws.append(q.view(batch, width, -1).repeat_interleave(branch, 1))
            start, level, above = start + width, children.clamp_min(0), own
            tokens.append(level)
        probs = torch.cat([laws[0][:, :1], *laws], 1)  # the root's entry is never read
        above = torch.cat(parents, 1)
        topology = self._full_topology(above) if bool((above[:, 1:] >= 0).all()) else TreeTopology.of(above, self.depth)
        return DraftTree(torch.cat(tokens, 1), above, self.depth, probs, topology=topology)

    def _full_topology(self, parents: Tensor) -> TreeTopology:
        """The shape of every tree in which no slot is empty, made once per batch size and device."""
        made = self.__dict__.setdefault("_made", {})
        key = len(parents), parents.device
        if key not in made:
            made[key] = TreeTopology.of(parents, self.depth)
        return made[key]
