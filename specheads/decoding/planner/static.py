"""Trees of a fixed shape: choices as Medusa writes them, chains, combs. Shapes: B batch rows, C candidates."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor

from specheads.decoding.planner.plan import MAX_NODES, Expand, require_at_most, require_positive
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree, TreeTopology
from specheads.decoding.tree.topology import cached_property
from specheads.options import require_whole, shown

# By rank, the assumed acceptance of a head that nobody has measured, at every depth.
ASSUMED_RANKS = (0.6, 0.15, 0.07, 0.04, 0.03)


# What `StaticTree._tables` returns.
Tables = tuple[TreeTopology, Tensor, list[tuple[Tensor, Tensor]]]


class _Level(NamedTuple):
    """One level of a static tree. Its candidates are the `width` likeliest tokens after each of `num_above` nodes.

    nodes: the candidates in the tree; inner: those of them that have children; parents: for each inner node, the index
    of its parent among the inner nodes of the level above.
    """

    width: int
    num_above: int
    nodes: list[int]
    inner: list[int]
    parents: list[int]


def _is_path(choice: object) -> bool:
    return isinstance(choice, Sequence) and all(isinstance(r, Integral) and not isinstance(r, bool) for r in choice)


@dataclass(frozen=True)
class StaticTree:
    """A fixed shape: each choice is a node's path of ranks from the root, as Medusa writes them.

    choices: ((0,), (0, 0), (1,)) is the likeliest token, the likeliest after it, and the second likeliest token.
    ValueError if a choice's parent is missing. Medusa, arXiv:2401.10774.
    """

    choices: tuple[tuple[int, ...], ...]
    _limited: dict[int, StaticTree] = field(default_factory=dict, init=False, repr=False, compare=False)
    _known_tables: dict[tuple[int, torch.device], Tables] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not isinstance(self.choices, Sequence) or not all(map(_is_path, self.choices)):
            raise TypeError(f"choices={shown(self.choices)} must be paths of ranks, for instance ((0,), (0, 0), (1,))")
        if len(self.choices) >= MAX_NODES:
            raise ValueError(f"a static tree of {len(self.choices)} choices: {MAX_NODES - 1} at most")
        chosen = tuple(sorted({tuple(c) for c in self.choices}, key=lambda c: (len(c), c)))
        if not chosen:
            raise ValueError("a static tree needs at least one choice, for instance ((0,),)")
        known = {(), *chosen}
        for choice in chosen:
            if not choice or min(choice) < 0:
                raise ValueError(f"choice {choice!r} is not a path of ranks ≥ 0, such as (0, 1)")
            if choice[:-1] not in known:
                raise ValueError(f"choice {choice} has no parent: add {choice[:-1]}")
        object.__setattr__(self, "choices", chosen)

    @property
    def num_nodes(self) -> int:
        return len(self.choices) + 1

    @cached_property
    def depth(self) -> int:
        return max(len(choice) for choice in self.choices)

    @cached_property
    def inner_nodes(self) -> tuple[int, ...]:
        """How many nodes of each level below the root are expanded."""
        return tuple(len(level.inner) for level in self._levels[:-1])

    @cached_property
    def drafting_slots(self) -> int:
        return sum(self.inner_nodes)

    def limited(self, depth: int) -> StaticTree:
        if depth not in self._limited:
            self._limited[depth] = self._checked(tuple(choice for choice in self.choices if len(choice) <= depth))
        return self._limited[depth]

    @classmethod
    def _checked(cls, choices: tuple[tuple[int, ...], ...]) -> StaticTree:
        """A tree of choices that are known to be right and in order."""
        tree = object.__new__(cls)
        for name, value in (("choices", choices), ("_limited", {}), ("_known_tables", {})):
            object.__setattr__(tree, name, value)
        return tree

    @cached_property
    def _levels(self) -> list[_Level]:
        by_depth: list[list[tuple[int, ...]]] = [[] for _ in range(self.depth)]
        for choice in self.choices:
            by_depth[len(choice) - 1].append(choice)
        with_children = {choice[:-1] for choice in self.choices}
        levels = []
        above: dict[tuple[int, ...], int] = {(): 0}  # inner nodes of the level above → their indices
        for nodes in by_depth:
            width = 1 + max(c[-1] for c in nodes)
            inner = [c for c in nodes if c in with_children]
            levels.append(
                _Level(
                    width, len(above),
                    [above[c[:-1]] * width + c[-1] for c in nodes],
                    [above[c[:-1]] * width + c[-1] for c in inner],
                    [above[c[:-1]] for c in inner],
                )
            )  # fmt: skip
            above = {c: i for i, c in enumerate(inner)}
        return levels

    def _tables(self, batch: int, device: torch.device) -> Tables:
        """The trees' topology, the indices of their nodes among all candidates, and each level's `inner` and `parents`
        as tensors; computed once per batch size and device."""
        if (batch, device) not in self._known_tables:
            index = {(): 0} | {choice: i + 1 for i, choice in enumerate(self.choices)}
            parents = torch.tensor([[-1] + [index[choice[:-1]] for choice in self.choices]], device=device)
            chosen, start = [0], 1  # the root comes before the candidates of all levels
            tables = []
            for level in self._levels:
                chosen += [start + candidate for candidate in level.nodes]
                start += level.num_above * level.width
                inner = torch.tensor(level.inner, dtype=torch.long, device=device)
                above = torch.tensor([level.parents], dtype=torch.long, device=device)
                tables.append((inner, above.expand(batch, -1)))
            line = self.num_nodes == self.depth + 1
            topology = TreeTopology.of(parents.expand(batch, -1).contiguous(), self.depth, in_line=line)
            self._known_tables[batch, device] = topology, torch.tensor(chosen, device=device), tables
        return self._known_tables[batch, device]

    def topology(self, batch: int, device: torch.device) -> TreeTopology:
        """The trees' topology, computed once per batch size and device."""
        return self._tables(batch, device)[0]

    def grow(self, root: Tensor, expand: Expand, sampler: Sampler, vocab_size: int) -> DraftTree:
        topology, chosen, tables = self._tables(root.shape[0], root.device)
        tokens, parents = root.unsqueeze(1), None
        candidates = [tokens]
        for level, (inner, above) in zip(self._levels, tables, strict=True):
            children = expand(tokens, parents)
            if children.logits.shape[-1] < level.width:
                raise ValueError(
                    f"rank {level.width - 1} in a tree needs a draft vocabulary of {level.width} tokens or more, not "
                    f"{children.logits.shape[-1]}"
                )
            tokens, parents = children.top_ids(level.width), above
            candidates.append(tokens)
            if len(inner) < tokens.shape[1]:  # choosing all, as in a chain, needs no copy
                tokens = tokens.index_select(1, inner)
        nodes = torch.cat(candidates, 1)
        if len(chosen) < nodes.shape[1]:
            nodes = nodes.index_select(1, chosen)
        return DraftTree(nodes, topology.parents, self.depth, topology=topology)


def chain(depth: int) -> StaticTree:
    """A chain of the likeliest tokens, `depth` of them."""
    require_at_most("depth", depth, MAX_NODES - 1)
    return StaticTree(tuple((0,) * n for n in range(1, depth + 1)))


def comb(depth: int, width: int = 2) -> StaticTree:
    """A chain of the likeliest tokens, each with the next likeliest as siblings: `width` nodes per level.

    The drafter needs as many passes as for the chain; the target verifies `width` times the nodes.
    """
    require_positive("depth", depth)
    require_positive("width", width)
    require_at_most("depth × width", depth * width, MAX_NODES - 1)
    return StaticTree(tuple((*(0,) * level, rank) for level in range(depth) for rank in range(width)))


def parallel_chains(width: int, depth: int) -> StaticTree:
    """`width` chains of `depth` tokens, below the root."""
    return StaticTree(tuple((rank, *(0,) * below) for rank in range(width) for below in range(depth)))


def likeliest_tree(acceptance: Sequence[Sequence[float]], nodes: int, depth: int) -> StaticTree:
    """The static tree of `nodes` (or all there are), root included, with the most expected accepted tokens.

    acceptance: by depth and rank; the last depth stands for all deeper ones. A node is never likelier than its parent,
    so the likeliest nodes form a tree, which is Sequoia's optimum (arXiv:2402.12374) for drafts of fixed ranks.
    """
    heap: list[tuple[float, tuple[int, ...]]] = [(-share, (rank,)) for rank, share in enumerate(acceptance[0])]
    heapq.heapify(heap)
    chosen: list[tuple[int, ...]] = []
    while heap and len(chosen) < nodes - 1:
        chance, choice = heapq.heappop(heap)
        chosen.append(choice)
        if len(choice) < depth:
            for rank, share in enumerate(acceptance[min(len(choice), len(acceptance) - 1)]):
                heapq.heappush(heap, (chance * share, (*choice, rank)))
    return StaticTree(tuple(chosen))


def default_static(budget: int, depth: int, accuracy: Sequence[float] = ASSUMED_RANKS) -> StaticTree:
    """A static tree of `budget` nodes (or all there are) for a head that was not measured.

    It assumes the rank accuracies of a moderately trained head, independent and equal at each depth. For a tree
    measured on data see `calibrate_tree`.
    """
    require_whole("nodes", budget)
    require_positive("draft_depth", depth)
    if budget < 2:
        raise ValueError(f"a tree of {budget} nodes drafts nothing; ask for 2 or more")
    if budget > MAX_NODES:
        raise ValueError(f"a static tree of {budget} nodes: ask for {MAX_NODES} at most")
    return likeliest_tree((accuracy,), budget, depth)
