"""Which cache slots each node of a pass sees, as additive masks: of a whole tree, and of one grown level by level.

Shapes: B batch rows, S scratch slots, N tree nodes, k nodes of a level.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specheads.decoding.verify.cache import TreeCache


@dataclass(frozen=True, slots=True)
class Reach:
    """How far back a layer looks: `full`, `sliding` (the last `size` positions) or `chunked` (blocks of `size`)."""

    kind: str = "full"
    size: int = 0

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        """Broadcast positions → bool: may the query attend to the key, causality aside?"""
        if self.kind == "sliding":
            return query - key < self.size
        if self.kind == "chunked":
            return query // self.size == key // self.size
        return torch.ones((), dtype=torch.bool, device=query.device)

    def covers(self, length: int) -> bool:
        """Does each position of a text of this length see all before it?"""
        return self.kind == "full" or length <= self.size


def visible(ancestors: Tensor, depth: Tensor, lengths: Tensor, attended: int, reach: Reach) -> Tensor:
    """Which of the attended cache slots each node of a pass sees: (B, N, attended) bool.

    ancestors (B, N, S) covers the first S of these slots, of which this pass writes the last N; depth (B, S): of those
    slots. Committed slots follow. lengths (B,): committed tokens.
    """
    batch, num, seen = ancestors.shape
    slot = torch.arange(attended - seen, device=lengths.device)
    committed = (slot < lengths.unsqueeze(1)).unsqueeze(1).expand(batch, num, -1)
    if reach.kind != "full":
        position = lengths.unsqueeze(1) + depth  # (B, S)
        query = position[:, -num:].unsqueeze(2)
        committed = committed & reach(query, slot)
        ancestors = ancestors & reach(query, position.unsqueeze(1))
    return torch.cat([ancestors, committed], dim=2)


class Levels:
    """A tree written into the scratch slots level by level: a node attends what its parent attends, and itself.

    position (B, 1): of the newest level's nodes. written: how many slots hold nodes, in the order they were fed.
    widths: nodes per level. The text must be committed up to and including the root.
    """

    def __init__(self, cache: TreeCache, dtype: torch.dtype) -> None:
        cache.open(cache.scratch)
        self.cache = cache
        lengths = cache.lengths.unsqueeze(1)
        # (B, 1, k, attended) the newest level's additive mask for layers of full attention
        self.seen = additive((cache.positions < lengths).unsqueeze(1), dtype)
        # Split once: cheaper than adding 1 at each level.
        self.levels = (lengths - 1 + torch.arange(cache.scratch + 1, device=lengths.device)).split(1, 1)
        self.columns = self.seen.narrow(-1, 0, cache.scratch).split(1, -1)
        self.slots = torch.arange(cache.scratch, device=lengths.device).view(1, 1, -1, 1)
        self.written = 0
        self.widths: list[int] = []

    @property
    def position(self) -> Tensor:
        return self.levels[len(self.widths)]

    def next_level(self, parents: Tensor) -> None:
        """Open the cache for the children of nodes parents (B, k) of the newest level (of the root, at first)."""
        start, stop = self.written, self.written + parents.shape[1]
        if stop > self.cache.scratch:
            raise ValueError(f"a tree of {stop} nodes below the root needs as many scratch slots: {self.cache.scratch}")
        self.cache.window.write_slots, self.written = self.slots[:, :, start:stop], stop
        self.widths.append(stop - start)
        if stop == len(self.widths):  # in a chain the mask's one row is reused
            self.columns[start].zero_()
        else:
            self.seen = gather_nodes(self.seen.squeeze(1), parents).unsqueeze(1).contiguous()
            self.seen[..., start:stop].diagonal(dim1=2, dim2=3).zero_()

    def mask(self, reach: Reach) -> Tensor:
        """(B, 1, k, attended) the newest level's additive mask for layers of this reach."""
        if reach.kind == "full":
            return self.seen
        near = reach(self.position, self._slot_positions()).view(len(self.seen), 1, 1, -1)
        return self.seen.masked_fill(~near, torch.finfo(self.seen.dtype).min)

    def _slot_positions(self) -> Tensor:
        """(B, attended) the position each slot holds; any number for slots not yet written."""
        first = self.position - (len(self.widths) - 1)
        levels = [(first + level).expand(-1, width) for level, width in enumerate(self.widths)]
        slot = torch.arange(self.cache.attended - self.written, device=first.device)
        return torch.cat([*levels, (slot - (self.cache.scratch - self.written)).expand(len(first), -1)], 1)


def gather_nodes(level: Tensor, index: Tensor) -> Tensor:
    """level (B, k, n), index (B, j) of its nodes → (B, j, n). A level of one node needs no gather."""
    if level.shape[1] == 1:
        return level if index.shape[1] == 1 else level.expand(-1, index.shape[1], -1)
    return level.gather(1, index.unsqueeze(-1).expand(-1, -1, level.shape[-1]))


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, N, K) bool → additive mask (B, 1, N, K), 0 where True. Eager attention is silently wrong with a bool mask."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min).unsqueeze(1)
