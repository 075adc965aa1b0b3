"""Mask the rows that a sharded loader repeats to fill the last batch of an epoch."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler
from accelerate.state import GradientState

from specheads.data.rows import IGNORED


def mask_repeats(inputs: dict[str, Any], state: GradientState) -> dict[str, Any]:
    """The active loader's current batch, in which repeated rows are no longer supervised."""
    if not state.end_of_dataloader:
        return inputs
    sampler = state.active_dataloader.batch_sampler
    while isinstance(sampler, SkipBatchSampler):  # of a resumed run
        sampler = sampler.batch_sampler
    if not isinstance(sampler, BatchSamplerShard) or sampler.split_batches or sampler.drop_last:
        return inputs
    left_over = len(sampler.batch_sampler.sampler) % (sampler.batch_size * sampler.num_processes)
    if not left_over:
        return inputs
    rows = len(inputs["input_ids"])
    fresh = min(rows, max(0, left_over - sampler.batch_size * sampler.process_index))
    name, ignored = ("labels", IGNORED) if "labels" in inputs else ("loss_mask", 0)
    mask = torch.arange(rows, device=inputs[name].device).unsqueeze(1) < fresh
    return {**inputs, name: torch.where(mask, inputs[name], ignored)}
