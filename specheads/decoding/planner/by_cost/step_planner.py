"""StepPlanner: chooses the draft of each step of a batch, the one with the most expected tokens per millisecond by what
steps cost and what was accepted so far. It sees numbers and tokens, no model and no tensors.

All rows of a batch verify trees of one size. Within it each row takes what it gains more from, the head's chain or a
copy, or nothing. A row's gain counts less if other rows are behind it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

from specheads.decoding.planner.by_cost.candidates import CHAINS, Candidates
from specheads.decoding.planner.by_cost.curves import StepCosts
from specheads.decoding.planner.by_cost.estimates import CopyEstimate, HeadEstimate

ROW_DRIFT = 0.5  # how far rows drift apart: this many tokens times the square root of those that the last still gains
NO_COPY: tuple[int, list[int]] = (0, [])


class BatchValue:
    """What accepted drafts are worth to a batch, in tokens.

    A batch is done when its last row is, so a token of a row that is ahead of the others saves no time. With R the
    tokens that each row may still gain, the batch takes about F(R) = s log Σ exp(R / s): the largest of R, and more if
    others are near it, as each may turn out to be the last. `value(gains)` is the number of rows times the drop in F
    from these gains, relative to that from a step without drafts. For one row that is 1 + its gain.

    remaining: R, or empty if new prompts replace finished rows: then it is rows + Σ gains.
    """

    def __init__(self, rows: int, remaining: Sequence[int] = ()) -> None:
        self.rows, self.slopes = rows, [1.0] * rows
        self.shares: list[float] = []
        if rows == 1 or not remaining:
            return
        most = max(remaining)
        self.scale = ROW_DRIFT * math.sqrt(most)
        sizes = [math.exp((left - most) / self.scale) for left in remaining]
        self.shares, self.factor = [size / sum(sizes) for size in sizes], rows * self.scale
        self.slopes = [rows * share for share in self.shares]

    def __call__(self, gains: Sequence[float]) -> float:
        """gains: the accepted tokens of each row."""
        if not self.shares:
            return self.rows + sum(gains)
        left = [share * math.exp(-(1 + gain) / self.scale) for share, gain in zip(self.shares, gains, strict=True)]
        return -self.factor * math.log(sum(left))

    def at_most(self, gains: Sequence[float]) -> float:
        """An upper bound that is cheaper: further tokens are never worth more than the first, since F is convex."""
        return self.rows + sum(map(mul, self.slopes, gains))


@dataclass(frozen=True)
class Choice:
    """depth: of the head's chain, 0 if it does not draft. nodes: of the tree, root included; 1 drafts nothing. copies:
    which rows take the copy. tokens: expected from the step, as `BatchValue` counts them; ms: its expected time."""

    depth: int
    nodes: int
    copies: tuple[bool, ...]
    tokens: float
    ms: float

    @property
    def rate(self) -> float:
        return self.tokens / self.ms


def choose(
    candidates: Candidates,
    head_gains: Sequence[Sequence[float]],
    copy_gains: Sequence[Sequence[float]],
    step_ms: Sequence[float],
    draft_ms: Sequence[float],
    value: BatchValue,
) -> Choice:
    """The choice with the most expected tokens per millisecond.

    head_gains: by chain and row, or empty for a choice without the head; copy_gains: by row and number of copied ids.
    Rows that have ended have no entry. step_ms: by the candidates' sizes; draft_ms: by their chains. Ties go to the
    choice without the head, and to the smaller step.
    """
    none = [0.0] * value.rows
    by_size = [[row[min(size, len(row)) - 1] for row in copy_gains] for size in candidates.sizes]
    best = Choice(0, 1, (False,) * value.rows, value(none), step_ms[0])
    rate = best.rate
    chains = candidates.chains if head_gains else ()
    for depth, drafted, own_ms in ((0, none, 0.0), *zip(chains, head_gains, draft_ms, strict=True)):
        for size, copied, verify_ms in zip(candidates.sizes, by_size, step_ms, strict=True):
            if size <= depth or (depth and candidates.own_size and size > 1 + depth):
                continue
            gains, ms = [*map(max, drafted, copied)], own_ms + verify_ms
            if value.at_most(gains) > rate * ms and (tokens := value(gains)) > rate * ms:
                copies = tuple(copy > own for copy, own in zip(copied, drafted, strict=True))
                best, rate = Choice(depth, size, copies, tokens, ms), tokens / ms
    return best


def reading_pays(best: Choice, without: Choice, share: float, tokens: float, read_ms: float) -> bool:
    """Does the head of `best` save more time over `without` than it takes to read the prompt?

    share: the share of steps so far, this one included, that would have used the head, taken to stay the same. tokens:
    how many the batch still gains; read_ms: to read the prompt.
    """
    saved = best.tokens / without.rate - best.ms
    steps = tokens / (share * best.tokens + (1 - share) * without.tokens)
    return share * steps * saved >= read_ms


@dataclass(frozen=True, slots=True)
class StepState:
    """What a choice depends on, besides what was learnt.

    candidates: what may be chosen. copies: by row, the length of the longest match and the ids that followed it before.
    remaining: by row, the tokens that it may still gain, 0 once it has finished. queue_pending: may a new prompt
    replace the next row that finishes? bound: no row has more committed tokens.
    has_read: has the head read the prompts? unread: the most positions of a row that it has not read. read: the number
    of positions to charge for reading; it leaves out the prompt, which is read once, when the head first drafts.
    """

    candidates: Candidates
    copies: list[tuple[int, list[int]]]
    remaining: Sequence[int]
    queue_pending: bool
    bound: int
    has_read: bool = False
    unread: int = 0
    read: int = 0


class StepPlanner:
    """Plans the steps of one batch.

    heads, copied: by row, how the head's drafts and copies were accepted.
    choice: the last, made for `state`; value: of that step's tokens. idle: steps since the head drafted.
    head_would_win: steps, before the head has read the prompt, in which it would have been best but for reading.
    """

    def __init__(self, costs: StepCosts, candidates: Candidates, assumed: Sequence[float], rows: int) -> None:
        """assumed: by depth, the share of a head's drafts that is expected to be right before any text says so."""
        self.costs, self.candidates, self.assumed, self.rows = costs, candidates, assumed, rows
        self.heads = [HeadEstimate(assumed, CHAINS[-1]) for _ in range(rows)]
        self.copied = [CopyEstimate() for _ in range(rows)]
        self.idle = self.head_would_win = 0
        self.state: StepState | None = None
        self.choice: Choice | None = None
        self.value = BatchValue(rows)

    def choose(self, state: StepState) -> Choice:
        """The draft of the next step."""
        self.state = state
        self.choice = self._best(state)
        self.idle = 0 if self.choice.depth else self.idle + 1
        return self.choice

    def _best(self, state: StepState) -> Choice:
        candidates, rows = state.candidates, [b for b, left in enumerate(state.remaining) if left > 0]
        copy_gains = [self.copied[b].gains(state.copies[b][0], len(state.copies[b][1])) for b in rows]
        head_gains = [self.heads[b].gains for b in rows] if candidates.chains else []
        gains = [[row[depth] for row in head_gains] for depth in candidates.chains]
        step_ms = [self.costs.step(self.rows, nodes, state.bound) for nodes in candidates.sizes]
        draft_ms = [self.costs.draft_chain(self.rows, depth, state.read) for depth in candidates.chains]
        if state.queue_pending:
            self.value = BatchValue(len(rows))
        else:
            self.value = BatchValue(len(rows), [state.remaining[b] for b in rows])
        best = choose(candidates, gains, copy_gains, step_ms, draft_ms, self.value)
        if best.depth and not state.has_read:
            without = choose(candidates, [], copy_gains, step_ms, [], self.value)
            self.head_would_win += 1
            left = sum(state.remaining[b] for b in rows)
            read_ms = self.costs.draft_chain(self.rows, best.depth, state.unread)
            read_ms -= self.costs.draft_chain(self.rows, best.depth, state.read)
            if not reading_pays(best, without, self.head_would_win / (self.idle + 1), left, read_ms):
                best = without
        taken = iter(best.copies)
        copies = tuple(left > 0 and next(taken) for left in state.remaining)
        return Choice(best.depth, best.nodes, copies, best.tokens, best.ms)

    def learn(self, gained: Sequence[Sequence[int]], ranks: Sequence[Sequence[int]]) -> None:
        """Compare the last drafts with the text that followed. gained: by row, its tokens since then; ranks: by row, an
        entry for each draft accepted."""
        if self.state is None:
            return
        for b, tokens in enumerate(gained):
            match, copy = self.state.copies[b]
            for i, (copied, token) in enumerate(zip(copy, tokens, strict=False)):
                self.copied[b].add(match + i, copied == token)
                if copied != token:
                    break
        if self.choice is not None and self.choice.depth:
            rows = zip(self.heads, gained, self.choice.copies, ranks, strict=True)
            for head, tokens, copies, accepted in rows:
                if tokens and not copies:
                    head.add(len(accepted), self.choice.depth)

    def forget(self, rows: Sequence[int]) -> None:
        """Forget these rows' texts: new prompts replace them, for which nothing has been drafted yet."""
        for row in rows:
            self.heads[row] = HeadEstimate(self.assumed, CHAINS[-1])
            self.copied[row] = CopyEstimate()
            if self.state is not None:
                self.state.copies[row] = NO_COPY
        self.choice = None
