"""Masks rows that are only repeated to fill an epoch's last batch, which must have as many rows in every process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler
from accelerate.state import GradientState

from specheads.data.rows import IGNORED


def mask_repeats(inputs: dict[str, Any], state: GradientState) -> dict[str, Any]:
    """The active loader's current batch, with repeated rows unsupervised."""
    if not state.end_of_dataloader:
        return inputs
    rows = len(inputs["input_ids"])
    fresh = _fresh_rows(state.active_dataloader, rows)
    return inputs if fresh >= rows else _learning(inputs, fresh)


def _learning(inputs: dict[str, Any], fresh: int) -> dict[str, Any]:
    """The batch, with only the first `fresh` rows supervised."""
    name, ignored = ("labels", IGNORED) if "labels" in inputs else ("loss_mask", 0)
    mask = torch.arange(len(inputs["input_ids"]), device=inputs[name].device).unsqueeze(1) < fresh
    return {**inputs, name: torch.where(mask, inputs[name], ignored)}


def _fresh_rows(loader: Any, rows: int) -> int:
    """How many of this process's `rows` in the last batch are not repeats (they come first); ≤ 0 if all are."""
    sampler = loader.batch_sampler
    while isinstance(sampler, SkipBatchSampler):  # in a resumed run
        sampler = sampler.batch_sampler
    if not isinstance(sampler, BatchSamplerShard) or sampler.split_batches or sampler.drop_last:
        return rows
    left_over = len(sampler.batch_sampler.sampler) % (sampler.batch_size * sampler.num_processes)
    return left_over - sampler.batch_size * sampler.process_index if left_over else rows


@dataclass(frozen=True)
class EvenCollator:
    """Wraps `collator` and fills its batches up to a multiple of `processes` rows."""

    collator: Any
    processes: int

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        missing = -len(rows) % self.processes
        batch = self.collator([*rows, *[rows[0]] * missing])
        return _learning(batch, len(rows)) if missing else batch
