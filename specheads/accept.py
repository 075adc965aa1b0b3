"""walk() through a verified tree, and the rules that say which drafted tokens stand.

p is the target's law, q the draft's. Shapes: B batch rows, N nodes, V vocabulary, P = depth + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from specheads.sampling import Sampler
from specheads.tree import DraftTree


class Acceptance(Protocol):
    """A rule is this one method, for one level of the tree in every batch row."""

    @property
    def lossless(self) -> bool: ...

    def choose(
        self, p: Tensor, tokens: Tensor, is_child: Tensor, q: Tensor | None, sampler: Sampler
    ) -> tuple[Tensor, Tensor]:
        """p (B, V) at the current node; tokens (B, N); is_child (B, N) marks its children; q (B, V) their law.

        Returns the kept child (B,), -1 for none, and the token that follows (B,): the child's, or the bonus.
        """
        ...


@dataclass(frozen=True)
class Exact:
    """Lossless: what is emitted has the target's law.

    A point-mass draft takes the sample walk: draw y from p, descend if a child carries y. Sampled children are
    judged in order, x kept with probability min(1, p(x)/q(x)), p becoming norm((p − q)₊) and q losing x at each
    refusal. SpecInfer arXiv:2305.09781, Sequoia arXiv:2402.12374.
    """

    lossless: ClassVar[bool] = True
    # Without q the child kept is the one that carries a token drawn from p, and no other; a rule may say so.
    descends_on_draw: ClassVar[bool] = True

    def choose(
        self, p: Tensor, tokens: Tensor, is_child: Tensor, q: Tensor | None, sampler: Sampler
    ) -> tuple[Tensor, Tensor]:
        if q is None:
            token = sampler.draw(p)
            match = is_child & (tokens == token.unsqueeze(1))
            found, child = match.max(1)
            return torch.where(found, child, -1), token
        child = torch.full_like(tokens[:, 0], -1)
        order = is_child.cumsum(1) * is_child  # 1 for the first sibling, 2 for the second …
        for rank in range(1, int(order.max()) + 1):
            node = (order == rank).int().argmax(1)
            judged = (order == rank).any(1) & (child < 0)
            x = tokens.gather(1, node.unsqueeze(1))
            chance = (p.gather(1, x) / q.gather(1, x).clamp_min(torch.finfo(q.dtype).tiny)).squeeze(1).clamp(max=1)
            kept = sampler.coin(torch.where(judged, chance, 0)) & judged
            child = torch.where(kept, node, child)
            refused = (judged & ~kept).unsqueeze(1)
            p = torch.where(refused, residual(p, q), p)
            q = torch.where(refused, normalised(q.scatter(1, x, 0)), q)
        token = torch.where(child < 0, sampler.draw(p), tokens.gather(1, child.clamp_min(0).unsqueeze(1)).squeeze(1))
        return child, token


def normalised(weights: Tensor) -> Tensor:
    """Rows scaled to sum 1; an all-zero row stays zero."""
    return weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm((p − q)₊), the law of the token after a refusal; p where p = q, which is never refused."""
    excess = (p - q).clamp_min(0)
    return torch.where(excess.sum(-1, keepdim=True) > 0, normalised(excess), p)


@dataclass(frozen=True, slots=True)
class Verdict:
    """path (B, P): accepted nodes, the root first; length (B,) how many of them are real; bonus (B,) the next root.

    scores: per level the raw logits and the processed scores (B, V) of the token, where they were asked for.
    """

    path: Tensor
    length: Tensor
    bonus: Tensor
    scores: tuple[tuple[Tensor, Tensor], ...] = ()


def drawn_path(tree: DraftTree, drawn: Tensor) -> Verdict:
    """The path along which each node carries the token drawn (B, N) at its parent; the bonus is the last one drawn."""
    shape = tree.shape
    kept = (drawn.gather(1, shape.above) == tree.tokens) & shape.drafted
    whole = (kept.unsqueeze(1) | shape.unneeded).all(-1)  # (B, N): this node and all above it
    node = torch.arange(tree.num_nodes, device=drawn.device)
    # Parents stand before their children, so the nodes of a path in ascending order are the path.
    path = torch.where(whole, node, tree.num_nodes - 1).sort(1).values[:, : tree.max_depth + 1]
    length = whole.sum(1)
    return Verdict(path, length, drawn.gather(1, path.gather(1, length.unsqueeze(1) - 1)).squeeze(1))


def walk(
    tree: DraftTree,
    logits: Tensor,
    accept: Acceptance,
    sampler: Sampler,
    history: Sequence[Sequence[int]] = (),
    *,
    keep_scores: bool = False,
) -> Verdict:
    """Descend from the root as far as the rule allows, in every row at once.

    logits (B, N, V) from the target. history: each row's ids up to and with the root, read only where a logits
    processor depends on the prefix; such a processor sees each node's own.
    """
    one_hot = not (sampler.do_sample or sampler.needs_prefix or keep_scores)
    if one_hot and tree.probs is None and getattr(accept, "descends_on_draw", False):
        # A one-hot law costs nothing to draw from, so draw at every node and read the path off, without a level loop.
        scores = sampler.scores(logits.flatten(0, 1), list)
        return drawn_path(tree, sampler.draw(scores).view_as(tree.tokens))
    batch = tree.tokens.shape[0]
    rows = torch.arange(batch, device=logits.device)
    node = torch.zeros(batch, dtype=torch.long, device=logits.device)
    alive = torch.ones(batch, dtype=torch.bool, device=logits.device)
    path, bonus, length = [node], node, torch.ones_like(node)
    kept_scores: list[tuple[Tensor, Tensor]] = []

    def prefixes() -> list[list[int]]:
        chosen = tree.tokens.gather(1, torch.stack(path[1:], 1)).tolist() if len(path) > 1 else [[]] * batch
        # A finished row repeats its last node; its prefix is then read by nobody.
        return [[*row, *more] for row, more in zip(history, chosen, strict=True)]

    for level in range(tree.max_depth + 1):
        raw = logits[rows, node] if level else logits[:, 0]
        scores = sampler.scores(raw, prefixes)
        if keep_scores:
            kept_scores.append((raw, scores))
        is_child = (tree.parents == node.unsqueeze(1)) & alive.unsqueeze(1)
        q = tree.probs[rows, is_child.int().argmax(1)] if tree.probs is not None else None
        child, token = accept.choose(sampler.law_of(scores), tree.tokens, is_child, q, sampler)
        bonus = torch.where(alive, token, bonus)
        alive = alive & (child >= 0)
        # On the CPU asking costs nothing; elsewhere it would wait for the device.
        if level == tree.max_depth or (alive.device.type == "cpu" and not alive.any()):
            break
        node = torch.where(alive, child, node)
        length = length + alive
        path.append(node)
    path += [node] * (tree.max_depth + 1 - len(path))
    return Verdict(torch.stack(path, 1), length, bonus, tuple(kept_scores))
