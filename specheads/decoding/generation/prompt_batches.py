"""Prompts as padded batches, packing them left, and the tokens that a model's generate() added.

Shapes: B batch rows, T columns, S source columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging as hf_logging

logger = hf_logging.get_logger(__name__)


def batches(
    tokenizer: Any, prompts: Sequence[str | list[int]], device: torch.device, size: int = 1, *, side: str = "left"
) -> list[dict[str, Tensor]]:
    """Prompts (text or token ids) → input_ids and attention_mask (size, T) each; the last may be smaller.

    side: of the padding; right for an encoder, which may count positions from the first column. ValueError for a
    prompt without tokens.
    """
    result = []
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    for start in range(0, len(prompts), size):
        chunk = prompts[start : start + size]
        rows = [tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt for prompt in chunk]
        if empty := [i for i, row in enumerate(rows) if not row]:
            raise ValueError(f"prompt {start + empty[0]} has no tokens; give at least one character")
        width = max(map(len, rows))
        ids, mask = [], []
        for row in rows:
            padding, ones = [pad] * (width - len(row)), [1] * len(row)
            ids.append(padding + row if side == "left" else row + padding)
            mask.append([0] * len(padding) + ones if side == "left" else ones + [0] * len(padding))
        result.append({
            "input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)
        })  # fmt: skip
    return result


def new_tokens(base: PreTrainedModel, batch: dict[str, Any], sequences: Tensor) -> list[list[int]]:
    """The generated tokens of each row, up to and including the end of text."""
    eos = base.generation_config.eos_token_id
    ends = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
    # A decoder with an encoder has its start token for a prompt.
    prompt = 1 if base.config.is_encoder_decoder else batch["input_ids"].shape[1]
    rows = []
    for row in sequences[:, prompt:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        rows.append(row[:end])
    return rows


def pack_left(ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """ids (B, T) under mask (B, T) → the rows without padding, as wide as the longest, and their lengths (B,)."""
    order = left_order(mask)
    if mask is None or order is None:
        return ids, torch.full((ids.shape[0],), ids.shape[1], device=ids.device)
    return ids.gather(1, order), mask.long().sum(1)


def left_order(mask: Tensor | None) -> Tensor | None:
    """mask (B, T) → (B, longest) the columns of each row that are not padding, in order, then some that are.

    None if no column is padding.
    """
    if mask is None or bool(mask.all()):
        return None
    order = (mask == 0).to(torch.int8).argsort(dim=1, stable=True)
    return order[:, : int(mask.long().sum(1).max())]


def unpadded_rows(ids: Tensor, mask: Tensor | None, num_rows: int) -> list[list[int]]:
    """Source ids (B, S) → the source of each of num_rows = B · n rows, n consecutive ones a source, without padding."""
    ids = ids.repeat_interleave(num_rows // len(ids), 0)
    packed, lengths = pack_left(ids, mask)
    return [row[:length] for row, length in zip(packed.tolist(), lengths.tolist(), strict=True)]
