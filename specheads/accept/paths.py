"""walk(): from the root of a verified tree as far as a rule allows.

Shapes: B batch rows, N nodes, V vocabulary, P = depth + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specheads.accept.rule import Acceptance, Laws, LevelRule, PathRule, Verdict, known_all
from specheads.sampling import Sampler
from specheads.tree import DraftTree


def walk(
    tree: DraftTree,
    logits: Tensor,
    accept: Acceptance,
    sampler: Sampler,
    history: Sequence[Sequence[int]] = (),
    *,
    keep_scores: bool = False,
) -> Verdict:
    """What of the tree stands, in every row at once.

    logits (B, N, V) from the target. history: each row's ids up to and with the root, read only where a logits
    processor depends on the prefix; such a processor sees each node's own.
    """
    laws = Laws(tree, logits, sampler, history)
    if isinstance(accept, PathRule):
        verdict = accept.judge(laws, sampler)
        if not keep_scores:
            return verdict
        return replace(verdict, scores=tuple((laws.raw_at(node), laws.scores_at(node)) for node in verdict.path.T))
    assert isinstance(accept, LevelRule)
    if sampler.do_sample or sampler.needs_prefix or keep_scores:
        return descend(laws, accept, sampler, keep_scores=keep_scores)
    # Without chance, judging where no path leads costs no more than a level loop: judge every node, then read it off.
    if tree.probs is None and accept.descends_on_draw:
        return drawn_path(tree, sampler.draw(laws.scores))
    child, token = (chosen.view_as(tree.tokens) for chosen in accept.choose(laws.every_level(), sampler))
    node = torch.arange(tree.num_nodes, device=child.device)
    return path_along(tree, child.gather(1, tree.shape.above) == node, token)


def drawn_path(tree: DraftTree, drawn: Tensor) -> Verdict:
    """The path along which each node carries the token drawn (B, N) at its parent; the bonus is the last one drawn."""
    return path_along(tree, drawn.gather(1, tree.shape.above) == tree.tokens, drawn)


def path_along(tree: DraftTree, kept: Tensor, drawn: Tensor) -> Verdict:
    """The path of kept (B, N) nodes, of each node's children one at most; the bonus is what its last node drew."""
    whole = standing(tree, kept & tree.shape.drafted)
    node = torch.arange(tree.num_nodes, device=drawn.device)
    # Parents stand before their children, so the nodes of a path in ascending order are the path.
    path = torch.where(whole, node, tree.num_nodes - 1).sort(1).values[:, : tree.max_depth + 1]
    length = whole.sum(1)
    return Verdict(path, length, drawn.gather(1, path.gather(1, length.unsqueeze(1) - 1)).squeeze(1))


def standing(tree: DraftTree, kept: Tensor) -> Tensor:
    """(B, N) is each node kept by itself? → (B, N) is it and all above it? The root always is."""
    return (kept.unsqueeze(1) | tree.shape.unneeded).all(-1)


def path_to(tree: DraftTree, end: Tensor) -> tuple[Tensor, Tensor]:
    """The nodes (B, P) from the root to end (B,), and how many there are, (B,)."""
    row = torch.arange(len(end), device=end.device)
    on_path = tree.shape.ancestors[row, end]
    node = torch.arange(tree.num_nodes, device=end.device)
    path = torch.where(on_path, node, tree.num_nodes - 1).sort(1).values[:, : tree.max_depth + 1]
    return path, on_path.sum(1)


def descend(laws: Laws, rule: LevelRule, sampler: Sampler, *, keep_scores: bool = False) -> Verdict:
    """Level by level, from each node to the child that the rule keeps."""
    tree = laws.tree
    node = torch.zeros_like(tree.tokens[:, 0])
    alive = torch.ones_like(node, dtype=torch.bool)
    path, bonus, length = [node], node, torch.ones_like(node)
    kept_scores: list[tuple[Tensor, Tensor]] = []
    for depth in range(tree.max_depth + 1):
        level = laws.level(node, alive)
        if keep_scores:
            kept_scores.append((level.logits, level.scores))
        child, token = rule.choose(level, sampler)
        bonus = torch.where(alive, token, bonus)
        alive = alive & (child >= 0)
        if depth == tree.max_depth or known_all(~alive):
            break
        node = torch.where(alive, child, node)
        length = length + alive
        path.append(node)
    path += [node] * (tree.max_depth + 1 - len(path))
    return Verdict(torch.stack(path, 1), length, bonus, tuple(kept_scores))
