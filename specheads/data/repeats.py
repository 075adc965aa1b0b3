"""Mask the rows that a sharded loader repeats to fill the last batch of an epoch."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, SkipBatchSampler
from accelerate.state import GradientState

from specheads.data.rows import IGNORED


def mask_repeats(inputs: dict[str, Any], state: GradientState) -> dict[str, Any]:
    """The active loader's current batch, in which repeated rows are no longer supervised."""
    if not state.end_of_dataloader:
        return inputs
    rows = len(inputs["input_ids"])
    fresh = _fresh_rows(state.active_dataloader, rows)
    if fresh >= rows:
        return inputs
    name, ignored = ("labels", IGNORED) if "labels" in inputs else ("loss_mask", 0)
    mask = torch.arange(rows, device=inputs[name].device).unsqueeze(1) < fresh
    return {**inputs, name: torch.where(mask, inputs[name], ignored)}


def _fresh_rows(loader: Any, rows: int) -> int:
    """How many of this process's `rows` in the last batch come first and are no repeats; 0 or less for none."""
    if isinstance(loader, DataLoaderDispatcher):  # of an IterableDataset, which the first process reads for all
        return int(loader.remainder) - rows * int(loader.state.process_index)
    sampler = loader.batch_sampler
    while isinstance(sampler, SkipBatchSampler):  # of a resumed run
        sampler = sampler.batch_sampler
    if not isinstance(sampler, BatchSamplerShard) or sampler.split_batches or sampler.drop_last:
        return rows
    left_over = len(sampler.batch_sampler.sampler) % (sampler.batch_size * sampler.num_processes)
    return left_over - sampler.batch_size * sampler.process_index if left_over else rows
