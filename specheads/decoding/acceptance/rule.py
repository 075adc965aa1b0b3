"""The base class of rules, what a rule is given, the path it accepts, and the verdict it returns.

p: target probabilities, q: draft probabilities. Shapes: B batch rows, N nodes, V vocabulary, P = depth + 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specheads.decoding.probs.sampler import Sampler, likeliest
from specheads.decoding.tree import DraftTree
from specheads.decoding.tree.topology import cached_property
from specheads.options import require_number


@dataclass
class TargetProbs:
    """The target's distributions at the nodes of one verified tree, computed when they are first read.

    logits (B, N, V) are the target's. history: each row's ids up to and including the root; read only if a logits
    processor depends on the prefix. Such a processor sees each node's own prefix. ends (B, N): nodes that nothing
    follows (an end of text, the length limit), for which it is not called; None: no such node. numbers (B, P) in
    [0, 1): random numbers with which a row draws its next tokens from p; None: fresh ones. distance (B, N): between q
    and p at each node, once a rule that compares them has measured it.
    """

    tree: DraftTree
    logits: Tensor
    sampler: Sampler
    history: Sequence[Sequence[int]] = ()
    ends: Tensor | None = None
    numbers: Tensor | None = None
    distance: Tensor | None = None

    @cached_property
    def _rows(self) -> Tensor:
        return torch.arange(len(self.logits), device=self.logits.device)

    def flat_index(self, node: Tensor) -> Tensor:
        """Nodes (B, …) of each row → their index over all rows: node i of row b is b · N + i."""
        batch, num = self.tree.tokens.shape
        return node if batch == 1 else node + (self._rows * num).view(-1, *[1] * (node.dim() - 1))

    @cached_property
    def _token_lists(self) -> list[list[int]]:
        return self.tree.tokens.tolist()

    def prefixes(self, node: Tensor) -> list[list[int]]:
        """Each row's ids up to and including its node (B,)."""
        prefixes = []
        for row, tokens, parents, index in zip(
            self.history, self._token_lists, self.tree.topology.parent_lists, node.tolist(), strict=True
        ):
            drafted = []
            while index > 0:
                drafted.append(tokens[index])
                index = parents[index]
            prefixes.append([*row, *reversed(drafted)])
        return prefixes

    def at(self, values: Tensor, node: Tensor) -> Tensor:
        """Values (B, N, …) at one node (B,) of each row: (B, …)."""
        return values.flatten(0, 1).index_select(0, self.flat_index(node))  # a third of the time of values[rows, node]

    def scores_at(self, node: Tensor) -> Tensor:
        """(B,) → (B, V) the processed scores at one node of each row."""
        # Of a lone root too they are computed only once: a processor that keeps state must be called once a token.
        if "scores" in self.__dict__ or (self.tree.num_nodes == 1 and self.sampler.needs_prefix):
            return self.at(self.scores, node)
        return self._process_at(node, None if self.ends is None else self.at(self.ends, node))

    def _process_at(self, node: Tensor, ended: Tensor | None) -> Tensor:
        """`scores_at`, computed; the processors are not called for rows that have ended (B,)."""
        skipped = None if ended is None else ended.tolist()
        return self.sampler.scores(self.at(self.logits, node), lambda: self.prefixes(node), skipped)

    @cached_property
    def scores(self) -> Tensor:
        """(B, N, V) the processed scores at every node; zeros after a token that the processors rule out."""
        if not self.sampler.processors:
            return self.sampler.scores(self.logits, list)
        batch, num, _ = self.logits.shape
        if not self.sampler.needs_prefix:
            return self.sampler.scores(self.logits.flatten(0, 1), list).unflatten(0, (batch, num))
        # Node by node, because processors identify a row by its index in the batch. None is shown a prefix that it
        # would not have allowed, since it may fail there.
        topology, tokens = self.tree.topology, self.tree.tokens
        scores = torch.zeros_like(self.logits, dtype=torch.promote_types(self.logits.dtype, torch.float32))
        possible = torch.zeros_like(tokens, dtype=torch.bool)
        ends = torch.zeros_like(possible) if self.ends is None else self.ends
        for node in range(num):
            parent = topology.parent_index[:, node]
            allowed = scores[self._rows, parent, tokens[:, node]] > -torch.inf
            reached = (topology.drafted[:, node] & possible[self._rows, parent] & allowed) | (node == 0)
            possible[:, node] = reached & ~ends[:, node]
            processed = self._process_at(torch.full_like(tokens[:, 0], node), ~possible[:, node])
            scores[:, node] = torch.where(possible[:, node : node + 1], processed, 0)
        return scores

    @cached_property
    def p(self) -> Tensor:
        """(B, N, V) p at every node; one-hot at temperature 0."""
        return self.soft if self.sampler.do_sample else self.sampler.probs_of(self.scores)

    @cached_property
    def soft(self) -> Tensor:
        """(B, N, V) p at every node under all processors, before temperature 0 makes it one-hot."""
        return self.scores.softmax(-1)

    @cached_property
    def likeliest_tokens(self) -> Tensor:
        """(B, N) the likeliest token after each node."""
        return likeliest(self.scores if self.sampler.processors or "scores" in self.__dict__ else self.logits)

    @cached_property
    def draws(self) -> tuple[Tensor, Tensor]:
        """(B, N) a token drawn after each node with its row's number for that depth, at temperature 0 the likeliest;
        and (B, N) whether its p has a finite sum. The processors need no prefix."""
        if not self.sampler.do_sample:
            return self.likeliest_tokens, torch.ones_like(self.tree.tokens, dtype=torch.bool)
        known = self.__dict__.get("soft")  # of a mixture, no softmax of the logits
        return self.sampler.draw_nodes(self.logits, self.tree, self.numbers, known)

    def is_target_argmax(self) -> Tensor:
        """(B, N) is each node's token the likeliest at its parent? Meaningless at the root and at unused slots."""
        return self.at_parent(self.likeliest_tokens) == self.tree.tokens

    def p_at(self, node: Tensor) -> Tensor:
        """(B,) → (B, V) p at one node of each row."""
        known = self.sampler.do_sample and "soft" in self.__dict__  # known at every node
        return self.at(self.soft, node) if known else self.sampler.probs_of(self.scores_at(node))

    def draw_at(self, node: Tensor) -> Tensor:
        """(B,) tokens drawn from p at one node (B,) of each row, as in `draws`."""
        if not self.sampler.do_sample:
            return self.sampler.draw(self.scores_at(node))
        return self.draw_after(node, self.p_at(node))

    def draw_after(self, node: Tensor, weights: Tensor) -> Tensor:
        """(B,) tokens drawn from weights (B, V) after one node (B,) of each row, with its row's number for that depth:
        the number that would draw the token at this position without drafts."""
        numbers = None
        if self.numbers is not None:
            numbers = self.numbers.gather(1, self.at(self.tree.topology.depth, node)[:, None]).squeeze(1)
        return self.sampler.draw(weights, numbers)

    def at_parent(self, values: Tensor) -> Tensor:
        """(B, N) → (B, N): for each node its parent's value."""
        return values.gather(1, self.tree.topology.parent_index)

    def token_probs(self, probs: Tensor, index: Tensor | None = None) -> Tensor:
        """(B, N) the probability of each node's token in probs (B, M, V), at `index` (B, N), or at its parent."""
        size = probs.shape[2]
        start = self.tree.topology.row_starts(size)[1] if index is None else index * size
        return probs.flatten(1).gather(1, start + self.tree.tokens)

    @cached_property
    def first_allowed(self) -> Tensor:
        """(B, N) True at the first of each node's children, in draft order, whose token no processor rules out."""
        topology = self.tree.topology
        if not self.sampler.processors:
            return topology.first_siblings
        return self.tree.first_sibling(topology.drafted & (self.token_probs(self.scores) > -torch.inf))


@dataclass(frozen=True)
class Verdict:
    """What a rule accepts.

    path (B, P): accepted nodes, the root first. length (B,): how many of them are real; 0 in a row that has finished.
    bonus (B,): the next root. scores: at each level the raw logits and the processed scores (B, V) that gave the token,
    if they were wanted. divergences (B, N): likewise, see `Acceptance.divergences`.
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
        """(B, P) the token after each node of the path: the first `length` columns are what a row gains."""
        tokens = tree.tokens.gather(1, self.path).roll(-1, 1)
        return tokens.scatter(1, self.last.unsqueeze(1), self.bonus.unsqueeze(1))


class Acceptance(ABC):
    """Decides which nodes of a verified tree are accepted.

    name: the rule's in texts (see `Registry`). positional: the options that texts may give without their names, in
    order; None for all. threshold_field: the option that says how lossy a lossy rule is.
    """

    name: ClassVar[str] = ""
    positional: ClassVar[tuple[str, ...] | None] = None
    threshold_field: ClassVar[str | None] = None

    @property
    @abstractmethod
    def lossless(self) -> bool:
        """Does emitted text have the target's distribution?"""

    @property
    def requires_draft_probs(self) -> bool:
        """Does it need q? A drafter that gives no probabilities is then refused."""
        return False

    @property
    def uses_draft_probs(self) -> bool:
        """Does it read q if the drafter gives it?"""
        return self.requires_draft_probs

    @property
    def on_device(self) -> bool:
        """Does judge() read no tensor's value on the host, so that it can be compiled with the step?"""
        return False

    @property
    def tensor_options(self) -> tuple[str, ...]:
        """The options that may be tensors, whose values a compiled step reads at each call: judge() only computes with
        them and never branches on them."""
        return ()

    def is_exact(self, sampler: Sampler) -> bool:
        """Is it equivalent to `Exact` here? `Exact` is then used instead."""
        return False

    def divergences(self, target: TargetProbs) -> Tensor | None:
        """(B, N) the divergence of q and p at the parent of each drafted node, as the rule measures it; NaN at other
        slots. None for a rule that measures none."""
        return None

    def require_numbers(self, *names: str) -> None:
        """TypeError if one of these options is no number. Tensors pass, since a compiled step may read them."""
        for name in names:
            if not isinstance(value := getattr(self, name), Tensor):
                require_number(name, value)

    @abstractmethod
    def judge(self, target: TargetProbs) -> Verdict:
        """The verdict over `target.tree`, without `scores` and `divergences`: walk() adds these."""


def missing_draft_probs(accept: Acceptance, drafter: object) -> ValueError:
    """The error of a rule that requires draft probabilities, with a drafter that gives none."""
    return ValueError(
        f"{type(accept).__name__} compares draft and target probabilities, and {type(drafter).__name__} gives none; "
        "draft with a head or a draft model, or accept by another rule"
    )


class LevelRule(Acceptance):
    """A rule that judges each node's children independently of other nodes: which are accepted, and what follows if
    none is. All nodes are judged at once, before any path is followed: a few operations, whatever the depth."""

    def judge(self, target: TargetProbs) -> Verdict:
        path, length, end = accepted_path(target.tree, self.accept_mask(target))
        return Verdict(path, length, target.draw_after(end, self.bonus_weights(target, end)))

    @abstractmethod
    def accept_mask(self, target: TargetProbs) -> Tensor:
        """(B, N) bool: is each node accepted, given that its parent is? The path takes the first accepted child.

        Meaningless at the root and at unused slots."""

    @abstractmethod
    def bonus_weights(self, target: TargetProbs, node: Tensor) -> Tensor:
        """(B, V) the unnormalised distribution of the token after node (B,) of each row if none of its children is
        accepted. At temperature 0 any numbers whose argmax is that token."""


def accepted_path(tree: DraftTree, accept_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The path from the root that takes the first accepted child at each node, until there is none.

    accept_mask (B, N) bool. Returns the path and its length, as `path_to` does, and its end (B,).
    """
    accept_mask = accept_mask & tree.topology.drafted
    if tree.is_chain:
        end = accept_mask[:, 1:].long().cumprod(1).sum(1)
    else:
        node = torch.arange(tree.num_nodes, device=accept_mask.device)
        end = torch.where(accepted_to_root(tree, tree.first_sibling(accept_mask)), node, 0).amax(1)
    return *path_to(tree, end), end


def accepted_to_root(tree: DraftTree, accept_mask: Tensor) -> Tensor:
    """accept_mask (B, N) bool → (B, N) bool: are a node and all its ancestors accepted? The root always is."""
    return (accept_mask.unsqueeze(1) | tree.topology.not_required).all(-1)


def path_to(tree: DraftTree, end: Tensor) -> tuple[Tensor, Tensor]:
    """The nodes (B, P) from the root to end (B,), padded with the end, and how many there are, (B,)."""
    node = torch.arange(tree.num_nodes, device=end.device)
    if tree.is_chain:
        return torch.minimum(node, end.unsqueeze(1)), end + 1
    on_path = tree.topology.ancestors[torch.arange(len(end), device=end.device), end]
    path = torch.where(on_path, node, tree.num_nodes - 1).sort(1).values[:, : tree.max_depth + 1]
    length = on_path.sum(1)
    return torch.where(node[: tree.max_depth + 1] < length.unsqueeze(1), path, end.unsqueeze(1)), length
