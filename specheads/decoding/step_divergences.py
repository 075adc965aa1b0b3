"""The divergences between draft and target that a Step reports, and the tree they belong to.

Shapes: B batch rows, N tree nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specheads.decoding.acceptance import Verdict
from specheads.decoding.tree import DraftTree

StepDivergences = tuple[list[list[float]], list[list[int]], list[list[int]]]  # divergences, parents, path of a Step


def divergences_of(
    tree: DraftTree, verdict: Verdict, active: Sequence[bool], accepted: Sequence[int]
) -> StepDivergences:
    """divergences, parents and path of a Step, with `accepted` nodes a row; empty for rows that are not active."""
    nans = torch.full(tree.tokens.shape, torch.nan)
    by_slot = nans if verdict.divergences is None else verdict.divergences
    divergences, parents, paths = [], [], []
    rows = zip(by_slot.tolist(), tree.parents.tolist(), verdict.path.tolist(), active, accepted, strict=True)
    for values, slot_parents, path, takes_part, count in rows:
        drafted = [slot for slot, parent in enumerate(slot_parents) if parent >= 0 and takes_part]
        number = {0: 0} | {slot: i for i, slot in enumerate(drafted, start=1)}
        divergences.append([values[slot] for slot in drafted])
        parents.append([number[slot_parents[slot]] for slot in drafted])
        paths.append([number[slot] for slot in path[1 : count + 1]])
    return divergences, parents, paths
