"""walk(): from the root of a verified tree as far as a rule allows.

Shapes: B batch rows, N nodes, V vocabulary, P = depth + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specheads.accept.exact import Exact
from specheads.accept.marks import kept_path
from specheads.accept.rule import Acceptance, Laws, LevelRule, PathRule, Verdict
from specheads.sampling import Sampler
from specheads.tree import DraftTree, known_all


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
    if accept.is_exact(sampler) or tree.num_nodes == 1:
        accept = Exact()
    if isinstance(accept, PathRule):
        verdict = accept.judge(laws, sampler)
    else:
        assert isinstance(accept, LevelRule)
        if type(accept) is not Exact or (tree.probs is not None and sampler.do_sample):
            verdict = at_once(laws, accept, sampler)
        elif sampler.do_sample or sampler.needs_prefix:
            verdict = sample_walk(laws, sampler)
        else:
            verdict = drawn_path(tree, laws.likeliest)
    if not keep_scores:
        return verdict
    return replace(verdict, scores=tuple((laws.at(logits, node), laws.scores_at(node)) for node in verdict.path.T))


def sample_walk(laws: Laws, sampler: Sampler) -> Verdict:
    """Token after token drawn from p, as long as a child carries it: the draws of decoding without drafts, in their
    order, so that the same seed gives the same text."""
    tree = laws.tree
    node = token = torch.zeros_like(tree.tokens[:, 0])
    going = torch.ones_like(node, dtype=torch.bool)
    path, length = [node], torch.ones_like(node)
    for depth in range(tree.max_depth + 1):
        drawn = sampler.draw(laws.p_at(node))
        token = torch.where(going, drawn, token)
        found, child = (laws.at(tree.shape.children, node) & (tree.tokens == drawn.unsqueeze(1))).max(1)
        going = going & found
        if depth == tree.max_depth or known_all(~going):
            break
        node = torch.where(going, child, node)
        length = length + going
        path.append(node)
    path += path[-1:] * (tree.max_depth + 1 - len(path))
    return Verdict(torch.stack(path, 1), length, token)


def at_once(laws: Laws, rule: LevelRule, sampler: Sampler) -> Verdict:
    """Nodes judged together before any path is followed: a few operations on all their laws, whatever the depth."""
    path, length, end = kept_path(laws.tree, rule.kept(laws))
    return Verdict(path, length, sampler.draw(rule.rest(laws, end)))


def drawn_path(tree: DraftTree, drawn: Tensor) -> Verdict:
    """The path along which each node carries the token drawn (B, N) at its parent; the bonus is the last one drawn."""
    path, length, end = kept_path(tree, drawn.gather(1, tree.shape.above) == tree.tokens)
    return Verdict(path, length, drawn.gather(1, end.unsqueeze(1)).squeeze(1))
