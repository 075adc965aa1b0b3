"""95 % intervals by resampling: of a median, and of accepted lengths over seeds and prompts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specheads.bench.figures.intervals import RESAMPLES, draw_indices, percentile_interval


def median_interval(
    values: Sequence[float], *, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float] | None:
    """The interval of the median of the values, drawn with replacement; None for fewer than two."""
    if len(values) < 2:
        return None
    drawn = draw_indices(len(values), resamples, torch.Generator().manual_seed(seed))
    medians = torch.tensor(values, dtype=torch.float64)[drawn].quantile(0.5, dim=1)
    return percentile_interval(medians)


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
        drawn = draw_indices(count, resamples, generator)
        return torch.zeros(resamples, count).scatter_add_(1, drawn, torch.ones(resamples, count)).double()

    of_seeds, of_prompts = times(seeds), times(prompts)

    def lengths(figures: Tensor) -> Tensor:
        tokens, steps = torch.einsum("rs,rp,spk->kr", of_seeds, of_prompts, figures.double())
        return tokens / steps

    return percentile_interval(lengths(work) if reference is None else lengths(work) - lengths(reference))
