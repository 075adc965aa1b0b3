"""95 % intervals by resampling (percentile bootstrap): of a ratio of two speeds, of a median, and of accepted lengths
over seeds and prompts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

RESAMPLES = 2000
LEVEL = 0.95

Work = Sequence[tuple[float, float]]  # tokens and seconds of each prompt batch


def speed(work: Work) -> float:
    """Tokens a second: all tokens over all seconds."""
    return sum(tokens for tokens, _ in work) / sum(seconds for _, seconds in work)


def ratio_interval(
    work: Work, reference: Work, *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float] | None:
    """The interval of speed(work) / speed(reference), both over the same prompt batches in the same order.

    A resample draws as many batches as there are, with replacement, and takes both decoders' figures for each. None for
    fewer than two batches, which show no spread. The same figures always give the same interval.
    """
    if len(work) != len(reference):
        raise ValueError(f"{len(work)} prompt batches beside {len(reference)} of the reference; give the same ones")
    if len(work) < 2:
        return None
    figures = torch.tensor([[*a, *b] for a, b in zip(work, reference, strict=True)], dtype=torch.float64)  # (n, 4)
    drawn = _draw(len(work), resamples, torch.Generator().manual_seed(seed))
    tokens, seconds, reference_tokens, reference_seconds = figures[drawn].sum(1).unbind(-1)
    ratios = (tokens / seconds) / (reference_tokens / reference_seconds)
    return _percentile_interval(ratios)


def median_interval(
    values: Sequence[float], *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float] | None:
    """The interval of the median of the values, drawn with replacement; None for fewer than two."""
    if len(values) < 2:
        return None
    drawn = _draw(len(values), resamples, torch.Generator().manual_seed(seed))
    medians = torch.tensor(values, dtype=torch.float64)[drawn].quantile(0.5, dim=1)
    return _percentile_interval(medians)


def crossed_interval(
    work: Tensor, reference: Tensor | None = None, *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float] | None:
    """The interval of tokens per step, or of the difference from those of `reference`.

    work and reference (seeds, prompts, 2): the tokens and steps of each seed on each prompt. A resample draws as many
    seeds and as many prompts as there are, independently and with replacement (the pigeonhole bootstrap, Owen 2007,
    doi:10.1214/07-AOAS122), the same for both. None for fewer than two seeds or prompts. With few seeds the interval is
    too narrow: n of them show only (n - 1) / n of their variance.
    """
    if reference is not None and reference.shape != work.shape:
        raise ValueError(f"work of shape {tuple(work.shape)} beside {tuple(reference.shape)} of the reference")
    seeds, prompts, _ = work.shape
    if min(seeds, prompts) < 2:
        return None
    generator = torch.Generator().manual_seed(seed)

    def times(count: int) -> Tensor:  # (resamples, count): how many times each is drawn
        drawn = _draw(count, resamples, generator)
        return torch.zeros(resamples, count).scatter_add_(1, drawn, torch.ones(resamples, count)).double()

    of_seeds, of_prompts = times(seeds), times(prompts)

    def lengths(figures: Tensor) -> Tensor:
        tokens, steps = torch.einsum("rs,rp,spk->kr", of_seeds, of_prompts, figures.double())
        return tokens / steps

    return _percentile_interval(lengths(work) if reference is None else lengths(work) - lengths(reference))


def _draw(count: int, resamples: int, generator: torch.Generator) -> Tensor:
    """(resamples, count): indices of as many as there are, with replacement."""
    return torch.randint(count, (resamples, count), generator=generator)


def _percentile_interval(values: Tensor) -> tuple[float, float]:
    """The central interval that holds LEVEL of the values (n,)."""
    low, high = values.quantile(torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=torch.float64)).tolist()
    return low, high
