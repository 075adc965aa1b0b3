"""The draft of a step with the most expected tokens per millisecond.

All rows of a batch verify trees of one size, so the budget goes where it gains most: each row takes what gains it more
within that size, the head's tree or a copy, or nothing. What a row gains counts less where others are behind it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specheads.decoding.planner.by_cost.shapes import CAUTION, Menu, Shape

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
        self.pace = np.asarray(pace)
        steps = np.asarray(remaining) / self.pace
        self.scale = LUCK * math.sqrt(steps.max())
        sizes = np.exp((steps - steps.max()) / self.scale)
        self.shares = sizes / sizes.sum()
        self.plain = self._saved(np.zeros(rows))

    def __call__(self, gains: ArrayLike) -> NDArray[np.float64]:
        """gains (…, R): the accepted tokens of each row → (…)."""
        accepted = np.asarray(gains)
        if not self.scale:
            return np.asarray(self.rows + accepted.sum(-1))
        return np.asarray(self.rows * self._saved(accepted) / self.plain)

    def _saved(self, gains: NDArray[np.float64]) -> NDArray[np.float64]:
        return -np.log(np.exp(-(1 + gains) / (self.pace * self.scale)) @ self.shares)


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
    head_gains: Sequence[ArrayLike],
    copy_gains: ArrayLike,
    step_ms: Sequence[float],
    draft_ms: Sequence[float],
    worth: Worth,
) -> Choice:
    """The choice with the most expected tokens per millisecond, a draft only if it is ahead of none by CAUTION.

    head_gains: by shape and row; copy_gains: by row and the number copied. Rows that have ended have no entry. step_ms:
    by size of the menu; draft_ms: by its shapes. Ties go to the choice without the head, and to the smaller step.
    """
    copied = np.asarray(copy_gains)  # (R, n), and below (R, Z)
    copied, rows = copied[:, np.minimum(menu.size_array, copied.shape[1]) - 1], len(copied)
    heads = np.asarray([[0.0] * rows, *head_gains])  # (1 + S, R), first without the head
    tokens = worth(np.maximum(heads[:, None], copied.T))  # (1 + S, Z)
    ms = np.asarray(step_ms) + np.asarray([0.0, *draft_ms])[:, None]
    rate = np.where(menu.fits, tokens / ms, 0.0)
    rate[0, 0] *= 1 + CAUTION
    own, size = divmod(int(rate.argmax()), len(menu.sizes))
    copies = tuple((copied[:, size] > heads[own]).tolist())
    shape = menu.shapes[own - 1] if own else None
    return Choice(shape, menu.sizes[size], copies, float(tokens[own, size]), float(ms[own, size]))


def reading_pays(best: Choice, without: Choice, share: float, tokens: float, read_ms: float) -> bool:
    """Does the head of `best`, which would read the prompt first, save that time over what is best without it?

    share: of the steps so far, this one included, that would have drafted with it; as often it drafts from here on.
    tokens: that the batch still gains; read_ms: of the prompt.
    """
    saved = best.tokens / without.rate - best.ms
    steps = tokens / (share * best.tokens + (1 - share) * without.tokens)
    return share * steps * saved >= read_ms


def probe_is_due(best: Choice, probe_ms: float, rows: int, idle: int) -> bool:
    """May a head that has been idle for so many steps be tried? Once the time lost if nothing of it is accepted is
    PROBE_SHARE of what those steps took. probe_ms: of a step that tries it. rows: that run."""
    return probe_ms - rows / best.rate <= PROBE_SHARE * idle * best.ms
