"""Bets against a right server: for each token, by how much each known fault multiplies its probability.

A bet is a likelihood ratio r(x) / p(x) whose mean under p is at most 1 whatever came before, so that the product over
tokens is an e-process: a right server ever reaches 1 / alpha with probability at most alpha (Ville's inequality;
arXiv:2210.01948). Shapes: n tokens of a text, V vocabulary, K bets.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor

from specheads.audit.checks import random_ranks
from specheads.audit.scoring import ScoredText

SHARES = (0.02, 0.1, 0.5)  # of the tokens that a fault may touch
TEMPERATURES = (0.5, 0.8, 1.25, 2.0)  # by which the distribution may be too cold or too hot
WAVES = tuple(product((1, 2, 3), (0.15, -0.15, 0.6, -0.6)))  # (half periods on [0, 1], amplitude)
PRIORS = (8.0, 64.0, 512.0)  # how many answers' weight p has against what earlier answers say
MAX_RATIO = 30.0  # a bet on one token; less growth, and rounding costs less

LIKELIEST = "the likeliest token is written too often, as if some tokens were greedy"
REPEATED = "the token before is written again"
ARBITRARY = "tokens are written that the model hardly gives any probability"
NO_CUT = "top-k, top-p or min-p is not applied, or after the drafts were accepted instead of before"
NO_SETTINGS = "temperature or penalties are not applied to some tokens"
LATE = "tokens follow the distribution of the position before: a lost token, or keys of a rejected draft in the cache"
RANKS = "tokens of some ranks are written too often: the wrong residual, q for p, or another model"
CORRELATED = "answers to one prompt repeat one another, or differ from p together: seeds, or the wrong residual"


def temperature_words(factor: float) -> str:
    return f"the text is too {'cold' if factor < 1 else 'hot'}, as at {factor:g} times the temperature"


ALTERNATIVES = (*map(temperature_words, TEMPERATURES), LIKELIEST, REPEATED, ARBITRARY, NO_CUT, NO_SETTINGS, LATE)
BET_NAMES = (
    *(name for name in ALTERNATIVES for _ in SHARES), *(RANKS for _ in WAVES), *(CORRELATED for _ in PRIORS)
)  # fmt: skip


@dataclass
class EarlierAnswers:
    """Which tokens followed each prefix so far, over all answers: the joint of the tokens where prompts are asked many
    times. depth: of the first tokens of each text."""

    depth: int = 8
    counts: defaultdict[tuple[int, ...], Counter[int]] = field(default_factory=lambda: defaultdict(Counter))

    def ratios(self, prompt: tuple[int, ...], tokens: list[int], probs: Tensor) -> tuple[Tensor, Tensor]:
        """r(x) / p(x) of the tokens and the largest of any token, both (n, len(PRIORS)), where
        r = (counts + c p) / (total + c), the mean of a Dirichlet posterior whose prior is p with weight c. Then counts
        these tokens. probs (n, V)."""
        chosen, largest = torch.ones(2, len(tokens), len(PRIORS), dtype=torch.float64)
        for i, (token, p) in enumerate(zip(tokens[: self.depth], probs, strict=False)):
            seen = self.counts[(*prompt, -1, *tokens[:i])]
            shares = {other: count / max(float(p[other]), 1e-300) for other, count in seen.items()}
            for k, c in enumerate(PRIORS):
                weight = seen.total() + c
                chosen[i, k] = min((shares.get(token, 0.0) + c) / weight, MAX_RATIO)
                largest[i, k] = min((max(shares.values(), default=0.0) + c) / weight, MAX_RATIO)
            seen[token] += 1
        return chosen, largest


def bet(text: ScoredText, uniforms: Tensor, earlier: EarlierAnswers) -> tuple[Tensor, Tensor]:
    """Log factors of one text (n, K) in float64: of a server whose distributions are p, and of one whose distributions
    are within `text.shift` of p in total variation.

    The second divides each factor by 1 + shift * (its largest value - its smallest), so that its mean is at most 1.
    """
    logp = text.scores.double().log_softmax(-1)
    contaminated, ranges = _contaminated(text, logp)
    ranks = random_ranks(text.scores, text.tokens, uniforms)
    waves = torch.stack([1 + a * (math.pi * k * ranks).cos() for k, a in WAVES], -1)
    wave_ranges = torch.tensor([2 * abs(a) for _, a in WAVES], dtype=torch.float64).expand_as(waves)
    repeats, repeat_ranges = earlier.ratios(text.prompt, text.tokens.tolist(), logp.exp())
    factors = torch.cat([contaminated, waves, repeats], -1)
    widths = torch.cat([ranges, wave_ranges, repeat_ranges], -1)
    exact = factors.log()
    return exact, exact - (text.shift.unsqueeze(-1) * widths).log1p()


def _contaminated(text: ScoredText, logp: Tensor) -> tuple[Tensor, Tensor]:
    """Factors 1 - s + s * r(x) / p(x) of each alternative r and share s, and how far apart two tokens' factors may be:
    both (n, alternatives * shares)."""
    n, vocabulary = logp.shape
    rows, p, tokens = torch.arange(n, device=logp.device), logp.exp(), text.tokens
    ratios, largest = [], []

    def add(logr: Tensor) -> None:
        """An alternative with log-probabilities (n, V)."""
        ratio = (logr - logp).exp().nan_to_num(0.0, posinf=MAX_RATIO).clamp_max(MAX_RATIO)  # 0 / 0: neither writes it
        ratios.append(ratio[rows, tokens])
        largest.append(ratio.amax(-1))

    def add_token(alternative: Tensor) -> None:
        """An alternative that always writes these tokens (n,)."""
        ratio = (1 / p[rows, alternative]).clamp_max(MAX_RATIO)
        ratios.append(torch.where(tokens == alternative, ratio, 0.0))
        largest.append(ratio)

    for factor in TEMPERATURES:
        add((logp / factor).log_softmax(-1))
    add_token(text.scores.argmax(-1))
    add_token(text.previous)
    add(torch.full_like(logp, -math.log(vocabulary)))
    add(text.uncut.double().log_softmax(-1))
    add(text.raw.double().log_softmax(-1))
    add(torch.cat([logp[:1], logp[:-1]]))
    shares = torch.tensor(SHARES, dtype=torch.float64, device=logp.device)
    ratio, ranges = torch.stack(ratios, -1), torch.stack(largest, -1)
    factors = 1 - shares + shares * ratio.unsqueeze(-1)  # (n, alternatives, shares)
    return factors.flatten(1), (shares * ranges.unsqueeze(-1)).flatten(1)
