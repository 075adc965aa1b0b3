"""RowSampler: each row has its own logits processors, called as for a batch of that row alone.

So a row's scores are those of the prompt alone: without padding, and with its own prompt's length if a processor
depends on one. Shapes: R batch rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from specheads.decoding.probs.precision import at_least_float32
from specheads.decoding.probs.processors import RowProcessor, adapt
from specheads.decoding.probs.sampler import Prefixes, Sampler


class RowSampler(Sampler):
    """A `Sampler` whose rows have processors of their own, all made from the same options.

    If none needs a prefix they are the same in all rows, and are called for all rows at once.
    """

    rows_together = False

    def __init__(
        self, processors: Sequence[LogitsProcessorList], indices: Sequence[int], *, do_sample: bool,
        seeds: Sequence[int] | None,
    ) -> None:  # fmt: skip
        """processors: each row's; indices: each row's index, for processors that are given it."""
        super().__init__(processors[0], do_sample=do_sample, seeds=seeds)
        self.rows: list[tuple[int, list[Any]]] = [
            (index, adapt(own)) for index, own in zip(indices, processors, strict=True)
        ]

    def replace_row(self, row: int, processors: LogitsProcessorList, index: int) -> None:
        self.rows[row] = index, adapt(processors)

    def scores(self, logits: Tensor, prefixes: Prefixes, ended: Sequence[bool] | None = None) -> Tensor:
        if not self.needs_prefix:
            return super().scores(logits, prefixes, ended)
        result = at_least_float32(logits).clone()
        for row, prefix in enumerate(prefixes()):
            if not (ended and ended[row]):
                result[row] = self._process_row(row, list(prefix), result[row : row + 1].clone())
        return result

    def _process_row(self, row: int, prefix: list[int], scores: Tensor) -> Tensor:
        """Scores (1, V) of one row after its prefix → processed scores (V,)."""
        index, processors = self.rows[row]
        ids: Any = torch.tensor([prefix], device=scores.device)
        for processor in processors:
            if isinstance(processor, RowProcessor):
                scores = processor.row(index, prefix, scores[0]).unsqueeze(0)
            else:
                scores = processor(ids, scores)
        return scores[0]
