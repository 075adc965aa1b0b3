"""Evidence that grows with the tokens: a mixture of bets, its false-alarm chance at any stopping time, its power."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

POWER_FACTOR = 3.0  # see `tokens_to_find`
POWER = 0.95  # the probability that what is said to be found is found


@dataclass
class Evidence:
    """The wealth of K bets that begin with 1 / K each. A right server's total ever reaches 1 / alpha with probability
    at most alpha, however often it is looked at and whenever the audit stops.

    log_wealth (K,); peak: the highest log of the total so far; tokens: so many.
    """

    log_wealth: Tensor
    peak: float = 0.0
    tokens: int = 0

    @classmethod
    def empty(cls, bets: int) -> Evidence:
        return cls(torch.full((bets,), -math.log(bets), dtype=torch.float64))

    def add(self, log_factors: Tensor) -> None:
        """The log factors (n, K) of n tokens, in their order."""
        path = self.log_wealth + log_factors.double().cpu().cumsum(0)
        self.peak = max(self.peak, float(path.logsumexp(-1).max()))
        self.log_wealth, self.tokens = path[-1], self.tokens + len(path)

    @property
    def chance(self) -> float:
        """A p-value that holds at any stopping time: 1 / the highest total."""
        return math.exp(-self.peak)

    def best(self) -> int:
        """The index of the bet that won most."""
        return int(self.log_wealth.argmax())


def threshold(alpha: float, bets: int) -> float:
    """Log factor that one of `bets` equal bets must win for the total to reach 1 / alpha."""
    return math.log(bets / alpha)


def tokens_to_find(tv: float, alpha: float, bets: int) -> int:
    """Tokens within which a bet's own fault of this total variation a token is found with probability `POWER`.

    A fault r wins KL(r‖p) >= 2 tv² a token (Pinsker). The walk to the threshold T is about normal with variance twice
    its mean, so T / (2 tv²) tokens find it in half of all audits and 2 T / (2 tv²) in 95 %; the third T pays for a bet
    whose share or strength is not exactly the fault's. A fault that looks like no bet may take more.
    """
    return math.ceil(POWER_FACTOR * threshold(alpha, bets) / (2 * tv**2))


def smallest_tv(tokens: int, alpha: float, bets: int) -> float:
    """The total variation a token that so many tokens find: the inverse of `tokens_to_find`, at most 1."""
    return min(1.0, math.sqrt(POWER_FACTOR * threshold(alpha, bets) / (2 * tokens))) if tokens else 1.0


def smallest_rate(tokens: int) -> float:
    """The share of wrong tokens, each recognised at once, of which `tokens` hold at least one with probability
    `POWER`."""
    return 1 - (1 - POWER) ** (1 / tokens) if tokens else 1.0


def tokens_to_miss(rate: float) -> int:
    """The inverse of `smallest_rate`."""
    return math.ceil(math.log(1 - POWER) / math.log1p(-rate))
