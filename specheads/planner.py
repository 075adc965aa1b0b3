"""How big and which shape the next tree is: static choices, EAGLE-2's dynamic tree, sampled trees.

A plan grows a tree through a drafter's `expand`, which scores the children of one level's nodes:
expand(tokens (B, k), parents (B, k) indices into the level before, or None at the root) → Scored.
Shapes: B batch rows, N nodes, V vocabulary, K candidates a node, k nodes a level.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specheads.sampling import Sampler
from specheads.tree import DraftTree, Shape


@dataclass(frozen=True, slots=True)
class Scored:
    """Draft logits (B, k, Vd) of the token after each node; ids (Vd,) are their target ids, None if the same.

    logits (B, 1, Vd) with width k: a law that all k nodes share.
    """

    logits: Tensor
    ids: Tensor | None = None
    width: int = 0

    def top(self, count: int) -> tuple[Tensor, Tensor]:
        """The `count` likeliest: log-probabilities (B, k, count) and target ids (B, k, count), best first."""
        best, ids = self._top(count)
        return best.float() - self.logits.float().logsumexp(-1, keepdim=True), ids

    def top_ids(self, count: int) -> Tensor:
        """The ids of `top` alone."""
        return self._top(count)[1]

    def law(self, sampler: Sampler, vocab_size: int) -> Tensor:
        """q (B, k, V) over all target ids, as the sampler processes it; zero where that rules out every token."""
        logits = self.logits.flatten(0, 1)
        if self.ids is not None:  # first, because processors know tokens by their target ids
            logits = logits.new_full((len(logits), vocab_size), -torch.inf).index_copy_(1, self.ids, logits)
        q = sampler.draft_law(logits).unflatten(0, self.logits.shape[:2])
        return q.expand(-1, self.width, -1) if self.width > 1 else q

    def _top(self, count: int) -> tuple[Tensor, Tensor]:
        if count == 1:  # a fraction of topk's time
            best, index = self.logits.max(-1, keepdim=True)
        else:
            best, index = self.logits.topk(min(count, self.logits.shape[-1]), dim=-1)
        ids = index if self.ids is None else self.ids[index]
        if self.width > 1:
            best, ids = best.expand(-1, self.width, -1), ids.expand(-1, self.width, -1)
        return best, ids


MAX_STATIC_NODES = 1024  # of a tree nobody calibrated; building one takes time that grows with the square

Expand = Callable[[Tensor, Tensor | None], Scored]


class Plan(Protocol):
    """A way of growing trees. num_nodes: how many nodes each has, root included; depth: of the deepest."""

    @property
    def num_nodes(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def drafting_slots(self) -> int:
        """KV slots a drafter with a cache of its own needs for the nodes it expands below the root."""
        ...

    def grow(self, root: Tensor, expand: Expand, sampler: Sampler, vocab_size: int) -> DraftTree: ...


def _positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name}={value} must be at least 1")


class _Level(NamedTuple):
    """One level of a static tree. Its candidates are the `width` best followers of each of `num_above` nodes.

    nodes: candidates that are in the tree; inner: those among them that have children; parents: of each inner node,
    its parent's place among the inner nodes of the level above.
    """

    width: int
    num_above: int
    nodes: list[int]
    inner: list[int]
    parents: list[int]


@dataclass(frozen=True)
class StaticTree:
    """A fixed shape: each choice is a node's path of ranks from the root, as Medusa writes them.

    choices: ((0,), (0, 0), (1,)) is the likeliest token, its likeliest follower, and the second likeliest token.
    ValueError if a choice's parent is missing. Medusa, arXiv:2401.10774.
    """

    choices: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        chosen = tuple(sorted({tuple(c) for c in self.choices}, key=lambda c: (len(c), c)))
        if not chosen:
            raise ValueError("a static tree needs at least one choice, for instance ((0,),)")
        for choice in chosen:
            if not choice or min(choice) < 0:
                raise ValueError(f"choice {choice!r} is not a path of ranks ≥ 0, such as (0, 1)")
            if len(choice) > 1 and choice[:-1] not in chosen:
                raise ValueError(f"choice {choice} has no parent: add {choice[:-1]}")
        object.__setattr__(self, "choices", chosen)

    @property
    def num_nodes(self) -> int:
        return len(self.choices) + 1

    @property
    def depth(self) -> int:
        return max(len(choice) for choice in self.choices)

    @property
    def drafting_slots(self) -> int:
        return sum(len(level.inner) for level in self._levels[:-1])

    @cached_property
    def _levels(self) -> list[_Level]:
        levels = []
        above: list[tuple[int, ...]] = [()]  # the nodes of the level above that have children
        for depth in range(1, self.depth + 1):
            nodes = [c for c in self.choices if len(c) == depth]
            width = 1 + max(c[-1] for c in nodes)
            inner = [c for c in nodes if any(d[:-1] == c for d in self.choices)]
            levels.append(
                _Level(
                    width, len(above),
                    [above.index(c[:-1]) * width + c[-1] for c in nodes],
                    [above.index(c[:-1]) * width + c[-1] for c in inner],
                    [above.index(c[:-1]) for c in inner],
                )
            )  # fmt: skip
            above = inner
        return levels

    def _tables(self, batch: int, device: torch.device) -> tuple[Shape, Tensor, list[tuple[Tensor, Tensor]]]:
        """The shape of every tree, which of all candidates its nodes are, and per level `inner` and `parents` as
        tensors: made once per batch size and device."""
        made = self.__dict__.setdefault("_made", {})
        if (batch, device) not in made:
            place = {(): 0} | {choice: i + 1 for i, choice in enumerate(self.choices)}
            parents = torch.tensor([[-1] + [place[choice[:-1]] for choice in self.choices]], device=device)
            chosen, start = [0], 1  # the root stands before the candidates of all levels
            tables = []
            for level in self._levels:
                chosen += [start + candidate for candidate in level.nodes]
                start += level.num_above * level.width
                inner = torch.tensor(level.inner, dtype=torch.long, device=device)
                above = torch.tensor([level.parents], dtype=torch.long, device=device)
                tables.append((inner, above.expand(batch, -1)))
            shape = Shape.of(parents.expand(batch, -1), self.depth)
            made[batch, device] = shape, torch.tensor(chosen, device=device), tables
        return made[batch, device]

    def grow(self, root: Tensor, expand: Expand, sampler: Sampler, vocab_size: int) -> DraftTree:
        shape, chosen, tables = self._tables(root.shape[0], root.device)
        tokens, parents = root.unsqueeze(1), None
        candidates = [tokens]
        for level, (inner, above) in zip(self._levels, tables, strict=True):
            scored = expand(tokens, parents)
            if scored.logits.shape[-1] < level.width:
                raise ValueError(
                    f"rank {level.width - 1} in a tree needs a draft vocabulary of {level.width} tokens or more, not "
                    f"{scored.logits.shape[-1]}"
                )
            candidates.append(scored.top_ids(level.width).flatten(1))
            tokens, parents = among(candidates[-1], inner), above
        return DraftTree(among(torch.cat(candidates, 1), chosen), shape.parents, self.depth, shape=shape)


def among(candidates: Tensor, chosen: Tensor) -> Tensor:
    """(B, C), (c,) ascending → (B, c): the columns chosen; all of them, as in a chain, without looking."""
    return candidates if len(chosen) == candidates.shape[1] else candidates.index_select(1, chosen)


def chain(depth: int) -> StaticTree:
    """A chain of the likeliest tokens, `depth` of them."""
    _positive("depth", depth)
    return StaticTree(tuple((0,) * n for n in range(1, depth + 1)))


def comb(depth: int, width: int = 2) -> StaticTree:
    """A chain of the likeliest tokens, and beside each its next likeliest, `width` candidates a level in all.

    It costs the drafter no more passes than the bare chain, and the target `width` times the nodes.
    """
    _positive("depth", depth)
    _positive("width", width)
    return StaticTree(tuple((*(0,) * level, rank) for level in range(depth) for rank in range(width)))


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2: at each depth the top_k likeliest paths each get top_k children; the budget − 1 best nodes stay.

    budget: nodes, root included; depth: levels drafted at most; top_k: beams, and children a beam. EAGLE-2,
    arXiv:2406.16858.
    """

    budget: int = 60
    depth: int = 7
    top_k: int = 10

    def __post_init__(self) -> None:
        for name in ("depth", "top_k"):
            _positive(name, getattr(self, name))
        most = 1 + self.top_k + (self.depth - 1) * self.top_k**2
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

    def grow(self, root: Tensor, expand: Expand, sampler: Sampler, vocab_size: int) -> DraftTree:
        batch, k = root.shape[0], self.top_k
        logp, ids = expand(root.unsqueeze(1), None).top(k)
        k = logp.shape[-1]  # fewer where the draft vocabulary is smaller
        beams, score = ids[:, 0], logp[:, 0]  # (B, k)
        # Candidate c of the lists below is node c + 1 of the full tree; the root is node 0.
        tokens, scores, parents = [beams], [score], [torch.zeros_like(beams)]
        place = torch.arange(1, k + 1, device=root.device).expand(batch, k)
        above = torch.zeros_like(beams)  # each beam's index in the level before
        made = k
        for _ in range(1, self.depth):
            logp, ids = expand(beams, above).top(k)
            reached = (score.unsqueeze(2) + logp).flatten(1)  # (B, k · k)
            tokens.append(ids.flatten(1))
            scores.append(reached)
            parents.append(place.repeat_interleave(k, 1))
            score, best = reached.topk(k, dim=1)
            beams, above, place = ids.flatten(1).gather(1, best), best // k, made + 1 + best
            made += k * k
        every, kept = torch.cat(scores, 1), self.budget - 1
        # Where a probability rounds to 1 a child ties with its parent. The stable sort keeps the earlier, the parent.
        chosen = every.sort(dim=1, descending=True, stable=True).indices[:, :kept].sort(dim=1).values
        tokens_kept = torch.cat(tokens, 1).gather(1, chosen)
        full_parents = torch.cat(parents, 1).gather(1, chosen)
        renumber = torch.zeros(batch, made + 1, dtype=torch.long, device=root.device)
        renumber.scatter_(1, chosen + 1, torch.arange(1, chosen.shape[1] + 1, device=root.device).expand_as(chosen))
        return DraftTree(
            torch.cat([root.unsqueeze(1), tokens_kept], 1),
            torch.cat([torch.full_like(root, -1).unsqueeze(1), renumber.gather(1, full_parents)], 1),
            self.depth,
        )


@dataclass(frozen=True)
class SampledTree:
    """Children drawn from the draft's law without replacement, branches[d] of them for each node at depth d.

    Worth it at temperature ≥ 1; each node carries the law it was drawn from. Sequoia, arXiv:2402.12374.
    """

    branches: tuple[int, ...] = (2, 2, 1)

    def __post_init__(self) -> None:
        if not self.branches:
            raise ValueError("branches=() must name at least one level, for instance (2, 2, 1)")
        for width in self.branches:
            _positive("each entry of branches", width)

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

    def grow(self, root: Tensor, expand: Expand, sampler: Sampler, vocab_size: int) -> DraftTree:
        batch, device = root.shape[0], root.device
        level, above, start = root.unsqueeze(1), None, 0
        tokens, parents, laws = [level], [torch.full_like(level, -1)], []
        for branch in self.branches:
            scored = expand(level, above)
            width = level.shape[1]
            q = scored.law(sampler, vocab_size).flatten(0, 1)
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
        return DraftTree(torch.cat(tokens, 1), torch.cat(parents, 1), self.depth, probs)


@dataclass(frozen=True)
class AdaptiveChain:
    """A chain that ends behind its first token of a probability in the draft's law below `confidence`, or at max_depth.

    sampled: draw the tokens from the draft's law, which they then carry; else take the likeliest. A token that ends
    the chain is part of it: left out, it would bias what is accepted in its place. A batch goes on until every row
    has met such a token. The rule of transformers' assistant_confidence_threshold.
    """

    max_depth: int = 20
    confidence: float = 0.4
    sampled: bool = False

    def __post_init__(self) -> None:
        _positive("max_depth", self.max_depth)
        if not 0 <= self.confidence <= 1:
            raise ValueError(f"confidence={self.confidence} must be a probability, 0 (never stop early) to 1")

    @property
    def num_nodes(self) -> int:
        return self.max_depth + 1

    @property
    def depth(self) -> int:
        return self.max_depth

    @property
    def drafting_slots(self) -> int:
        return self.max_depth - 1

    def grow(self, root: Tensor, expand: Expand, sampler: Sampler, vocab_size: int) -> DraftTree:
        first, above = torch.zeros_like(root).unsqueeze(1), None  # every level has one node
        tokens, parents, laws = [root.unsqueeze(1)], [first - 1], []
        unsure = torch.zeros_like(root, dtype=torch.bool)
        while len(tokens) <= self.max_depth and not bool(unsure.all()):
            scored = expand(tokens[-1], above)
            if self.sampled:
                q = scored.law(sampler, vocab_size)
                empty = q.sum(-1) <= 0  # no token is left to draw: -1 marks the unused slot
                token = sampler.draw(torch.where(empty.unsqueeze(-1), 1.0, q)[:, 0]).unsqueeze(1)
                chance = q.gather(2, token.unsqueeze(2))[:, 0, 0]
                laws.append(q)
                parents.append(torch.where(empty, -1, len(tokens) - 1))
            else:
                best, ids = scored.top(1)
                token, chance = ids[:, 0], best[:, 0, 0].exp()
                parents.append(first + len(tokens) - 1)
            unsure = unsure | (chance < self.confidence)
            tokens.append(token)
            above = first
        probs = torch.cat([laws[0], *laws], 1) if laws else None  # the root's entry is never read
        return DraftTree(torch.cat(tokens, 1), torch.cat(parents, 1), len(tokens) - 1, probs)


def default_static(budget: int, depth: int, accuracy: Sequence[float] = (0.6, 0.15, 0.07, 0.04, 0.03)) -> StaticTree:
    """The static tree of `budget` nodes, or of all there are, for a head nothing is known of: rank accuracies of a
    moderately trained one, the same and independent at each depth. One counted on data: `calibration.calibrated`."""
    if budget < 2:
        raise ValueError(f"a tree of {budget} nodes drafts nothing; ask for 2 or more")
    if budget > MAX_STATIC_NODES:
        raise ValueError(f"a static tree of {budget} nodes: ask for {MAX_STATIC_NODES} at most, or calibrate one")
    heap: list[tuple[float, tuple[int, ...]]] = [(-share, (rank,)) for rank, share in enumerate(accuracy)]
    chosen: list[tuple[int, ...]] = []
    while heap and len(chosen) < budget - 1:
        value, choice = heapq.heappop(heap)
        chosen.append(choice)
        if len(choice) < depth:
            for rank, share in enumerate(accuracy):
                heapq.heappush(heap, (value * share, (*choice, rank)))
    return StaticTree(tuple(chosen))
