"""walk(): from the root of a verified tree as far as a rule allows.

Shapes: B batch rows, N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from specheads.decoding.acceptance.exact import Exact
from specheads.decoding.acceptance.rule import Acceptance, TargetProbs, Verdict
from specheads.decoding.sampler import Sampler
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
    """What of the tree stands, in every row at once.

    logits (B, N, V) from the target. history: each row's ids up to and with the root, read only where a logits
    processor depends on the prefix; such a processor sees each node's own. ends (B, N): nodes that nothing follows, of
    which no such processor is asked; None for none. numbers (B, P): as `TargetProbs` has them. keep_divergences:
    measured at every node, for a rule that does.
    """
    laws = TargetProbs(tree, logits, sampler, history, ends, numbers)
    if keep_divergences and tree.num_nodes > 1:
        laws.divergences = accept.divergences(laws)
    if tree.num_nodes == 1 or accept.is_exact(sampler):
        accept = Exact()
    verdict = accept.judge(laws)
    if laws.divergences is not None:
        verdict = replace(verdict, divergences=laws.divergences)
    if not keep_scores:
        return verdict
    return replace(verdict, scores=tuple((laws.at(logits, node), laws.scores_at(node)) for node in verdict.path.T))
