"""The draft of a step with the most expected tokens per millisecond.

All rows of a batch verify trees of one size, so the budget goes where it gains most: each row takes what gains it more
within that size, the head's tree or a copy, or nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specheads.decoding.planner.by_cost.shapes import Menu, Shape

PROBE_SHARE = 0.02  # of the time that may be spent on trying a head that does not seem to pay


@dataclass(frozen=True)
class Choice:
    """shape: the head's, None if it does not draft. nodes: of the tree, root included; 1 drafts nothing. copies: which
    rows take the copy. tokens: expected of all rows together; ms: of the step."""

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
) -> Choice:
    """The choice with the most expected tokens per millisecond.

    head_gains: by shape and row; copy_gains: by row and length. Rows that have ended have no entry. step_ms: by size of
    the menu; draft_ms: by its shapes. Ties go to the smaller step, and to the one without the head.
    """
    rows = len(copy_gains)
    copied = [[row[min(size, len(row)) - 1] for row in copy_gains] for size in menu.sizes]
    longest = max(map(len, copy_gains), default=1)  # a larger step copies no more
    best, shape = -1.0, None
    size_index, tokens = 0, float(rows)
    for i, (nodes, ms) in enumerate(zip(menu.sizes, step_ms, strict=True)):
        expected = rows + sum(copied[i])
        if expected > best * ms and (nodes == 1 or any(copied[i])):
            best, size_index, tokens = expected / ms, i, expected
        if nodes >= longest:
            break
    gains: Sequence[float] = ()
    for own, one, extra in zip(menu.shapes, head_gains, draft_ms, strict=True):
        for i, (nodes, ms) in enumerate(zip(menu.sizes, step_ms, strict=True)):
            if nodes < own.nodes or (menu.own_size and nodes > own.nodes):
                continue
            expected = rows + sum(map(max, copied[i], one))
            if expected > best * (ms + extra):
                best, size_index, tokens, shape, gains = expected / (ms + extra), i, expected, own, one
            if nodes >= longest:
                break
    copies = tuple(copy > (gains[b] if shape else 0.0) for b, copy in enumerate(copied[size_index]))
    return Choice(shape, menu.sizes[size_index], copies, tokens, tokens / best)


def probe_is_due(best: Choice, probe_ms: float, rows: int, idle: int) -> bool:
    """May a head that has been idle for so many steps be tried? Once the time lost if nothing of it is accepted is
    PROBE_SHARE of what those steps took. probe_ms: of a step that tries it."""
    return probe_ms - rows / best.rate <= PROBE_SHARE * idle * best.ms
