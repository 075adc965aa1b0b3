"""What a step gave: to the loop, as `Gain`, and to the caller, as `Step`; and what many steps accepted.

Shapes: B batch rows, N tree nodes, V vocabulary.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from specheads.decoding.acceptance import Verdict
from specheads.decoding.tree import DraftTree

# Where ranges of output positions begin: how many tokens of its text, or of its answer in a row to train on, came
# before a step, the token that it drafts from included.
RANGES = (0, 1024, 4096, 16384)
POSITIONS = tuple(sorted({*RANGES, 64, 128, 256, 512, 2048, 8192, 32768}))  # finer ranges, to find where it falls
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
class AcceptanceCounts:
    """What steps after the prefill accepted: the one definition of tokens a step and of acceptance by depth.

    steps: of all rows; tokens: gained in them, the base's own included; by_depth: in how many of them at least d drafts
    were accepted, d = 1, 2, …, if that is known. A step that ends its text with a draft gains no token of the base.
    """

    steps: int = 0
    tokens: int = 0
    by_depth: tuple[int, ...] = ()

    @classmethod
    def count(cls, gained: Iterable[int], accepted: Iterable[int] = ()) -> AcceptanceCounts:
        """gained: tokens of each step; accepted: of these, the drafted ones."""
        gains, drafts = list(gained), list(accepted)
        depths = range(1, max(drafts, default=0) + 1)
        return cls(len(gains), sum(gains), tuple(sum(n >= d for n in drafts) for d in depths))

    @classmethod
    def of(cls, steps: Iterable[Step]) -> AcceptanceCounts:
        """Of steps after the prefill, by the rows that took part in them."""
        pairs = [(len(row), n) for step in steps for row, n in zip(step.tokens, step.accepted, strict=True) if row]
        return cls.count((gained for gained, _ in pairs), (n for _, n in pairs))

    @property
    def tokens_per_step(self) -> float:
        """The accepted length; 1 where no step was needed."""
        return self.tokens / self.steps if self.steps else 1.0

    @property
    def shares(self) -> list[float]:
        """Of the steps, by depth."""
        return [n / self.steps for n in self.by_depth]

    def __add__(self, other: AcceptanceCounts) -> AcceptanceCounts:
        return self._combine(other, 1)

    def __sub__(self, other: AcceptanceCounts) -> AcceptanceCounts:
        """Of two states of a counter."""
        return self._combine(other, -1)

    def _combine(self, other: AcceptanceCounts, sign: int) -> AcceptanceCounts:
        depths = zip_longest(self.by_depth, other.by_depth, fillvalue=0)
        return AcceptanceCounts(
            self.steps + sign * other.steps, self.tokens + sign * other.tokens, tuple(a + sign * b for a, b in depths)
        )

    def __str__(self) -> str:
        depths = f", by depth {' '.join(f'{share:.3f}' for share in self.shares)}" if self.by_depth else ""
        return f"{self.tokens_per_step:.3f} tokens a step in {self.steps:,} steps{depths}"


def range_start(position: int, starts: Sequence[int] = RANGES) -> int:
    """Where the range begins in which an output position lies."""
    return starts[bisect_right(starts, position) - 1]


def range_name(start: int) -> str:
    """Of RANGES: "1–4k", "16k+"."""
    names = [f"{value // 1024}" for value in RANGES]
    i = RANGES.index(start)
    return f"{names[i]}k+" if i == len(RANGES) - 1 else f"{names[i]}–{names[i + 1]}k"


def counts_by_range(gains: Iterable[Sequence[int]], starts: Sequence[int] = RANGES) -> dict[int, AcceptanceCounts]:
    """What steps accepted, by the range of output positions in which they began. gains: per text, the tokens of each
    step, the prefill's first."""
    found: dict[int, list[int]] = {}
    for row in gains:
        position = row[0] if row else 0
        for gained in row[1:]:
            found.setdefault(range_start(position, starts), []).append(gained)
            position += gained
    return {start: AcceptanceCounts.count(found[start]) for start in sorted(found)}


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
