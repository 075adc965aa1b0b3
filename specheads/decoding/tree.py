"""A draft tree: tokens and parents, and what follows from them (ancestors, depth, siblings).

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
    from specheads.decoding.draft_logits import DraftLogits


def ancestors(parents: Tensor, max_depth: int | None = None) -> Tensor:
    """(B, N) parents → (B, N, N) bool: entry [b, i, j] is True where j is i or an ancestor of i.

    By pointer doubling, so the number of passes is logarithmic in the depth and no value leaves the device.
    """
    batch, num = parents.shape
    # Node N stands for "no parent": it has no ancestors, itself included, and is its own parent.
    reach = torch.eye(num + 1, num, dtype=torch.bool, device=parents.device).expand(batch, -1, -1)
    jump = torch.where(parents < 0, num, parents)  # (B, N) i → its ancestor `span` levels up
    jump = torch.cat([jump, torch.full_like(jump[:, :1], num)], 1)
    row = torch.arange(batch, device=parents.device).unsqueeze(1)
    span, depth = 1, num - 1 if max_depth is None else max_depth
    while span <= depth:
        reach = reach | reach[row, jump]
        jump = jump.gather(1, jump)
        span *= 2
    return reach[:, :num]


@dataclass(frozen=True)
class TreeTopology:
    """What the parents of a tree imply. A static plan computes it once for all its trees.

    parents (B, N) as DraftTree's; ancestors (B, N, N) bool, see `ancestors`; depth (B, N) int64, 0 at the root.

    Properties whose shape depends on the tree make the host wait for the device, on first use; they say so. Nodes of
    all rows are numbered b · N + i where one index must name the row too.
    """

    parents: Tensor
    ancestors: Tensor
    depth: Tensor

    @classmethod
    def of(cls, parents: Tensor, max_depth: int | None = None) -> TreeTopology:
        mask = ancestors(parents, max_depth)
        return cls(parents, mask, mask.sum(-1) - 1)

    @cached_property
    def earlier_siblings(self) -> Tensor:
        """(B, N, N) True where node j is a sibling of node i and precedes it."""
        before = torch.ones_like(self.ancestors[:1]).tril(-1)
        return (self.parents.unsqueeze(1) == self.parents.unsqueeze(2)) & before

    @cached_property
    def ranks(self) -> Tensor:
        """(B, N) how many siblings precede each node."""
        return self.earlier_siblings.sum(-1)

    @cached_property
    def first_siblings(self) -> Tensor:
        """(B, N) True at drafted nodes that no sibling precedes."""
        return self.drafted & (self.ranks == 0)

    @cached_property
    def children(self) -> Tensor:
        """(B, N, N) True where node j is a child of node i."""
        return self.parents.unsqueeze(1) == torch.arange(self.parents.shape[1], device=self.parents.device).unsqueeze(1)

    @cached_property
    def most_siblings(self) -> int:
        """The most children any node has, on the host. Waits for the device."""
        return 1 if self.in_line else int(self.children.sum(2).max())

    @cached_property
    def child_table(self) -> Tensor:
        """(B · N, most_siblings) the children of each node in order, as b · N + i; then 0, which is a root.

        Waits for the device."""
        batch, num = self.parents.shape
        node = torch.arange(batch * num, device=self.parents.device).view(batch, num)
        if self.in_line:
            return torch.where(self.drafted.roll(-1, 1), node + 1, 0).view(-1, 1)
        order = torch.where(self.children, self.children.cumsum(2) - 1, self.most_siblings)
        table = node.new_zeros(batch, num, self.most_siblings + 1)
        return table.scatter_(2, order, node.unsqueeze(1).expand_as(order))[:, :, :-1].flatten(0, 1)

    @cached_property
    def sibling_groups(self) -> tuple[Tensor, list[Tensor]]:
        """The nodes (F,) with two or more children, as b · N + i, and the columns of `child_table` at them: their first
        children (F,), their second ones …, 0 for none. Waits for the device."""
        above = ((self.child_table > 0).sum(1) > 1).nonzero().squeeze(1)
        return above, list(self.child_table[above].T.contiguous())

    @cached_property
    def rejection_order(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """The drafted nodes in batches by depth, then by rank: to compute what is left at a parent once a child is
        rejected. A node comes before its children, and these in draft order.

        A batch is (parents (F,), one child of each (F,), its earlier siblings (F, rank)), as b · N + i. Waits for the
        device."""
        num, depth, rank = self.parents.shape[1], self.depth.flatten(), self.ranks.flatten()
        child = self.drafted.flatten().nonzero().squeeze(1)
        above = child // num * num + self.parents.flatten()[child]
        order = (depth * num + rank)[child]
        batches = [(order == one, one % num) for one in sorted(set(order.tolist()))]
        return [(above[batch], child[batch], self.child_table[above[batch], :earlier]) for batch, earlier in batches]

    @cached_property
    def postorder(self) -> Tensor:
        """(B, N) the nodes of each row in post-order: each after its descendants, and after its earlier siblings and
        theirs. Slots that the root does not reach come last. Waits for the device."""
        rows = []
        for parents in self.parent_lists:
            below: dict[int, list[int]] = {}
            for node, above in enumerate(parents):
                if node:
                    below.setdefault(above, []).append(node)

            order, stack = [], [0]
            while stack:
                order.append(stack.pop())
                stack += below.get(order[-1], ())
            order.reverse()
            rows.append([*order, *sorted(set(range(len(parents))) - set(order))])
        return torch.tensor(rows, device=self.parents.device)

    @cached_property
    def in_line(self) -> bool:
        """Is each drafted node the child of the one before it, in every row? Waits for the device."""
        before = torch.arange(-1, self.parents.shape[1] - 1, device=self.parents.device)
        return not bool((self.drafted & (self.parents != before)).any())

    @cached_property
    def parent_lists(self) -> list[list[int]]:
        """parents on the host. Waits for the device."""
        return self.parents.tolist()

    @cached_property
    def drafted(self) -> Tensor:
        """(B, N) False at the root and at unused slots."""
        return self.parents >= 0

    @cached_property
    def num_drafted(self) -> Tensor:
        """(B, 1) how many of the nodes were drafted."""
        return self.drafted.sum(1, keepdim=True)

    @cached_property
    def parent_index(self) -> Tensor:
        """(B, N) parents, and node 0 where there is none, to gather by."""
        return self.parents.clamp_min(0)

    def row_starts(self, size: int) -> tuple[Tensor, Tensor]:
        """Where each node's row (N,) and its parent's (B, N) begin in a flat table of N rows of that size. Cached."""
        cached = self.__dict__.setdefault("_row_starts", {})
        if size not in cached:
            cached[size] = (
                torch.arange(self.parents.shape[1], device=self.parents.device) * size,
                self.parent_index * size,
            )
        return cached[size]

    @cached_property
    def not_required(self) -> Tensor:
        """(B, N, N) True where node i can be accepted without node j: j is not on i's path, or is the root."""
        mask = ~self.ancestors
        mask[:, :, 0] = True
        return mask


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

    @property
    def num_nodes(self) -> int:
        return self.tokens.shape[1]

    @property
    def is_chain(self) -> bool:
        """Is each node the child of the one before it, in every row?"""
        return self.num_nodes <= self.max_depth + 1 and self.topology.in_line

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
