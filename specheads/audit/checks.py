"""Checks of a text against the base's scores, each a pure function with a known null.

Shapes: n tokens of a text, V vocabulary; scores (n, V) are processed, so p = softmax(scores) is what a right server
draws from (at temperature 0 it takes the argmax).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specheads.audit.settings import Settings

Decode = Callable[[Sequence[int]], str]  # ids to their text


def greedy_gaps(scores: Tensor, tokens: Tensor) -> Tensor:
    """(n,) max(scores) - scores[token]: 0 for the argmax, inf for a token that the processors rule out.

    Null: at most the rounding margin, always. A server that misses a share r of tokens is found within n of them with
    probability 1 - (1 - r)^n.
    """
    return scores.amax(-1) - scores.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def likelihood(scores: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(log p(x), its exact mean -H(p), its exact variance), each (n,) in float64.

    Given the prefix, log p(x) has this mean and variance whatever came before, so sums over texts are martingales.
    """
    logp = scores.double().log_softmax(-1)
    p = logp.exp()
    finite = torch.where(p > 0, logp, 0.0)
    mean = (p * finite).sum(-1)
    variance = (p * finite.square()).sum(-1) - mean.square()
    return logp.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), mean, variance.clamp_min(0)


def likelihood_z(logp: Tensor, mean: Tensor, variance: Tensor) -> float:
    """sum(log p(x) - mean) / sqrt(sum(variance)); about N(0, 1) for a right server. 0 where nothing varies.

    Below 0: unlikely tokens too often (too hot, or another model). Above: too seldom. It finds a shift of d standard
    deviations a token in about (3.3 + 1.6)² / d² tokens at a false-alarm chance of 1e-3 (two-sided, power 95 %), looked
    at once.
    """
    total = float(variance.sum())
    return float((logp - mean).sum()) / math.sqrt(total) if total > 0 else 0.0


def random_ranks(scores: Tensor, tokens: Tensor, uniforms: Tensor) -> Tensor:
    """(n,) randomised PIT: the p of all likelier tokens, plus a uniform share of the token's own.

    Null: independent and uniform on [0, 1), exactly, for any p. Ties are ordered by index; a token with p = 0 has rank
    1. uniforms (n,) in [0, 1). Randomised PIT: Brockwell 2007, doi:10.1016/j.spl.2007.02.008.
    """
    p = scores.double().softmax(-1)
    chosen = p.gather(-1, tokens.unsqueeze(-1))
    index = torch.arange(p.shape[-1], device=p.device)
    before = (p > chosen) | ((p == chosen) & (index < tokens.unsqueeze(-1)))
    return (p * before).sum(-1) + uniforms * chosen.squeeze(-1)


def uniform_distance(ranks: Tensor) -> float:
    """Kolmogorov–Smirnov distance of ranks (n,) to the uniform distribution; above 1.95 / sqrt(n) in 1 of 1,000 right
    servers, looked at once."""
    n = len(ranks)
    ordered = ranks.sort().values
    steps = torch.arange(n + 1, dtype=ordered.dtype, device=ordered.device) / n
    return float(torch.maximum(steps[1:] - ordered, ordered - steps[:-1]).max())


def impossible(scores: Tensor, uncut: Tensor, tokens: Tensor, margin: float, *, top_p: bool) -> Tensor:
    """(n,) bool: tokens that top-k, top-p or min-p rule out, and that no rounding explains. Null: none, always.

    uncut (n, V): the scores before these three. A token within the margin of the lowest score kept may have been kept
    by the server; with top_p so may the first of the tokens left out, since the sum before it may round to below it.
    """
    chosen, kept = uncut.gather(-1, tokens.unsqueeze(-1)), scores.isfinite()
    lowest = uncut.masked_fill(~kept, math.inf).amin(-1, keepdim=True)
    at_edge = chosen >= lowest - margin
    if top_p:
        at_edge |= (uncut > chosen).sum(-1, keepdim=True) <= kept.sum(-1, keepdim=True)
    return (~kept.gather(-1, tokens.unsqueeze(-1)) & ~at_edge).squeeze(-1)


def edge_mass(scores: Tensor, uncut: Tensor, settings: Settings, margin: float, shift: float) -> Tensor:
    """(n,) the probability of the token at the edge of a cut where rounding may move the edge, else 0.

    scores, uncut: after and before this cut, the settings' only one (top-k, top-p or min-p); margin: of two scores;
    shift: total variation of the distribution before the cut.
    """
    kept, p = scores.isfinite(), uncut.double().softmax(-1)
    lowest = uncut.masked_fill(~kept, math.inf).amin(-1)
    highest_out = uncut.masked_fill(kept, -math.inf).amax(-1)
    last, total = p.masked_fill(~kept, math.inf).amin(-1), (p * kept).sum(-1)
    moves = torch.zeros_like(lowest, dtype=torch.bool)
    if settings.top_k:
        moves |= lowest - highest_out <= margin
    if settings.top_p < 1:
        moves |= (total - settings.top_p <= shift) | (settings.top_p - (total - last) <= shift)
    if settings.min_p:
        limit = uncut.amax(-1) + math.log(settings.min_p)
        moves |= (lowest - limit <= margin) | (limit - highest_out <= margin)
    return moves * last / total


@dataclass(frozen=True)
class EndFault:
    """A text that ends where no right server ends it. index: of the token, within the text."""

    index: int
    words: str


def end_fault(tokens: Sequence[int], settings: Settings) -> EndFault | None:
    """How a text breaks the rules of its end: at the first EOS, else at max_tokens, never elsewhere. Null: never.

    Tokens include the EOS. With stop strings a text may be shorter.
    """
    if not tokens:
        return EndFault(0, "no token at all, not even the end")
    for i, token in enumerate(tokens[:-1]):
        if token in settings.eos:
            return EndFault(i + 1, f"{len(tokens) - i - 1} tokens after the end token {token}")
    if len(tokens) > settings.max_tokens:
        return EndFault(settings.max_tokens, f"{len(tokens)} tokens where max_tokens is {settings.max_tokens}")
    if len(tokens) < settings.max_tokens and tokens[-1] not in settings.eos and not settings.stop:
        words = f"{len(tokens)} tokens and no end token, where max_tokens is {settings.max_tokens}"
        return EndFault(len(tokens) - 1, words)
    return None


def stop_fault(tokens: Sequence[int], settings: Settings, decode: Decode, text: str | None = None) -> EndFault | None:
    """How a text breaks the rules of its stop strings: it ends with the token that completes the first of them, and the
    server's own words end before or after that string. Null: never.

    text: these words, where the server sends any. It may then send further tokens of a draft, which nobody reads.
    """
    whole = decode(tokens)
    starts = {whole.index(stop): stop for stop in settings.stop if stop in whole}
    if not starts:
        if len(tokens) < settings.max_tokens and tokens[-1] not in settings.eos:
            words = f"{len(tokens)} tokens without a stop string or an end token, where max_tokens is"
            return EndFault(len(tokens) - 1, f"{words} {settings.max_tokens}")
        return None
    before, stop = whole[: min(starts)], starts[min(starts)]
    last = next(i for i in range(len(tokens)) if any(each in decode(tokens[: i + 1]) for each in settings.stop))
    if text is None:
        after = len(tokens) - last - 1
        return EndFault(last + 1, f"{after} tokens after the stop string {stop!r}") if after else None
    if text.strip() in (before.strip(), (before + stop).strip()):
        return None
    return EndFault(last, f"its text does not end at the stop string {stop!r} but with {text[-20:]!r}")
