"""The two forms a rule takes, what each is given, and what it says.

p is the target's law, q the draft's. Shapes: B batch rows, N nodes, V vocabulary, P = depth + 1, R nodes looked at.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from specheads.sampling import Sampler
from specheads.tree import DraftTree


@dataclass
class Laws:
    """The target's law at the nodes of one verified tree, made when it is asked for.

    logits (B, N, V) are the target's. history: each row's ids up to and with the root, read only where a logits
    processor depends on the prefix; such a processor sees each node's own.
    """

    tree: DraftTree
    logits: Tensor
    sampler: Sampler
    history: Sequence[Sequence[int]] = ()

    @cached_property
    def _rows(self) -> Tensor:
        return torch.arange(len(self.logits), device=self.logits.device)

    @cached_property
    def _on_host(self) -> tuple[list[list[int]], list[list[int]]]:
        return self.tree.tokens.tolist(), self.tree.parents.tolist()

    def prefixes(self, node: Tensor) -> list[list[int]]:
        """Each row's ids up to and with its node (B,)."""
        made = []
        for row, tokens, parents, place in zip(self.history, *self._on_host, node.tolist(), strict=True):
            drafted = []
            while place > 0:
                drafted.append(tokens[place])
                place = parents[place]
            made.append([*row, *reversed(drafted)])
        return made

    def raw_at(self, node: Tensor) -> Tensor:
        """(B,) → (B, V) the target's logits at one node of each row."""
        return self.logits[self._rows, node]

    def scores_at(self, node: Tensor) -> Tensor:
        """(B,) → (B, V) the processed scores at one node of each row."""
        return self.sampler.scores(self.raw_at(node), lambda: self.prefixes(node))

    @cached_property
    def scores(self) -> Tensor:
        """(B, N, V) the processed scores at every node; zeros where a path holds a token that they rule out."""
        if not self.sampler.processors:
            return self.sampler.scores(self.logits, list)
        batch, num, _ = self.logits.shape
        if not self.sampler.needs_prefix:
            return self.sampler.scores(self.logits.flatten(0, 1), list).unflatten(0, (batch, num))
        # Node by node, because processors know rows by their place in the batch; and no processor is shown a prefix
        # that it would not have allowed, of which it may know nothing.
        shape, tokens = self.tree.shape, self.tree.tokens
        made = torch.zeros_like(self.logits, dtype=torch.promote_types(self.logits.dtype, torch.float32))
        possible = torch.zeros_like(tokens, dtype=torch.bool)
        for place in range(num):
            above = shape.above[:, place]
            allowed = made[self._rows, above, tokens[:, place]] > -torch.inf
            possible[:, place] = (shape.drafted[:, place] & possible[self._rows, above] & allowed) | (place == 0)
            own = self.scores_at(torch.where(possible[:, place], place, 0))
            made[:, place] = torch.where(possible[:, place : place + 1], own, 0)
        return made

    @cached_property
    def p(self) -> Tensor:
        """(B, N, V) the law at every node."""
        return self.sampler.law_of(self.scores)

    @cached_property
    def soft(self) -> Tensor:
        """(B, N, V) as `Level.soft`, at every node."""
        return self.scores.softmax(-1)

    def p_at(self, node: Tensor) -> Tensor:
        """(B,) → (B, V) the law at one node of each row."""
        return self.sampler.law_of(self.scores[self._rows, node])

    def level(self, node: Tensor) -> Level:
        """One node (B,) of each row."""
        known = "scores" in self.__dict__  # of every node
        scores = self.scores[self._rows, node] if known else self.scores_at(node)
        is_child = self.tree.shape.children[self._rows, node]
        return Level(self, self._rows, node, self.raw_at(node), scores, self.tree.tokens, is_child)

    def every_level(self) -> Level:
        """All nodes of all rows, (B · N) of them, row by row."""
        batch, num = self.tree.tokens.shape
        node = torch.arange(num, device=self.logits.device).repeat(batch)
        tokens, is_child = self.tree.tokens.repeat_interleave(num, 0), self.tree.shape.children.flatten(0, 1)
        row = self._rows.repeat_interleave(num)
        return Level(self, row, node, self.logits.flatten(0, 1), self.scores.flatten(0, 1), tokens, is_child)

    def at_parent(self, values: Tensor) -> Tensor:
        """(B, N) → (B, N): of each node, its parent's."""
        return values.gather(1, self.tree.shape.above)

    def of_tokens(self, laws: Tensor, place: Tensor | None = None) -> Tensor:
        """(B, N) the probability of each node's token in laws (B, M, V): in law place (B, N), or its parent's."""
        place = self.tree.shape.above if place is None else place
        return laws[self._rows.unsqueeze(1), place, self.tree.tokens]


@dataclass(frozen=True)
class Level:
    """Some nodes of a verified tree, one a row, and their children; the laws there are made when a rule reads them.

    row, node (R,): the batch row and the place of each.
    logits (R, V): the target's own, before any processor; scores (R, V): the processed ones.
    tokens (R, N) of the whole tree; is_child (R, N) marks the node's children.
    """

    laws: Laws
    row: Tensor
    node: Tensor
    logits: Tensor
    scores: Tensor
    tokens: Tensor
    is_child: Tensor

    @cached_property
    def p(self) -> Tensor:
        """(R, V) the target's law there."""
        return self.laws.sampler.law_of(self.scores)

    @cached_property
    def q(self) -> Tensor | None:
        """(R, V) the law the children were drawn from; None where they are a point mass."""
        probs = self.laws.tree.probs
        if probs is None:
            return None
        return probs.flatten(0, 1).index_select(0, self.row * probs.shape[1] + self.is_child.int().argmax(1))

    @property
    def q_of_tokens(self) -> Tensor:
        """(R, N) the chance each child was drawn with; 1 where they are a point mass."""
        probs, tokens = self.laws.tree.probs, self.laws.tree.tokens
        if probs is None:
            return torch.ones_like(self.tokens, dtype=self.logits.dtype)
        return probs.gather(2, tokens.unsqueeze(2)).squeeze(2)[self.row]

    @cached_property
    def draft(self) -> Tensor | None:
        """(R, V) the draft's own logits there, where they were kept; −inf outside a draft vocabulary."""
        kept = self.laws.tree.logits
        return None if kept is None else kept.over_target(kept.at(self.row, self.node))

    @property
    def soft(self) -> Tensor:
        """(R, V) the law under all processors before temperature 0 makes a one-hot p of it."""
        return self.scores.softmax(-1)

    @cached_property
    def first(self) -> Tensor:
        """(R,) the first child in draft order whose token no processor rules out; −1 for none."""
        allowed, child = (self.is_child & (self.scores.gather(1, self.tokens) > -torch.inf)).max(1)
        return torch.where(allowed, child, -1)


def known_all(marks: Tensor) -> bool:
    """Are all marks true, as far as asking costs nothing? False elsewhere than on a CPU, where it would wait."""
    return marks.device.type == "cpu" and bool(marks.all())


@dataclass(frozen=True)
class Verdict:
    """path (B, P): accepted nodes, the root first; length (B,) how many of them are real; bonus (B,) the next root.

    A length of 0, a row that has finished, keeps nothing.

    scores: per level the raw logits and the processed scores (B, V) of the token, where they were asked for.
    """

    path: Tensor
    length: Tensor
    bonus: Tensor
    scores: tuple[tuple[Tensor, Tensor], ...] = ()

    @cached_property
    def last(self) -> Tensor:
        """(B,) the column of the last real node."""
        return (self.length - 1).clamp_min(0)

    def following(self, tree: DraftTree) -> Tensor:
        """(B, P) the token behind each node of the path: what a row gains, its first `length` columns."""
        tokens = tree.tokens.gather(1, self.path).roll(-1, 1)
        return tokens.scatter(1, self.last.unsqueeze(1), self.bonus.unsqueeze(1))


class Acceptance(ABC):
    """Says what of a verified tree stands: a `LevelRule` or a `PathRule`."""

    @property
    @abstractmethod
    def lossless(self) -> bool:
        """Has what is emitted the target's law?"""

    @property
    def needs_draft_law(self) -> bool:
        """Does it compare the draft's law with the target's, so that a drafter that gives none is refused?"""
        return False

    @property
    def wants_draft_law(self) -> bool:
        """Does it read the draft's law where there is one?"""
        return self.needs_draft_law


class LevelRule(Acceptance):
    """A rule that judges the children of each node by themselves: how likely it goes on to each, and what follows
    where it goes on to none. Whoever walks the tree draws."""

    # Without q it is as good to draw a token from p and keep the child that carries it.
    descends_on_draw: ClassVar[bool] = False

    @abstractmethod
    def chances(self, level: Level, sampler: Sampler) -> Tensor:
        """(R, N) how likely each child is kept, together at most 1; 0 for nodes that are none."""

    @abstractmethod
    def rest(self, level: Level, sampler: Sampler) -> Tensor:
        """(R, V) the law of the token that follows where no child is kept."""


class PathRule(Acceptance):
    """A rule that judges whole paths."""

    @abstractmethod
    def judge(self, laws: Laws, sampler: Sampler) -> Verdict:
        """The verdict over `laws.tree`, whose `scores` are left to walk()."""
