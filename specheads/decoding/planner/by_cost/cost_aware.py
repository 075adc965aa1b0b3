"""A tree that stops growing where, by the draft's own probabilities, another level or node is not worth its time.

Shapes: B batch rows, k nodes of a level, C candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from specheads.decoding.planner.plan import Expand
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree, TreeTopology


@dataclass
class Grown:
    """Every candidate of one row, on the host: its token, its parent (−1 is the root) and the draft's confidence in it
    given its parent. chances: the chance that its whole path is accepted."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)

    def best(self, count: int) -> list[int]:
        """The likeliest candidates, a parent before its children."""
        return sorted(sorted(range(len(self.tokens)), key=lambda i: (-self.chances[i], i))[:count])


@dataclass
class CostAwareTree:
    """Grows level by level while the next level raises the expected tokens per millisecond; then keeps the number of
    likeliest nodes that maximises it.

    With w the chance of a node and Φ the sum of those kept: another node is kept while (1 + Φ + w) / time rises
    (CaDDTree, arXiv:2606.01813), and another level drafted if it would rise with the level's likely chances (OPT-Tree,
    arXiv:2406.17276). Both look at what was drafted before, never at what is drawn after. The nodes are point masses.

    sizes: the allowed numbers of nodes, root included. time(nodes, levels): milliseconds of a step that verifies
    `nodes` and expanded `levels` nodes of each level. calibrate: the draft's confidence → a chance. next_share: by
    depth, the usual chance of the likeliest child. worth: the value of each row's accepted tokens, see `choice.Worth`.
    width: children per node; beams: nodes expanded per level. grown: each row's candidates, once the tree has grown.
    """

    sizes: tuple[int, ...]
    depth: int
    width: int
    beams: int
    time: Callable[[int, tuple[int, ...]], float]
    calibrate: Callable[[float], float]
    next_share: Sequence[float]
    worth: Callable[[Sequence[float]], float]
    grown: list[Grown] = field(default_factory=list)
    levels: tuple[int, ...] = ()

    @property
    def num_nodes(self) -> int:
        return self.sizes[-1]

    @property
    def drafting_slots(self) -> int:
        return self.beams * (self.depth - 1)

    def limited(self, depth: int) -> CostAwareTree:
        return replace(self, depth=min(depth, self.depth))

    def grow(self, root: Tensor, expand: Expand, sampler: Sampler, vocab_size: int) -> DraftTree:
        batch = len(root)
        self.grown, self.levels = [Grown() for _ in range(batch)], ()
        level: list[list[int]] = [[-1] for _ in range(batch)]  # the nodes expanded, by row
        tokens, parents = root.unsqueeze(1), None
        while True:
            children = expand(tokens, parents)
            log_q, ids = children.top(self.width)  # (B, k, width)
            q = log_q.exp()
            if children.confidence is not None:
                q = q / q[..., :1].clamp_min(1e-9) * children.confidence().unsqueeze(2)
            added = self._add(level, q.tolist(), ids.tolist())
            depth = len(self.levels) + 1
            beams = [sorted(row, key=lambda i, g=g: -g.chances[i])[: self.beams]  # type: ignore[misc]
                     for g, row in zip(self.grown, added, strict=True)]  # fmt: skip
            if depth >= self.depth or not self._deepens(beams, depth):
                break
            self.levels = (*self.levels, len(beams[0]))
            index = torch.tensor([[added[b].index(i) for i in row] for b, row in enumerate(beams)], device=root.device)
            tokens, parents, level = ids.flatten(1).gather(1, index), index // ids.shape[2], beams
        return self._tree(root, self._best_size(self.levels)[1])

    def _add(self, level: list[list[int]], q: list, ids: list) -> list[list[int]]:
        added = []
        for b, grown in enumerate(self.grown):
            first = len(grown.tokens)
            for parent, shares, tokens in zip(level[b], q[b], ids[b], strict=True):
                above = grown.chances[parent] if parent >= 0 else 1.0
                for share, token in zip(shares, tokens, strict=True):
                    grown.tokens.append(token)
                    grown.parents.append(parent)
                    grown.confidences.append(share)
                    grown.chances.append(above * self.calibrate(share))
            added.append([*range(first, len(grown.tokens))])
        return added

    def _best_size(self, levels: tuple[int, ...], more: Sequence[Sequence[float]] = ()) -> tuple[float, int]:
        """The highest tokens per millisecond, and the size that gives it. more: by row, the chances of further
        candidates."""
        rows = [
            sorted([*grown.chances, *(more[b] if more else ())], reverse=True) for b, grown in enumerate(self.grown)
        ]
        best = (0.0, 1)
        for size in self.sizes:
            if size > 1 + len(rows[0]):
                break
            rate = self.worth([sum(row[: size - 1]) for row in rows]) / self.time(size, levels)
            if rate > best[0]:
                best = rate, size
        return best

    def _deepens(self, beams: list[list[int]], depth: int) -> bool:
        share = self.next_share[min(depth, len(self.next_share) - 1)]
        more = [[grown.chances[i] * share for i in row] for grown, row in zip(self.grown, beams, strict=True)]
        return self._best_size((*self.levels, len(beams[0])), more)[0] > self._best_size(self.levels)[0]

    def _tree(self, root: Tensor, size: int) -> DraftTree:
        if size == 1:
            return DraftTree.root_only(root)
        tokens, parents = [], []
        for first, grown in zip(root.tolist(), self.grown, strict=True):
            chosen = grown.best(size - 1)
            slot = {-1: 0} | {i: n for n, i in enumerate(chosen, start=1)}
            tokens.append([first, *(grown.tokens[i] for i in chosen)])
            parents.append([-1, *(slot[grown.parents[i]] for i in chosen)])
        depth = len(self.levels) + 1
        topology = TreeTopology.of(torch.tensor(parents, device=root.device), depth)
        return DraftTree(torch.tensor(tokens, device=root.device), topology.parents, depth, topology=topology)
