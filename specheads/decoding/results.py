"""What a step gave: to the loop, as `Gain`, and to the caller, as `Step`.

Shapes: B batch rows, N tree nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specheads.decoding.acceptance import Verdict
from specheads.decoding.tree import DraftTree

TokenScores = list[list[tuple[Tensor, Tensor]]]  # per row and token: its raw logits and its processed scores (V,)


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one step. Step 0 is the prefill: one token a row, nothing drafted.

    tokens: per row the tokens gained (none for a finished row); accepted: per row how many of them were drafted;
    ranks: per row the rank of each accepted token among its siblings; drafted: per row the nodes below the root;
    seconds: wall time; scores: per row and token its raw logits and processed scores (V,), if asked for.

    If divergences were asked for, per row, where node 0 is the root and node i + 1 the i-th drafted one:
    divergences[b][i] is the rule's D between draft and target at the parent of drafted node i (in a chain: at that
    position; siblings share it; NaN if there is none), parents[b][i] that parent, path[b] the accepted nodes.
    """

    tokens: list[list[int]]
    accepted: list[int]
    ranks: list[list[int]]
    drafted: list[int]
    seconds: float
    scores: TokenScores = field(default_factory=list)
    divergences: list[list[float]] = field(default_factory=list)
    parents: list[list[int]] = field(default_factory=list)
    path: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Gain:
    """Per row, on the host: the tokens gained, the sibling ranks of the accepted ones, and how many were drafted."""

    tokens: list[list[int]]
    ranks: list[list[int]]
    drafted: list[int]


def scores_of(verdict: Verdict, gain: Gain) -> TokenScores:
    """The scores of each row's gained tokens, from a verdict that kept them."""
    levels = verdict.scores
    return [[(raw[b], processed[b]) for raw, processed in levels[: len(row)]] for b, row in enumerate(gain.tokens)]


def divergences_of(
    tree: DraftTree, verdict: Verdict, active: Sequence[bool], accepted: Sequence[int]
) -> dict[str, Any]:
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
    return {"divergences": divergences, "parents": parents, "path": paths}
