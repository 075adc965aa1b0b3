"""Trees whose nodes are drawn from the draft distribution. Shapes: B batch rows, V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from specheads.decoding.planner.plan import MAX_NODES, Expand, require_at_most, require_positive
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree, TreeTopology
from specheads.options import shown


@dataclass(frozen=True)
class SampledTree:
    """Children drawn from the draft distribution without replacement: branches[d] of them for each node at depth d.

    Worth it at temperature ≥ 1. Each node carries the distribution it was drawn from. Sequoia, arXiv:2402.12374.
    """

    branches: tuple[int, ...] = (2, 2, 1)
    _limited: dict[int, SampledTree] = field(default_factory=dict, init=False, repr=False, compare=False)
    _topologies: dict[tuple[int, torch.device], TreeTopology] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not isinstance(self.branches, Sequence):
            raise TypeError(f"branches={shown(self.branches)} must be a number for each level, such as (2, 2, 1)")
        if not self.branches:
            raise ValueError("branches=() must name at least one level, for instance (2, 2, 1)")
        require_at_most("levels of branches", len(self.branches), MAX_NODES - 1)
        for width in self.branches:
            require_positive("each entry of branches", width)
        require_at_most("nodes below the root", self.num_nodes - 1, MAX_NODES - 1)

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
        if depth not in self._limited:
            self._limited[depth] = replace(self, branches=self.branches[:depth])
        return self._limited[depth]

    def grow(self, root: Tensor, expand: Expand, sampler: Sampler, vocab_size: int) -> DraftTree:
        batch, device = root.shape[0], root.device
        level, above, start = root.unsqueeze(1), None, 0
        tokens, parents, probs = [level], [torch.full_like(level, -1)], []
        used = torch.ones_like(level, dtype=torch.bool)
        for branch in self.branches:
            children = expand(level, above)
            width = level.shape[1]
            q = children.probs(sampler, vocab_size).flatten(0, 1)
            # The last token left would be drawn however small its q is, and products of such q would underflow.
            q = q.masked_fill(q < 1e-30, 0)
            left, drawn = q, []
            for _ in range(branch):
                # Fewer tokens than branches: -1 marks the empty slot.
                empty = left.sum(-1) <= 0
                token = sampler.draw(torch.where(empty.unsqueeze(1), 1.0, left))
                drawn.append(torch.where(empty, -1, token))
                left = left.scatter(1, token.unsqueeze(1), 0)
            drawn_ids = torch.stack(drawn, 1).view(batch, width * branch)
            above = torch.arange(width, device=device).repeat_interleave(branch).expand(batch, -1)
            used = (drawn_ids >= 0) & used.repeat_interleave(branch, 1)  # below an empty slot all slots are empty
            parents.append(torch.where(used, start + above, -1))
            probs.append(q.view(batch, width, -1).repeat_interleave(branch, 1))
            start, level = start + width, drawn_ids.clamp_min(0)
            tokens.append(level)
        all_parents = torch.cat(parents, 1)
        if torch.compiler.is_compiling():  # a branch on whether slots are empty cannot be traced
            topology = self.topology(batch, device).masked(all_parents >= 0)
        elif bool((all_parents[:, 1:] >= 0).all()):
            topology = self.topology(batch, device)
        else:
            topology = TreeTopology.of(all_parents, self.depth)
        # The root's entry of probs is never read.
        q = torch.cat([probs[0][:, :1], *probs], 1)
        return DraftTree(torch.cat(tokens, 1), all_parents, self.depth, q, topology=topology)

    def topology(self, batch: int, device: torch.device) -> TreeTopology:
        """The topology of a tree without empty slots, computed once per batch size and device."""
        if (batch, device) not in self._topologies:
            parents, start, level = [-1], 0, [0]
            for branch in self.branches:
                parents += [node for node in level for _ in range(branch)]
                start, level = start + len(level), list(range(start + len(level), len(parents)))
            table = torch.tensor([parents], device=device).expand(batch, -1).contiguous()
            self._topologies[batch, device] = TreeTopology.of(table, self.depth)
        return self._topologies[batch, device]
