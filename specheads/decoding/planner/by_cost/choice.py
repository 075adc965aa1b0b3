"""The draft of a step with the most expected tokens per millisecond.

All rows of a batch verify trees of one size, so the budget goes where it gains most: each row takes what gains it more
within that size, the head's tree or a copy, or nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specheads.decoding.planner.by_cost.shapes import Menu, Shape

PROBE_SHARE = 0.02  # of the time that may be spent on trying a head that does not seem to pay
Time = Callable[[int, Shape | None], float]  # nodes a row, the head's shape or None → milliseconds


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
    menu: Menu, head_gains: Sequence[Sequence[float]], copy_gains: Sequence[Sequence[float]], time: Time
) -> Choice:
    """The best choice.

    head_gains: by shape and row; copy_gains: by row and length. Rows that have ended have no entry. Ties go to the
    smaller step, and to the one without the head.
    """
    best = _without_head(menu, copy_gains, time)
    for shape, gains in zip(menu.shapes, head_gains, strict=True):
        for nodes in menu.sizes:
            if nodes < shape.nodes:
                continue
            copied = [row[min(nodes, len(row)) - 1] for row in copy_gains]
            copies = tuple(copy > gain for copy, gain in zip(copied, gains, strict=True))
            if nodes > shape.nodes and not any(copies):
                continue
            tokens = sum(1 + max(pair) for pair in zip(copied, gains, strict=True))
            choice = Choice(shape, nodes, copies, tokens, time(nodes, shape))
            if choice.rate > best.rate:
                best = choice
    return best


def _without_head(menu: Menu, copy_gains: Sequence[Sequence[float]], time: Time) -> Choice:
    best: Choice | None = None
    for nodes in menu.sizes:
        copied = [row[min(nodes, len(row)) - 1] for row in copy_gains]
        copies = tuple(copy > 0 for copy in copied)
        if nodes > 1 and not any(copies):
            break
        choice = Choice(None, nodes, copies, sum(1 + copy for copy in copied), time(nodes, None))
        if best is None or choice.rate > best.rate:
            best = choice
    assert best is not None
    return best


def probe_is_due(best: Choice, probe_ms: float, rows: int, idle: int) -> bool:
    """May a head that has been idle for so many steps be tried? Once the time lost if nothing of it is accepted is
    PROBE_SHARE of what those steps took. probe_ms: of a step that tries it."""
    return probe_ms - rows / best.rate <= PROBE_SHARE * idle * best.ms
