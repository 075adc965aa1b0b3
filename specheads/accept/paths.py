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
    else:
        assert isinstance(accept, LevelRule)
        if accept.descends_on_draw and tree.probs is None:
            greedy = not (sampler.do_sample or sampler.needs_prefix)
            verdict = drawn_path(tree, sampler.draw(laws.scores)) if greedy else sample_walk(laws, sampler)
        elif sampler.needs_prefix:
            verdict = descend(laws, accept, sampler)
        else:
            verdict = at_once(laws, accept, sampler)
    if not keep_scores:
        return verdict
    return replace(verdict, scores=tuple((laws.raw_at(node), laws.scores_at(node)) for node in verdict.path.T))


def sample_walk(laws: Laws, sampler: Sampler) -> Verdict:
    """Token after token drawn from p, as long as a child carries it: the draws of decoding without drafts, in their
    order, so that the same seed gives the same text."""
    tree = laws.tree
    node = token = torch.zeros_like(tree.tokens[:, 0])
    going = torch.ones_like(node, dtype=torch.bool)
    path, length = [node], torch.ones_like(node)
    for depth in range(tree.max_depth + 1):
        level = laws.level(node)
        drawn = sampler.draw(level.p)
        token = torch.where(going, drawn, token)
        found, child = (level.is_child & (level.tokens == drawn.unsqueeze(1))).max(1)
        going = going & found
        if depth == tree.max_depth or known_all(~going):
            break
        node = torch.where(going, child, node)
        length = length + going
        path.append(node)
    return Verdict(padded(path, tree), length, token)


def at_once(laws: Laws, rule: LevelRule, sampler: Sampler) -> Verdict:
    """Every node judged, whether or not a path leads there: then two draws, the node it ends at and the token behind.

    The work is a few operations on all nodes' laws, whatever the depth.
    """
    tree, shape = laws.tree, laws.tree.shape
    batch, num = tree.tokens.shape
    chance = rule.chances(laws.every_level(), sampler).view(batch, num, num)  # from each node to each
    own = chance.sum(1, keepdim=True)  # (B, 1, N) of each node at its parent
    reached = torch.where(shape.unneeded, 1, own).prod(-1)
    end = sampler.draw(reached * (1 - chance.sum(2)).clamp_min(0))
    return Verdict(*path_to(tree, end), sampler.draw(rule.rest(laws.level(end), sampler)))


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


def descend(laws: Laws, rule: LevelRule, sampler: Sampler) -> Verdict:
    """Level by level, so that logits processors which depend on the prefix are asked for one node of each row alone."""
    tree = laws.tree
    node = torch.zeros_like(tree.tokens[:, 0])
    going = torch.ones_like(node, dtype=torch.bool)
    path, length = [node], torch.ones_like(node)
    for _ in range(tree.max_depth):
        chance = rule.chances(laws.level(node), sampler)
        stop = (1 - chance.sum(1, keepdim=True)).clamp_min(0)
        child = sampler.draw(torch.cat([chance, stop], 1))
        going = going & (child < tree.num_nodes)
        if known_all(~going):
            break
        node = torch.where(going, child, node)
        length = length + going
        path.append(node)
    return Verdict(padded(path, tree), length, sampler.draw(rule.rest(laws.level(node), sampler)))


def padded(path: list[Tensor], tree: DraftTree) -> Tensor:
    """Nodes (B,) level by level → (B, P)."""
    return torch.stack(path + path[-1:] * (tree.max_depth + 1 - len(path)), 1)
