"""Prompts as padded batches, and what a model's generate() added to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


def batches(
    tokenizer: Any, prompts: Sequence[str | list[int]], device: torch.device, size: int = 1, *, side: str = "left"
) -> list[dict[str, Tensor]]:
    """Prompts (text or token ids) → input_ids and attention_mask (size, T) each; the last may be smaller.

    side: of the padding; right for an encoder, which may count positions from the first column. ValueError for a
    prompt without tokens.
    """
    made = []
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    for start in range(0, len(prompts), size):
        taken = prompts[start : start + size]
        rows = [tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt for prompt in taken]
        if empty := [i for i, row in enumerate(rows) if not row]:
            raise ValueError(f"prompt {start + empty[0]} has no tokens; give at least one character")
        width = max(map(len, rows))
        ids, mask = [], []
        for row in rows:
            padding, own = [pad] * (width - len(row)), [1] * len(row)
            ids.append(padding + row if side == "left" else row + padding)
            mask.append([0] * len(padding) + own if side == "left" else own + [0] * len(padding))
        made.append({
            "input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)
        })  # fmt: skip
    return made


def new_tokens(base: PreTrainedModel, batch: dict[str, Any], sequences: Tensor) -> list[list[int]]:
    """What was generated, row by row, up to and with the end of text."""
    eos = base.generation_config.eos_token_id
    ends = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
    given = 1 if base.config.is_encoder_decoder else batch["input_ids"].shape[1]  # a decoder's text has its start token
    rows = []
    for row in sequences[:, given:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        rows.append(row[:end])
    return rows
