"""A draft tree: tokens and parents, and what follows from them (depth, ancestors, positions).

Shapes: B batch rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from specheads.draft_law import DraftLogits


def ancestors(parents: Tensor, max_depth: int | None = None) -> Tensor:
    """(B, N) parents → (B, N, N) bool: entry [b, i, j] is True where j is i or an ancestor of i.

    By pointer doubling, so the number of passes is logarithmic in the depth and no value leaves the device.
    """
    num = parents.shape[1]
    reach = torch.eye(num, dtype=torch.float32, device=parents.device).expand(*parents.shape, num)
    hop = (torch.arange(num, device=parents.device) == parents.unsqueeze(-1)).float()  # (B, N, N) i → its parent
    span, depth = 1, num - 1 if max_depth is None else max_depth
    while span <= depth:
        reach = reach + hop @ reach  # (I + P)(I + P^2)(I + P^4)…: each path counted once
        span *= 2
        if span <= depth:
            hop = hop @ hop
    return reach > 0.5


@dataclass(frozen=True)
class Shape:
    """What the parents of a tree imply. A static plan makes it once for all its trees.

    parents (B, N) as DraftTree's; ancestors (B, N, N) bool; depth (B, N) int64, 0 at the root.
    """

    parents: Tensor
    ancestors: Tensor
    depth: Tensor

    @classmethod
    def of(cls, parents: Tensor, max_depth: int | None = None) -> Shape:
        mask = ancestors(parents, max_depth)
        return cls(parents, mask, mask.sum(-1) - 1)

    @cached_property
    def ranks(self) -> Tensor:
        """(B, N) how many siblings stand before each node."""
        before = torch.ones_like(self.ancestors[:1]).tril(-1)
        return ((self.parents.unsqueeze(1) == self.parents.unsqueeze(2)) & before).sum(-1)

    @cached_property
    def children(self) -> Tensor:
        """(B, N, N) True where node j is a child of node i."""
        return self.parents.unsqueeze(1) == torch.arange(self.parents.shape[1], device=self.parents.device).unsqueeze(1)

    @cached_property
    def most_siblings(self) -> int:
        """The most children a node has. A host integer: where the shape is new, asking waits for the device."""
        return int(self.children.sum(2).max())

    @cached_property
    def drafted(self) -> Tensor:
        """(B, N) False at the root and at unused slots."""
        return self.parents >= 0

    @cached_property
    def num_drafted(self) -> Tensor:
        """(B, 1) how many of the nodes were drafted."""
        return self.drafted.sum(1, keepdim=True)

    @cached_property
    def above(self) -> Tensor:
        """(B, N) parents, with node 0 where there is none, so that one can gather by it."""
        return self.parents.clamp_min(0)

    @cached_property
    def unneeded(self) -> Tensor:
        """(B, N, N) True where node j need not be accepted for node i to be: it is not on i's path, or the root."""
        unneeded = ~self.ancestors
        unneeded[:, :, 0] = True
        return unneeded


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Drafted tokens as a tree per batch row.

    tokens (B, N): tokens[:, 0] is the root, committed but not yet in the target's KV cache.
    parents (B, N): parents[b, i] < i; -1 at the root, and at unused slots behind it (which nothing can reach).
    max_depth: no node is deeper (a host integer, so that loops over depth need no transfer).
    probs (B, N, V): the law each token was drawn from, siblings in the order drawn and without replacement;
      None where tokens were chosen without a coin the target shares (top-k, n-grams): a point mass.
      Siblings of a point-mass tree carry distinct tokens.
    logits: the draft's own behind each node that has children, where a rule asked for them.
    """

    tokens: Tensor
    parents: Tensor
    max_depth: int
    probs: Tensor | None = None
    logits: DraftLogits | None = None
    shape: Shape = field(default=None)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.tokens.shape != self.parents.shape:
            raise ValueError(f"tokens {tuple(self.tokens.shape)} and parents {tuple(self.parents.shape)} must be alike")
        if self.shape is None:
            object.__setattr__(self, "shape", Shape.of(self.parents, self.max_depth))

    @classmethod
    def root_only(cls, root: Tensor) -> DraftTree:
        """The tree of plain autoregressive decoding: root (B,) and nothing drafted."""
        return cls(root.unsqueeze(1), torch.full_like(root, -1).unsqueeze(1), 0)

    @classmethod
    def chains(cls, root: Tensor, drafts: Sequence[Sequence[int]]) -> DraftTree:
        """Behind root (B,) a chain of each row's drafted ids, which may be none."""
        depth = max(map(len, drafts))
        tokens = [[*draft, *[0] * (depth - len(draft))] for draft in drafts]
        parents = [[-1, *range(len(draft)), *[-1] * (depth - len(draft))] for draft in drafts]
        drafted = torch.tensor(tokens, dtype=root.dtype, device=root.device).view(len(drafts), depth)
        return cls(torch.cat([root.unsqueeze(1), drafted], 1), torch.tensor(parents, device=root.device), depth)

    @property
    def num_nodes(self) -> int:
        return self.tokens.shape[1]
