"""What a rule is, what it is given, and what it says.

p is the target's law, q the draft's. Shapes: B batch rows, N nodes, V vocabulary, P = depth + 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from specheads.decoding.acceptance.marks import kept_path
from specheads.decoding.sampler import Sampler, likeliest
from specheads.decoding.tree import DraftTree


@dataclass
class TargetProbs:
    """The target's law at the nodes of one verified tree, made when it is asked for.

    logits (B, N, V) are the target's. history: each row's ids up to and with the root, read only where a logits
    processor depends on the prefix; such a processor sees each node's own. ends (B, N): nodes that nothing follows (an
    end of text, the length limit), of which no such processor is asked; None for none. numbers (B, P), in [0, 1): by
    which a row draws its next tokens from the target's law; None: fresh ones. divergences (B, N): what
    `Acceptance.divergences` gave, where it was asked.
    """

    tree: DraftTree
    logits: Tensor
    sampler: Sampler
    history: Sequence[Sequence[int]] = ()
    ends: Tensor | None = None
    numbers: Tensor | None = None
    divergences: Tensor | None = None

    @cached_property
    def _rows(self) -> Tensor:
        return torch.arange(len(self.logits), device=self.logits.device)

    def place(self, node: Tensor) -> Tensor:
        """A node (B,) of each row, or some (B, …), counted over all rows: node i of row b is b · N + i."""
        batch, num = self.tree.tokens.shape
        return node if batch == 1 else node + (self._rows * num).view(-1, *[1] * (node.dim() - 1))

    @cached_property
    def _token_lists(self) -> list[list[int]]:
        return self.tree.tokens.tolist()

    def prefixes(self, node: Tensor) -> list[list[int]]:
        """Each row's ids up to and with its node (B,)."""
        made = []
        for row, tokens, parents, place in zip(
            self.history, self._token_lists, self.tree.topology.parent_lists, node.tolist(), strict=True
        ):
            drafted = []
            while place > 0:
                drafted.append(tokens[place])
                place = parents[place]
            made.append([*row, *reversed(drafted)])
        return made

    def at(self, values: Tensor, node: Tensor) -> Tensor:
        """Values (B, N, …) of one node (B,) of each row: (B, …)."""
        return values.flatten(0, 1).index_select(0, self.place(node))  # a third of what values[rows, node] takes

    def scores_at(self, node: Tensor) -> Tensor:
        """(B,) → (B, V) the processed scores at one node of each row."""
        # Of a root alone they are made once too: a processor that keeps state is asked once a token.
        if "scores" in self.__dict__ or (self.tree.num_nodes == 1 and self.sampler.needs_prefix):
            return self.at(self.scores, node)
        return self._asked_at(node, None if self.ends is None else self.at(self.ends, node))

    def _asked_at(self, node: Tensor, ended: Tensor | None) -> Tensor:
        """`scores_at`, asked of the processors but for rows that have ended (B,)."""
        over = None if ended is None else ended.tolist()
        return self.sampler.scores(self.at(self.logits, node), lambda: self.prefixes(node), over)

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
        topology, tokens = self.tree.topology, self.tree.tokens
        made = torch.zeros_like(self.logits, dtype=torch.promote_types(self.logits.dtype, torch.float32))
        possible = torch.zeros_like(tokens, dtype=torch.bool)
        ends = torch.zeros_like(possible) if self.ends is None else self.ends
        for place in range(num):
            above = topology.parent_index[:, place]
            allowed = made[self._rows, above, tokens[:, place]] > -torch.inf
            reached = (topology.drafted[:, place] & possible[self._rows, above] & allowed) | (place == 0)
            possible[:, place] = reached & ~ends[:, place]
            own = self._asked_at(torch.full_like(tokens[:, 0], place), ~possible[:, place])
            made[:, place] = torch.where(possible[:, place : place + 1], own, 0)
        return made

    @cached_property
    def p(self) -> Tensor:
        """(B, N, V) the law at every node."""
        return self.soft if self.sampler.do_sample else self.sampler.probs_of(self.scores)

    @cached_property
    def soft(self) -> Tensor:
        """(B, N, V) the law at every node under all processors, before temperature 0 makes a one-hot p of it."""
        return self.scores.softmax(-1)

    @cached_property
    def likeliest(self) -> Tensor:
        """(B, N) the likeliest token behind each node."""
        return likeliest(self.scores)

    @cached_property
    def drawn(self) -> Tensor:
        """(B, N) a token drawn behind each node, by its row's number for that depth; at temperature 0 the likeliest."""
        if not self.sampler.do_sample:
            return self.likeliest
        return self.sampler.draw_nodes(self.p, self.tree, self.numbers)

    def is_target_argmax(self) -> Tensor:
        """(B, N) is each node's token the likeliest at its parent? Of the root and unused slots it says nothing."""
        return self.at_parent(self.likeliest) == self.tree.tokens

    def p_at(self, node: Tensor) -> Tensor:
        """(B,) → (B, V) the law at one node of each row."""
        known = self.sampler.do_sample and "soft" in self.__dict__  # of every node
        return self.at(self.soft, node) if known else self.sampler.probs_of(self.scores_at(node))

    def draw_at(self, node: Tensor) -> Tensor:
        """(B,) tokens drawn from the laws at one node (B,) of each row, as `drawn`."""
        if not self.sampler.do_sample:
            return self.sampler.draw(self.scores_at(node))
        numbers = (
            None if self.numbers is None else self.numbers.gather(1, self.at(self.tree.topology.depth, node)[:, None])
        )
        return self.sampler.draw(self.p_at(node), None if numbers is None else numbers.squeeze(1))

    def at_parent(self, values: Tensor) -> Tensor:
        """(B, N) → (B, N): of each node, its parent's."""
        return values.gather(1, self.tree.topology.parent_index)

    def of_tokens(self, laws: Tensor, place: Tensor | None = None) -> Tensor:
        """(B, N) the probability of each node's token in laws (B, M, V): in law place (B, N), or its parent's."""
        size = laws.shape[2]
        start = self.tree.topology.rows_of(size)[1] if place is None else place * size
        return laws.flatten(1).gather(1, start + self.tree.tokens)

    @cached_property
    def first_allowed(self) -> Tensor:
        """(B, N) True at the first child, in draft order, of each node whose token no processor rules out."""
        topology = self.tree.topology
        if not self.sampler.processors:
            return topology.first
        return self.tree.first_sibling(topology.drafted & (self.of_tokens(self.scores) > -torch.inf))


@dataclass(frozen=True)
class Verdict:
    """path (B, P): accepted nodes, the root first; length (B,) how many of them are real; bonus (B,) the next root.

    A length of 0, a row that has finished, keeps nothing.

    scores: per level the raw logits and the processed scores (B, V) of the token, where they were asked for;
    divergences (B, N): see `Acceptance.divergences`, likewise.
    """

    path: Tensor
    length: Tensor
    bonus: Tensor
    scores: tuple[tuple[Tensor, Tensor], ...] = ()
    divergences: Tensor | None = None

    @cached_property
    def last(self) -> Tensor:
        """(B,) the column of the last real node."""
        return (self.length - 1).clamp_min(0)

    def following(self, tree: DraftTree) -> Tensor:
        """(B, P) the token behind each node of the path: what a row gains, its first `length` columns."""
        tokens = tree.tokens.gather(1, self.path).roll(-1, 1)
        return tokens.scatter(1, self.last.unsqueeze(1), self.bonus.unsqueeze(1))


# Names that members of a rule once had. A class that defines one of a pair has both.
OLD_MEMBERS = {"needs_draft_law": "requires_draft_probs", "wants_draft_law": "uses_draft_probs"}


class Acceptance(ABC):
    """Says what of a verified tree stands.

    name: of the rule in texts (see `Registry`). positional: its options that texts may give without their name, in
    this order; None for all. threshold_field: the option that says how much a lossy rule lets pass.
    """

    name: ClassVar[str] = ""
    positional: ClassVar[tuple[str, ...] | None] = None
    threshold_field: ClassVar[str | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for one, other in [*OLD_MEMBERS.items(), *((new, old) for old, new in OLD_MEMBERS.items())]:
            if one in vars(cls) and other not in vars(cls):
                setattr(cls, other, vars(cls)[one])

    @property
    @abstractmethod
    def lossless(self) -> bool:
        """Has what is emitted the target's law?"""

    @property
    def requires_draft_probs(self) -> bool:
        """Does it compare the draft's law with the target's, so that a drafter that gives none is refused?"""
        return False

    @property
    def uses_draft_probs(self) -> bool:
        """Does it read the draft's law where there is one?"""
        return self.requires_draft_probs

    def is_exact(self, sampler: Sampler) -> bool:
        """Does it judge as `Exact` does, which then stands in for it?"""
        return False

    def divergences(self, laws: TargetProbs) -> Tensor | None:
        """(B, N) how far apart the draft's and the target's distributions are that each drafted node's token comes
        from, those at its parent, as the rule measures it; NaN at other slots. None for a rule that does not."""
        return None

    @abstractmethod
    def judge(self, laws: TargetProbs) -> Verdict:
        """The verdict over `laws.tree`, whose `scores` are left to walk()."""


for _old, _new in OLD_MEMBERS.items():
    setattr(Acceptance, _old, vars(Acceptance)[_new])


class LevelRule(Acceptance):
    """A rule that judges the children of each node by themselves: which are kept, and what follows where none is. All
    nodes are judged before any path is followed: a few operations on all their laws, whatever the depth."""

    def judge(self, laws: TargetProbs) -> Verdict:
        path, length, end = kept_path(laws.tree, self.kept(laws))
        return Verdict(path, length, laws.sampler.draw(self.rest(laws, end)))

    @abstractmethod
    def kept(self, laws: TargetProbs) -> Tensor:
        """(B, N) bool: may the path go on to each node from its parent? It does to the first child that is kept. Drawn
        for all nodes at once; what no path leads to may be left out, and the root and unused slots say nothing."""

    @abstractmethod
    def rest(self, laws: TargetProbs, node: Tensor) -> Tensor:
        """(B, V) the law of the token that follows node (B,) of each row where none of its children is kept, but for a
        factor a row; at temperature 0 any numbers of which that token has the largest."""
