"""What the parents of a draft tree imply: ancestors, depth, siblings and the orders in which rules visit nodes.

Shapes: B batch rows, N nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, overload

import torch
from torch import Tensor

T = TypeVar("T")


class cached_property(Generic[T]):
    """functools.cached_property without the lock that it takes before Python 3.12, which torch cannot trace."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self.make, self.name, self.__doc__ = make, make.__name__, make.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> cached_property[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        value = self.make(instance)
        instance.__dict__[self.name] = value  # from now on found before this descriptor
        return value


def ancestors(parents: Tensor, max_depth: int | None = None) -> Tensor:
    """(B, N) parents → (B, N, N) bool: entry [b, i, j] is True where j is i or an ancestor of i.

    By pointer doubling: the number of passes is logarithmic in the depth, and no value leaves the device.
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
    """What the parents of a tree imply; a static plan computes it once for all its trees.

    parents (B, N) as DraftTree's; ancestors (B, N, N) bool, see `ancestors`; depth (B, N) int64, 0 at the root.

    whole: the tree of which this one is a part (see `masked`), None otherwise.

    Properties whose shape depends on the tree make the host wait for the device on first use; they say so. Where one
    index covers all rows, node i of row b is b · N + i.
    """

    parents: Tensor
    ancestors: Tensor
    depth: Tensor
    whole: TreeTopology | None = None

    @classmethod
    def of(cls, parents: Tensor, max_depth: int | None = None, *, in_line: bool | None = None) -> TreeTopology:
        """in_line: the property of that name, if the host knows it."""
        mask = ancestors(parents, max_depth)
        topology = cls(parents, mask, mask.sum(-1) - 1)
        if in_line is not None:
            topology.__dict__["in_line"] = in_line
        return topology

    def masked(self, used: Tensor) -> TreeTopology:
        """The part of the tree in slots used (B, N), which include every used node's parent.

        Nothing is transferred to the host: it uses the whole tree's tables, with 0 for unused slots.
        """
        own = torch.eye(used.shape[1], dtype=torch.bool, device=used.device)
        return TreeTopology(
            torch.where(used, self.parents, -1), torch.where(used.unsqueeze(2), self.ancestors, own),
            self.depth * used, self.whole or self,
        )  # fmt: skip

    def complete(self) -> None:
        """Compute all cached properties, because a compiled graph must find the same ones cached at each call."""
        for name, value in vars(TreeTopology).items():
            if isinstance(value, cached_property):
                getattr(self, name)

    def bare(self, in_line: bool) -> TreeTopology:
        """The same topology with nothing cached but `in_line`."""
        topology = TreeTopology(self.parents, self.ancestors, self.depth, self.whole)
        topology.__dict__["in_line"] = in_line
        return topology

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
        """An upper bound on any node's number of children, on the host. Waits for the device."""
        if self.whole is not None:
            return self.whole.most_siblings
        return 1 if self.in_line else int(self.children.sum(2).max())

    @cached_property
    def child_table(self) -> Tensor:
        """(B · N, most_siblings) the children of each node in order, as b · N + i; then 0, which is a root.

        Waits for the device."""
        if self.whole is not None:
            return self.whole.child_table * self.drafted.take(self.whole.child_table)
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
        if self.whole is not None:
            above = self.whole.sibling_groups[0]
        else:
            above = ((self.child_table > 0).sum(1) > 1).nonzero().squeeze(1)
        return above, list(self.child_table[above].T.contiguous())

    @cached_property
    def rejection_order(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """The batched rejection schedule: drafted nodes in batches by depth, then by rank, in which residuals at
        parents are computed. A node comes before its children, and these come in draft order.

        A batch is (parents (F,), one child of each (F,), its earlier siblings (F, rank)), as b · N + i. Waits for the
        device. For a part of a tree it includes unused slots."""
        if self.whole is not None:
            return self.whole.rejection_order
        num, depth, rank = self.parents.shape[1], self.depth.flatten(), self.ranks.flatten()
        child = self.drafted.flatten().nonzero().squeeze(1)
        above = child // num * num + self.parents.flatten()[child]
        order = (depth * num + rank)[child]
        batches = [(order == one, one % num) for one in sorted(set(order.tolist()))]
        return [(above[batch], child[batch], self.child_table[above[batch], :earlier]) for batch, earlier in batches]

    @cached_property
    def postorder(self) -> Tensor:
        """(B, N) the nodes of each row in post-order: each after its descendants, and after its earlier siblings and
        theirs. Unused slots come last; in a part of a tree, they stay where the whole tree has them. Waits for the
        device."""
        if self.whole is not None:
            return self.whole.postorder
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
    def paths(self) -> tuple[Tensor, Tensor, Tensor]:
        """The nodes from the root to each leaf, (B, P, D), padded with the leaf; and where to find each node there: its
        path (B, N) and its level (B, N). Waits for the device."""
        if self.whole is not None:
            return self.whole.paths
        node = torch.arange(self.parents.shape[1], device=self.parents.device)
        leaf = (self.drafted | (node == 0)) & ~self.children.any(2)
        count = int(leaf.sum(1).max())
        last = node.new_zeros(len(leaf), count + 1)
        last.scatter_(1, torch.where(leaf, leaf.cumsum(1) - 1, count), node.expand_as(leaf))
        last = last[:, :count]
        rows = torch.arange(len(leaf), device=leaf.device).unsqueeze(1)
        on_path = self.ancestors[rows, last]  # (B, P, N)
        level = torch.arange(int(self.depth.max()) + 1, device=leaf.device)
        at_level = on_path.unsqueeze(2) & (self.depth.unsqueeze(1) == level.unsqueeze(1)).unsqueeze(1)  # (B, P, D, N)
        nodes = torch.where(at_level.any(3), at_level.int().argmax(3), last.unsqueeze(2))
        return nodes, on_path.int().argmax(1), self.depth

    @cached_property
    def in_line(self) -> bool:
        """Is each drafted node the child of the one before it, in every row? Waits for the device."""
        if self.whole is not None:
            return self.whole.in_line
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
        """(B, N) parents as indices to gather by: 0 where there is none."""
        return self.parents.clamp_min(0)

    def row_starts(self, size: int) -> tuple[Tensor, Tensor]:
        """The offsets of each node's row (N,) and its parent's (B, N) in a flat table of N rows of `size`. Cached."""
        cached = {} if torch.compiler.is_compiling() else self.__dict__.setdefault("_row_starts", {})
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
