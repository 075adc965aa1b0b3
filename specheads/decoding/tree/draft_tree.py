"""A draft tree: tokens and parents.

Shapes: B batch rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from specheads.decoding.tree.draft_logits import DraftLogits
from specheads.decoding.tree.topology import TreeTopology


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Drafted tokens as a tree per batch row.

    tokens (B, N): tokens[:, 0] is the root, committed but not yet in the target's KV cache.
    parents (B, N): parents[b, i] < i; -1 at the root, and at unused slots after it, which no path reaches.
    max_depth: no node is deeper (a host integer, so that loops over depth need no transfer).
    probs (B, N, V): the distribution each token was drawn from, siblings in the order drawn and without replacement;
      None for point masses: tokens that were chosen, not drawn (top-k, n-grams). Siblings then carry distinct tokens.
    logits: the draft's logits after each node that has children, if a rule asked for them.
    """

    tokens: Tensor
    parents: Tensor
    max_depth: int
    probs: Tensor | None = None
    logits: DraftLogits | None = None
    topology: TreeTopology = field(default=None)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.tokens.shape != self.parents.shape:
            raise ValueError(
                f"tokens {tuple(self.tokens.shape)} and parents {tuple(self.parents.shape)} differ in shape"
            )
        if self.topology is None:
            object.__setattr__(self, "topology", TreeTopology.of(self.parents, self.max_depth))

    @classmethod
    def root_only(cls, root: Tensor) -> DraftTree:
        """The tree of plain autoregressive decoding: root (B,) and nothing drafted."""
        return cls(root.unsqueeze(1), torch.full_like(root, -1).unsqueeze(1), 0)

    @classmethod
    def chains(cls, root: Tensor, drafts: Sequence[Sequence[int]]) -> DraftTree:
        """A chain of each row's drafted ids after root (B,); a row may have none."""
        depth = max(map(len, drafts))
        tokens = [[*draft, *[0] * (depth - len(draft))] for draft in drafts]
        parents = [[-1, *range(len(draft)), *[-1] * (depth - len(draft))] for draft in drafts]
        drafted = torch.tensor(tokens, dtype=root.dtype, device=root.device).view(len(drafts), depth)
        return cls(torch.cat([root.unsqueeze(1), drafted], 1), torch.tensor(parents, device=root.device), depth)

    def padded(self, num_nodes: int, max_depth: int, num_logits: int = 0) -> DraftTree:
        """The tree padded with unused slots to `num_nodes`, with empty levels to max_depth, and to at least num_logits
        distributions in its logits."""
        missing = num_nodes - self.num_nodes
        if not missing and max_depth == self.max_depth:
            return self
        tokens = torch.cat([self.tokens, self.tokens[:, :1].expand(-1, missing)], 1)
        parents = torch.nn.functional.pad(self.parents, (0, missing), value=-1)
        probs, logits = self.probs, self.logits
        if probs is not None:  # the root's entry is never read, nor are those of unused slots
            probs = torch.cat([probs, probs[:, :1].expand(-1, missing, -1)], 1)
        logits = None if logits is None else logits.padded(missing, num_logits)
        return DraftTree(tokens, parents, max_depth, probs, logits)

    def cut(self, depths: Sequence[int]) -> DraftTree:
        """The tree without each row's nodes deeper than depths[row]; their slots become unused."""
        if min(depths) >= self.max_depth:
            return self
        below = self.topology.depth > torch.tensor(depths, device=self.parents.device).unsqueeze(1)
        parents = self.parents.masked_fill(below, -1)
        return replace(self, parents=parents, topology=TreeTopology.of(parents, self.max_depth))

    def within(self, depths: Tensor) -> DraftTree:
        """`cut` at depths (B,), without a transfer to the host."""
        topology = self.topology.masked(self.topology.drafted & (self.topology.depth <= depths.unsqueeze(1)))
        return DraftTree(self.tokens, topology.parents, self.max_depth, self.probs, self.logits, topology)

    @property
    def num_nodes(self) -> int:
        return self.tokens.shape[1]

    @property
    def is_chain(self) -> bool:
        """Is each node the child of the one before it, in every row?"""
        num = self.tokens.shape[1]
        return num == 1 or (num <= self.max_depth + 1 and self.topology.in_line)

    @property
    def siblings_drawn(self) -> bool:
        """Does any node have two or more children that were sampled?"""
        return self.probs is not None and not self.is_chain

    def drawn_probs(self) -> Tensor:
        """(B, N) the probability of each node's token in the distribution it was drawn from."""
        assert self.probs is not None
        starts, _ = self.topology.row_starts(self.probs.shape[2])
        return self.probs.flatten(1).gather(1, starts + self.tokens)

    def first_sibling(self, marked: Tensor) -> Tensor:
        """marked (B, N) bool → (B, N): only the first of the marked siblings stays marked."""
        return marked if self.is_chain else marked & ~(self.topology.earlier_siblings & marked.unsqueeze(1)).any(2)
