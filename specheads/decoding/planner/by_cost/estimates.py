"""How likely drafts are to be accepted: a measured or assumed prior, corrected by the tokens of this text.

Everything here depends on tokens and draft probabilities, never on a clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, chain, islice, repeat
from operator import mul

MEMORY = 32  # trials after which a trial's weight has decayed to 1/e
PRIOR_WEIGHT = 4.0  # trials that the prior counts as
# Buckets by the length of the match that precedes a copied token: the shortest length of each, and the share accepted.
COPY_BUCKETS = (1, 2, 3, 4, 6, 10, 16)
COPY_SHARES = (0.25, 0.45, 0.55, 0.65, 0.75, 0.85, 0.93)
SAMPLED_SHARE = 0.85  # of a head's drafts that are right in greedy text, how many are where tokens are sampled
_DECAY = 1 - 1 / MEMORY


class Share:
    """The share of hits among trials, with exponentially decaying weights."""

    __slots__ = ("hits", "trials")

    def __init__(self) -> None:
        self.hits = self.trials = 0.0

    def add(self, hit: float, weight: float = 1.0) -> None:
        self.hits = self.hits * _DECAY + hit
        self.trials = self.trials * _DECAY + weight

    def fade(self, steps: int) -> None:
        """Decay as if so many trials had passed."""
        self.hits, self.trials = self.hits * _DECAY**steps, self.trials * _DECAY**steps

    def mean(self, assumed: float) -> float:
        return (self.hits + PRIOR_WEIGHT * assumed) / (self.trials + PRIOR_WEIGHT)


def if_sampled(assumed: Sequence[Sequence[float]]) -> list[list[float]]:
    """What a head is expected to get right, by depth and rank, of sampled tokens, given the same of greedy ones."""
    return [[SAMPLED_SHARE * share for share in ranks] for ranks in assumed]


class HeadEstimate:
    """One row's acceptance of a head's drafts, by depth (0 is the first) and rank, each given that its parent was
    accepted.

    assumed: by depth and rank; the last depth stands for all deeper ones. A deviation seen at one depth is assumed at
    the next too, until that has trials of its own.
    """

    def __init__(self, assumed: Sequence[Sequence[float]], depths: int) -> None:
        self.assumed = [assumed[min(depth, len(assumed) - 1)] for depth in range(depths)]
        self.shares = [Share() for _ in range(depths)]
        self.others = Share()  # of the other ranks: what was accepted, against what was expected
        self._means: list[float] | None = None
        self._chain_gains: list[float] | None = None
        self._gains: dict[tuple[tuple[int, ...], ...], float] = {}

    def add(self, depth: int, rank: int | None, width: int = 1) -> None:
        """Count a trial: of `width` drafts at this depth, after accepted ones, that of `rank` was accepted, or none."""
        if width > 1:
            expected = sum(self._scaled(depth)[1:width])
            self.others.add((rank or 0) > 0, expected)
        self.shares[depth].add(rank == 0)
        self._forget()

    def fade(self, steps: int) -> None:
        """Decay for `steps` steps without a draft."""
        for share in (*self.shares, self.others):
            share.fade(steps)
        self._forget()

    def _forget(self) -> None:
        self._means = self._chain_gains = None
        self._gains.clear()

    @property
    def means(self) -> list[float]:
        """By depth, the acceptance of the likeliest draft."""
        if self._means is None:
            means, scale = [], 1.0
            for share, ranks in zip(self.shares, self.assumed, strict=True):
                means.append(min(1.0, share.mean(min(1.0, ranks[0] * scale))))
                scale = means[-1] / ranks[0] if ranks[0] else 1.0
            self._means = means
        return self._means

    @property
    def chain_gains(self) -> list[float]:
        """Entry d: the expected accepted tokens of a chain of d drafts."""
        if self._chain_gains is None:
            self._chain_gains = [0.0, *accumulate(accumulate(self.means, mul))]
        return self._chain_gains

    def rank_shares(self, depth: int) -> list[float]:
        """By rank, the acceptance at this depth."""
        first, *others = self._scaled(depth)
        scale = (self.others.hits + 1) / (self.others.trials + 1)
        scale = min(scale, (1 - first) / (sum(others) or 1))
        return [first, *(share * scale for share in others)]

    def _scaled(self, depth: int) -> list[float]:
        """The assumed acceptance by rank, rescaled to the observed one of the likeliest draft. The other ranks get less
        if that is better than assumed, since less probability is left, and if it is worse, since then the head is."""
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

    Each accepted token makes the match one longer, so one list serves every depth of a copy.
    """

    def __init__(self) -> None:
        self.shares = [Share() for _ in COPY_BUCKETS]
        ends = (*COPY_BUCKETS[1:], COPY_BUCKETS[-1] + 1)
        self.spans = [slice(*lengths) for lengths in zip(COPY_BUCKETS, ends, strict=True)]
        # By length; the last stands for all longer ones, and without a match nothing is copied.
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
