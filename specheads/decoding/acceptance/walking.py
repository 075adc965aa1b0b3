"""walk(): a rule's verdict on a verified tree.

Shapes: B batch rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from specheads.decoding.acceptance.exact import Exact
from specheads.decoding.acceptance.rule import Acceptance, TargetProbs, Verdict
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.tree import DraftTree


def walk(
    tree: DraftTree,
    logits: Tensor,
    accept: Acceptance,
    sampler: Sampler,
    history: Sequence[Sequence[int]] = (),
    *,
    ends: Tensor | None = None,
    numbers: Tensor | None = None,
    keep_scores: bool = False,
    keep_divergences: bool = False,
) -> Verdict:
    """The rule's verdict on the tree, for all rows at once.

    logits (B, N, V): the target's. history, ends, numbers: as in `TargetProbs`. keep_scores: include the scores of each
    token. keep_divergences: include those of every node, from a rule that measures them.
    """
    target = TargetProbs(tree, logits, sampler, history, ends, numbers)
    rule = Exact() if tree.num_nodes == 1 or accept.is_exact(sampler) else accept
    verdict = rule.judge(target)
    if keep_divergences and tree.num_nodes > 1:
        # After the verdict: a "random" divergence draws numbers, and must not change those that the rule draws.
        verdict = replace(verdict, divergences=accept.divergences(target))
    if not keep_scores:
        return verdict
    return replace(verdict, scores=tuple((target.at(logits, node), target.scores_at(node)) for node in verdict.path.T))
