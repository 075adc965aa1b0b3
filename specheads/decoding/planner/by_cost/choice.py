"""The draft of a step with the most expected tokens per millisecond.

All rows of a batch verify trees of one size, so the budget goes where it gains most: each row takes what gains it more
within that size, the head's tree or a copy, or nothing. What a row gains counts less where others are behind it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specheads.decoding.planner.by_cost.shapes import Menu, Shape

LUCK = 0.5  # by how many steps, over the square root of those they need, rows are expected to drift apart
PROBE_SHARE = 0.02  # of the time that may be spent on trying a head that does not seem to pay


class Worth:
    """What accepted drafts are worth to a batch, in tokens.

    A batch is done when its last row is, so a token of a row that is ahead of the others saves no time. With R the
    steps that each row still needs, the batch takes about F(R) = s log Σ exp(R / s): the largest of R, and more where
    others are near it, as each may turn out to be the last. `worth(gains)` is the number of rows times what these gains
    take off F over what a step without drafts takes off it. For one row that is 1 + its gain.

    remaining: tokens that each row may gain; pace: tokens it gained a step lately. Both are empty for rows whose places
    other texts take: then it is rows + Σ gains.
    """

    def __init__(self, rows: int, remaining: Sequence[int] = (), pace: Sequence[float] = ()) -> None:
        self.rows, self.scale = rows, 0.0
        if rows == 1 or not remaining:
            return
        steps = [left / tokens for left, tokens in zip(remaining, pace, strict=True)]
        most = max(steps)
        self.scale, self.pace = LUCK * math.sqrt(most), pace
        sizes = [math.exp((left - most) / self.scale) for left in steps]
        self.shares = [size / sum(sizes) for size in sizes]
        self.plain = self._saved([0.0] * rows)

    def __call__(self, gains: Sequence[float]) -> float:
        """gains: the accepted tokens of each row."""
        return self.rows + sum(gains) if not self.scale else self.rows * self._saved(gains) / self.plain

    def _saved(self, gains: Sequence[float]) -> float:
        parts = zip(self.shares, gains, self.pace, strict=True)
        return -math.log(sum(share * math.exp(-(1 + gain) / (tokens * self.scale)) for share, gain, tokens in parts))


@dataclass(frozen=True)
class Choice:
    """shape: the head's, None if it does not draft. nodes: of the tree, root included; 1 drafts nothing. copies: which
    rows take the copy. tokens: what is expected of the step, as `Worth` counts it; ms: of the step."""

    shape: Shape | None
    nodes: int
    copies: tuple[bool, ...]
    tokens: float
    ms: float

    @property
    def rate(self) -> float:
        return self.tokens / self.ms


def choose(
    menu: Menu,
    head_gains: Sequence[Sequence[float]],
    copy_gains: Sequence[Sequence[float]],
    step_ms: Sequence[float],
    draft_ms: Sequence[float],
    worth: Worth,
) -> Choice:
    """The choice with the most expected tokens per millisecond.

    head_gains: by shape and row; copy_gains: by row and length. Rows that have ended have no entry. step_ms: by size of
    the menu; draft_ms: by its shapes. Ties go to the smaller step, and to the one without the head.
    """
    copied = [[row[min(size, len(row)) - 1] for row in copy_gains] for size in menu.sizes]
    longest = max(map(len, copy_gains), default=1)  # a larger step copies no more
    best, shape = -1.0, None
    size_index, tokens = 0, float(worth.rows)
    for i, (nodes, ms) in enumerate(zip(menu.sizes, step_ms, strict=True)):
        expected = worth(copied[i])
        if expected > best * ms and (nodes == 1 or any(copied[i])):
            best, size_index, tokens = expected / ms, i, expected
        if nodes >= longest:
            break
    gains: Sequence[float] = ()
    for own, one, extra in zip(menu.shapes, head_gains, draft_ms, strict=True):
        for i, (nodes, ms) in enumerate(zip(menu.sizes, step_ms, strict=True)):
            if nodes < own.nodes or (menu.own_size and nodes > own.nodes):
                continue
            expected = worth([*map(max, copied[i], one)])
            if expected > best * (ms + extra):
                best, size_index, tokens, shape, gains = expected / (ms + extra), i, expected, own, one
            if nodes >= longest:
                break
    copies = tuple(copy > (gains[b] if shape else 0.0) for b, copy in enumerate(copied[size_index]))
    return Choice(shape, menu.sizes[size_index], copies, tokens, tokens / best)


def probe_is_due(best: Choice, probe_ms: float, rows: int, idle: int) -> bool:
    """May a head that has been idle for so many steps be tried? Once the time lost if nothing of it is accepted is
    PROBE_SHARE of what those steps took. probe_ms: of a step that tries it. rows: that run."""
    return probe_ms - rows / best.rate <= PROBE_SHARE * idle * best.ms
