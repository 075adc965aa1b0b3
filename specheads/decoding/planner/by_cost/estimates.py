"""How likely drafts are to be accepted: what was measured or assumed, corrected by the tokens of this text.

Everything here follows from tokens and draft probabilities, never from a clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, chain, islice, repeat
from operator import mul

MEMORY = 32  # trials after which an older one counts 1/e
PRIOR_WEIGHT = 4.0  # trials that the assumption counts as
# By the length of the match that precedes a copied token: the shortest of the bucket, and the share accepted.
COPY_BUCKETS = (1, 2, 3, 4, 6, 10, 16)
COPY_SHARES = (0.25, 0.45, 0.55, 0.65, 0.75, 0.85, 0.93)
_DECAY = 1 - 1 / MEMORY


class Share:
    """A share of hits among trials, in which older trials fade."""

    __slots__ = ("hits", "trials")

    def __init__(self) -> None:
        self.hits = self.trials = 0.0

    def add(self, hit: float, weight: float = 1.0) -> None:
        self.hits = self.hits * _DECAY + hit
        self.trials = self.trials * _DECAY + weight

    def fade(self, steps: int) -> None:
        """So many steps passed without a trial."""
        self.hits, self.trials = self.hits * _DECAY**steps, self.trials * _DECAY**steps

    def mean(self, assumed: float) -> float:
        return (self.hits + PRIOR_WEIGHT * assumed) / (self.trials + PRIOR_WEIGHT)


class HeadEstimate:
    """One row's acceptance of a head's drafts, by depth (0 is the first) and rank, each given that its parent was
    accepted.

    assumed: by depth and rank; the last depth stands for all deeper ones. A change seen at one depth is assumed of the
    next one too, until that has trials of its own.
    """

    def __init__(self, assumed: Sequence[Sequence[float]], depths: int) -> None:
        self.assumed = [assumed[min(depth, len(assumed) - 1)] for depth in range(depths)]
        self.shares = [Share() for _ in range(depths)]
        self.others = Share()  # of the other ranks: what was accepted, against what was expected
        self._means: list[float] | None = None
        self._chain_gains: list[float] | None = None
        self._gains: dict[tuple[tuple[int, ...], ...], float] = {}

    def add(self, depth: int, rank: int | None, width: int = 1) -> None:
        """Which of `width` drafts at this depth, after accepted ones, was accepted? None: none of them."""
        if width > 1:
            expected = sum(self._scaled(depth)[1:width])
            self.others.add((rank or 0) > 0, expected)
        self.shares[depth].add(rank == 0)
        self._forget()

    def fade(self, steps: int) -> None:
        """So many steps passed without a draft."""
        for share in (*self.shares, self.others):
            share.fade(steps)
        self._forget()

    def _forget(self) -> None:
        self._means = self._chain_gains = None
        self._gains.clear()

    @property
    def means(self) -> list[float]:
        """By depth, the share of the likeliest drafts that are accepted."""
        if self._means is None:
            means, scale = [], 1.0
            for share, ranks in zip(self.shares, self.assumed, strict=True):
                means.append(min(1.0, share.mean(min(1.0, ranks[0] * scale))))
                scale = means[-1] / ranks[0] if ranks[0] else 1.0
            self._means = means
        return self._means

    @property
    def chain_gains(self) -> list[float]:
        """Entry d: the expected accepted tokens of a chain of d."""
        if self._chain_gains is None:
            self._chain_gains = [0.0, *accumulate(accumulate(self.means, mul))]
        return self._chain_gains

    def rank_shares(self, depth: int) -> list[float]:
        """By rank, the share accepted at this depth."""
        first, *others = self._scaled(depth)
        scale = (self.others.hits + 1) / (self.others.trials + 1)
        scale = min(scale, (1 - first) / (sum(others) or 1))
        return [first, *(share * scale for share in others)]

    def _scaled(self, depth: int) -> list[float]:
        """What is assumed by rank, where the likeliest draft is as good as it has been. The others are worse where that
        one is better, since less is left, and where it is worse, since then the head is."""
        first, *others = self.assumed[depth]
        mean = self.means[depth]
        rest = min((1 - mean) / (1 - first) if first < 1 else 0.0, mean / first if first else 0.0)
        return [mean, *(share * rest for share in others)]

    def tree_gain(self, choices: tuple[tuple[int, ...], ...]) -> float:
        """The expected accepted tokens of a static tree, whose choices come parents first."""
        if choices not in self._gains:
            shares = [self.rank_shares(depth) for depth in range(max(map(len, choices)))]
            chances: dict[tuple[int, ...], float] = {(): 1.0}
            for choice in choices:
                ranks = shares[len(choice) - 1]
                chances[choice] = chances[choice[:-1]] * (ranks[choice[-1]] if choice[-1] < len(ranks) else 0.0)
            self._gains[choices] = sum(chances.values()) - 1
        return self._gains[choices]


class CopyEstimate:
    """One row's acceptance of copied tokens, by the length of the match before each.

    After accepted ones the match is longer by their number, so one list serves every depth of a copy.
    """

    def __init__(self) -> None:
        self.shares = [Share() for _ in COPY_BUCKETS]
        ends = (*COPY_BUCKETS[1:], COPY_BUCKETS[-1] + 1)
        self.spans = [slice(*lengths) for lengths in zip(COPY_BUCKETS, ends, strict=True)]
        # By length; the last stands for all longer ones, and where nothing matches, nothing is copied.
        self.means = [0.0] * ends[-1]
        for span, share in zip(self.spans, COPY_SHARES, strict=True):
            self.means[span] = [share] * (span.stop - span.start)

    def add(self, match: int, hit: bool) -> None:
        bucket = bisect_right(COPY_BUCKETS, match) - 1
        self.shares[bucket].add(hit)
        span = self.spans[bucket]
        self.means[span] = [self.shares[bucket].mean(COPY_SHARES[bucket])] * (span.stop - span.start)

    def gains(self, match: int, count: int) -> list[float]:
        """Entry n: the expected accepted tokens of the first n ≤ count copied after a match of this length."""
        chances = islice(chain(self.means[match:], repeat(self.means[-1])), count)
        return [0.0, *accumulate(accumulate(chances, mul))]


class Calibration:
    """The share of drafts that are accepted, by the draft's own probability or confidence in them."""

    BINS = 8

    def __init__(self) -> None:
        self.shares = [Share() for _ in range(self.BINS)]

    def add(self, confidence: float, hit: bool) -> None:
        self.shares[self._bin(confidence)].add(hit)

    def __call__(self, confidence: float) -> float:
        """The probability as it has proved itself: in a bin without trials, as the draft states it."""
        share = self.shares[self._bin(confidence)]
        return min(1.0, share.mean(confidence))

    def _bin(self, confidence: float) -> int:
        if confidence != confidence:  # a head whose weights are not finite may say NaN
            return 0
        return min(self.BINS - 1, max(0, int(confidence * self.BINS)))
