"""How likely drafts are to be accepted: a measured or assumed prior, corrected by the tokens of this text.

Everything here depends on tokens and draft probabilities, never on a clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, chain, islice, repeat
from operator import mul

MEMORY = 32  # trials after which a trial's weight has decayed to 1/e
PRIOR_WEIGHT = 8.0  # trials that the prior counts as
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

    def add(self, hit: bool) -> None:
        self.hits = self.hits * _DECAY + hit
        self.trials = self.trials * _DECAY + 1

    def mean(self, assumed: float) -> float:
        return (self.hits + PRIOR_WEIGHT * assumed) / (self.trials + PRIOR_WEIGHT)


class HeadEstimate:
    """One row's acceptance of a head's drafts by depth (0 is the first), each given that those before were accepted.

    assumed: by depth; the last stands for all deeper ones.
    """

    def __init__(self, assumed: Sequence[float], depths: int) -> None:
        self.assumed = [assumed[min(depth, len(assumed) - 1)] for depth in range(depths)]
        self.shares = [Share() for _ in range(depths)]
        self._gains: list[float] | None = None

    def add(self, accepted: int, drafted: int) -> None:
        """Count the trials of a chain of `drafted` tokens, of which the first `accepted` were."""
        for depth, share in enumerate(self.shares[: min(accepted + 1, drafted)]):
            share.add(depth < accepted)
        self._gains = None

    @property
    def gains(self) -> list[float]:
        """Entry d: the expected accepted tokens of a chain of d drafts."""
        if self._gains is None:
            means = (share.mean(assumed) for share, assumed in zip(self.shares, self.assumed, strict=True))
            self._gains = [0.0, *accumulate(accumulate(means, mul))]
        return self._gains


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
