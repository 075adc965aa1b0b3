"""95 % intervals by resampling (percentile bootstrap): of a ratio of two speeds, and of a median."""

from __future__ import annotations

from collections.abc import Sequence

import torch

RESAMPLES = 2000
LEVEL = 0.95

Work = Sequence[tuple[float, float]]  # tokens and seconds of each prompt batch


def speed(work: Work) -> float:
    """Tokens a second: all tokens over all seconds."""
    return sum(tokens for tokens, _ in work) / sum(seconds for _, seconds in work)


def ratio_interval(
    work: Work, reference: Work, *, resamples: int = RESAMPLES, level: float = LEVEL, seed: int = 0
) -> tuple[float, float] | None:
    """The interval of speed(work) / speed(reference), both over the same prompt batches in the same order.

    A resample draws as many batches as there are, with replacement, and takes both decoders' figures of each. None for
    fewer than two batches, of which nothing can be said. The same figures give the same interval.
    """
    if len(work) != len(reference):
        raise ValueError(f"{len(work)} prompt batches beside {len(reference)} of the reference; give the same ones")
    if len(work) < 2:
        return None
    figures = torch.tensor([[*a, *b] for a, b in zip(work, reference, strict=True)], dtype=torch.float64)  # (n, 4)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(work), (resamples, len(work)), generator=generator)
    tokens, seconds, reference_tokens, reference_seconds = figures[drawn].sum(1).unbind(-1)
    ratios = (tokens / seconds) / (reference_tokens / reference_seconds)
    low, high = ratios.quantile(torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)).tolist()
    return low, high


def median_interval(
    values: Sequence[float], *, resamples: int = RESAMPLES, level: float = LEVEL, seed: int = 0
) -> tuple[float, float] | None:
    """The interval of the median of values, each drawn with replacement; None for fewer than two."""
    if len(values) < 2:
        return None
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(values), (resamples, len(values)), generator=generator)
    medians = torch.tensor(values, dtype=torch.float64)[drawn].quantile(0.5, dim=1)
    low, high = medians.quantile(torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)).tolist()
    return low, high
