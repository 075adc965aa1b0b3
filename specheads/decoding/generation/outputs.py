"""What generate(..., return_dict_in_generate=True) returns: Hugging Face's fields, and the steps they came from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from specheads.decoding.results import AcceptanceCounts, Step


class Statistics:
    """What the steps of a generation add up to."""

    steps: list[Step] | None
    lossless: bool | None

    def statistics(self) -> dict[str, Any]:
        """Totals over all rows; accepted_length counts the bonus token, over the steps each row took part in.

        divergence_by_depth, only with output_divergences=True: the mean D of the nodes drafted at depth 1, 2 …
        """
        assert self.steps is not None
        drafting = self.steps[1:]
        counts = AcceptanceCounts.of(drafting)
        tokens = sum(len(row) for step in self.steps for row in step.tokens)
        seconds = sum(step.seconds for step in self.steps)
        totals = {
            "tokens": tokens,
            "steps": len(drafting),
            "drafted": sum(sum(step.drafted) for step in drafting),
            "accepted": sum(counts.by_depth),
            "accepted_length": counts.tokens_per_step,
            "accepted_by_depth": counts.shares,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds if seconds else float("nan"),
            "lossless": self.lossless,
        }
        if any(step.divergences for step in drafting):
            totals["divergence_by_depth"] = mean_divergences(drafting)
        return totals


@dataclass
class SpecGenerateOutput(Statistics, GenerateDecoderOnlyOutput):
    """Hugging Face's fields; steps: the prefill first; lossless: is the text distributed as the base's own?"""

    steps: list[Step] | None = None
    lossless: bool | None = None


@dataclass
class SpecSeq2SeqOutput(Statistics, GenerateEncoderDecoderOutput):
    """The same for an encoder-decoder."""

    steps: list[Step] | None = None
    lossless: bool | None = None


def mean_divergences(steps: list[Step]) -> list[float]:
    """The mean divergence of the nodes drafted at depth 1, 2 …, over steps that hold them; NaN for none."""
    by_depth: dict[int, list[float]] = {}
    for step in steps:
        for values, parents in zip(step.divergences, step.parents, strict=True):
            depths = [0]
            for value, parent in zip(values, parents, strict=True):
                depths.append(depths[parent] + 1)
                by_depth.setdefault(depths[-1], []).extend([] if math.isnan(value) else [value])
    return [sum(by_depth[d]) / len(by_depth[d]) if by_depth[d] else math.nan for d in sorted(by_depth)]


def stack_by_position(pairs: list[list[tuple[Tensor, Tensor]]], part: int) -> tuple[Tensor, ...]:
    """pairs[row][i], two tensors (V,) for token i → for each token, member `part` of all rows' pairs (B, V), in float32
    as Hugging Face returns scores; zeros for rows that have ended."""
    empty = torch.zeros_like(pairs[0][0][part])
    return tuple(
        torch.stack([row[i][part] if i < len(row) else empty for row in pairs]).float()
        for i in range(max(map(len, pairs)))
    )
