"""The draft of a step with the most expected tokens per millisecond.

All rows of a batch verify trees of one size. Within it each row takes what it gains more from, the head's tree or a
copy, or nothing. A row's gain counts less if other rows are behind it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

from specheads.decoding.planner.by_cost.shapes import CAUTION, Menu, Shape

LUCK = 0.5  # how far rows are expected to drift apart: this many steps times the square root of the steps they need
PROBE_SHARE = 0.02  # share of the time that may be spent on trying a head that does not seem to pay


class Worth:
    """What accepted drafts are worth to a batch, in tokens.

    A batch is done when its last row is, so a token of a row that is ahead of the others saves no time. With R the
    steps that each row still needs, the batch takes about F(R) = s log Σ exp(R / s): the largest of R, and more if
    others are near it, as each may turn out to be the last. `worth(gains)` is the number of rows times the drop in F
    from these gains, relative to that from a step without drafts. For one row that is 1 + its gain.

    remaining: tokens that each row may gain; pace: tokens a step that it has gained lately. Both are empty if new
    prompts replace finished rows: then it is rows + Σ gains.
    """

    def __init__(self, rows: int, remaining: Sequence[int] = (), pace: Sequence[float] = ()) -> None:
        self.rows, self.slopes = rows, [1.0] * rows
        self.exponents: list[float] = []
        if rows == 1 or not remaining:
            return
        steps = [left / gained for left, gained in zip(remaining, pace, strict=True)]
        most = max(steps)
        scale = LUCK * math.sqrt(most)
        self.exponents = [-1 / (gained * scale) for gained in pace]  # of each further token of a row
        sizes = [math.exp((n - most) / scale) for n in steps]
        after = [size * math.exp(x) for size, x in zip(sizes, self.exponents, strict=True)]
        total, left = sum(sizes), sum(after)
        self.shares, self.factor = [size / total for size in sizes], rows / math.log(left / total)
        self.slopes = [self.factor * x * size / left for x, size in zip(self.exponents, after, strict=True)]

    def __call__(self, gains: Sequence[float]) -> float:
        """gains: the accepted tokens of each row."""
        if not self.exponents:
            return self.rows + sum(gains)
        left = [share * math.exp((1 + g) * x) for share, g, x in zip(self.shares, gains, self.exponents, strict=True)]
        return self.factor * math.log(sum(left))

    def at_most(self, gains: Sequence[float]) -> float:
        """An upper bound that is cheaper: further tokens are never worth more than the first, since F is convex."""
        return self.rows + sum(map(mul, self.slopes, gains))


@dataclass(frozen=True)
class Choice:
    """shape: the head's, None if it does not draft. nodes: of the tree, root included; 1 drafts nothing. copies: which
    rows take the copy. tokens: expected from the step, as `Worth` counts them; ms: the step's expected time."""

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
    """The choice with the most expected tokens per millisecond; a draft only if it beats no draft by CAUTION.

    head_gains: by shape and row, or empty for a choice without the head; copy_gains: by row and number of copied ids.
    Rows that have ended have no entry. step_ms: by size of the menu; draft_ms: by its shapes. Ties go to the choice
    without the head, and to the smaller step.
    """
    none = [0.0] * worth.rows
    by_size = [[row[min(size, len(row)) - 1] for row in copy_gains] for size in menu.sizes]
    best = Choice(None, 1, (False,) * worth.rows, worth(none), step_ms[0])
    rate = (1 + CAUTION) * best.rate
    shapes = menu.shapes if head_gains else ()
    for shape, own, own_ms in ((None, none, 0.0), *zip(shapes, head_gains, draft_ms, strict=True)):
        for size, copied, verify_ms in zip(menu.sizes, by_size, step_ms, strict=True):
            if not menu.fits(shape, size):
                continue
            gains, ms = [*map(max, own, copied)], own_ms + verify_ms
            if worth.at_most(gains) > rate * ms and (tokens := worth(gains)) > rate * ms:
                copies = tuple(copy > drafted for copy, drafted in zip(copied, own, strict=True))
                best, rate = Choice(shape, size, copies, tokens, ms), tokens / ms
    return best


def reading_pays(best: Choice, without: Choice, share: float, tokens: float, read_ms: float) -> bool:
    """Does the head of `best` save more time over `without` made faster by CAUTION than it takes to read the prompt?

    share: the share of steps so far, this one included, that would have used the head, taken to stay the same. tokens:
    how many the batch still gains; read_ms: to read the prompt.
    """
    saved = best.tokens / ((1 + CAUTION) * without.rate) - best.ms
    steps = tokens / (share * best.tokens + (1 - share) * without.tokens)
    return share * steps * saved >= read_ms


def probe_is_due(best: Choice, probe_ms: float, rows: int, idle: int) -> bool:
    """May a head be tried that has been idle for so many steps? Yes, once the time lost if nothing is accepted is at
    most PROBE_SHARE of what those steps took. probe_ms: of a step that tries it. rows: how many are running."""
    return probe_ms - rows / best.rate <= PROBE_SHARE * idle * best.ms
