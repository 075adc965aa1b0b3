"""walk(): from the root of a verified tree as far as a rule allows.

Shapes: B batch rows, N nodes, V vocabulary, P = depth + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specheads.accept.rule import Acceptance, Laws, Level, LevelRule, PathRule, Verdict
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
    one_hot = not (sampler.do_sample or sampler.needs_prefix or keep_scores)
    if one_hot and tree.probs is None and accept.descends_on_draw:
        # A one-hot law costs nothing to draw from, so draw at every node and read the path off, without a level loop.
        return drawn_path(tree, sampler.draw(laws.scores))
    return descend(laws, accept, sampler, keep_scores=keep_scores)


def drawn_path(tree: DraftTree, drawn: Tensor) -> Verdict:
    """The path along which each node carries the token drawn (B, N) at its parent; the bonus is the last one drawn."""
    shape = tree.shape
    kept = (drawn.gather(1, shape.above) == tree.tokens) & shape.drafted
    whole = standing(tree, kept)
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
    tree, logits = laws.tree, laws.logits
    batch = tree.tokens.shape[0]
    rows = torch.arange(batch, device=logits.device)
    node = torch.zeros(batch, dtype=torch.long, device=logits.device)
    alive = torch.ones(batch, dtype=torch.bool, device=logits.device)
    path, bonus, length = [node], node, torch.ones_like(node)
    kept_scores: list[tuple[Tensor, Tensor]] = []
    for depth in range(tree.max_depth + 1):
        raw = laws.raw_at(node) if depth else logits[:, 0]
        scores = laws.scores_at(node)
        if keep_scores:
            kept_scores.append((raw, scores))
        is_child = (tree.parents == node.unsqueeze(1)) & alive.unsqueeze(1)
        level = Level(
            sampler.law_of(scores), scores, raw, tree.tokens, is_child,
            q=tree.probs[rows, is_child.int().argmax(1)] if tree.probs is not None else None,
            draft=tree.logits.at(node) if tree.logits is not None else None,
        )  # fmt: skip
        child, token = rule.choose(level, sampler)
        bonus = torch.where(alive, token, bonus)
        alive = alive & (child >= 0)
        # On the CPU asking costs nothing; elsewhere it would wait for the device.
        if depth == tree.max_depth or (alive.device.type == "cpu" and not alive.any()):
            break
        node = torch.where(alive, child, node)
        length = length + alive
        path.append(node)
    path += [node] * (tree.max_depth + 1 - len(path))
    return Verdict(torch.stack(path, 1), length, bonus, tuple(kept_scores))
