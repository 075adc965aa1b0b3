"""The 95 % interval of a ratio of two speeds, by resampling (percentile bootstrap)."""

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
    drawn = draw_indices(len(work), resamples, torch.Generator().manual_seed(seed))
    tokens, seconds, reference_tokens, reference_seconds = figures[drawn].sum(1).unbind(-1)
    ratios = (tokens / seconds) / (reference_tokens / reference_seconds)
    return percentile_interval(ratios)


def draw_indices(count: int, resamples: int, generator: torch.Generator) -> Tensor:
    """(resamples, count): indices of as many as there are, with replacement."""
    return torch.randint(count, (resamples, count), generator=generator)


def percentile_interval(values: Tensor) -> tuple[float, float]:
    """The central interval that holds LEVEL of the values (n,)."""
    low, high = values.quantile(torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=torch.float64)).tolist()
    return low, high
