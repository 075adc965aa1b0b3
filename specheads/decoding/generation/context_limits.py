"""How long a text may be: the lengths the base was made for and the head was trained on, and warnings past them.

Shapes: B batch rows, T positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging as hf_logging

from specheads.data.batches import documents_of
from specheads.decoding.verify.hf_base import text_config

logger = hf_logging.get_logger(__name__)


def longest_text(inputs: Mapping[str, Any]) -> Tensor:
    """() int64, the tokens of the longest document of a training batch: a row, or a packed part of one."""
    ids, documents, mask = inputs["input_ids"], inputs.get("document_ids"), inputs.get("attention_mask")
    if documents is None and (positions := inputs.get("position_ids")) is not None:
        documents = documents_of(positions, torch.ones_like(ids) if mask is None else mask)
    if documents is not None:
        index = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        starts = torch.ones_like(documents, dtype=torch.bool)
        starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
        lengths = index - torch.where(starts, index, 0).cummax(1).values + 1
        return torch.where(documents > 0, lengths, 0).max()
    if mask is not None:
        return mask.long().sum(1).max()
    return torch.tensor(ids.shape[1], device=ids.device)


def warn_past_limits(base: PreTrainedModel, trained_length: int | None, length: int) -> None:
    """Warn, once per limit, that a text of `length` tokens (the model is never fed the last one) has passed it.

    trained_length: tokens of the drafter's longest training text; None if unknown or meaningless.
    """
    if trained_length is not None and length - 1 > trained_length:
        logger.warning_once(
            f"position {trained_length + 1} is past the {trained_length} tokens that this head was trained on: the "
            "text stays right, but drafts may be accepted less; train on longer rows (data.max_length) for such texts"
        )
    limit = base_length(base)
    if limit is not None and length - 1 > limit:
        logger.warning_once(
            f"position {limit + 1} is past the {limit} tokens that {type(base).__name__} was made for "
            "(max_position_embeddings): its text may get worse, with drafts or without; keep the prompt and "
            "max_new_tokens within them"
        )


def base_length(base: PreTrainedModel) -> int | None:
    """max_position_embeddings of the base; None without one, or if its positions are `dynamic` (see rope_switch)."""
    config: Any = text_config(base)
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters, *(one for one in parameters.values() if isinstance(one, dict))]
    if any("dynamic" in str(one.get("rope_type")) for one in kinds):
        return None
    length = getattr(config, "max_position_embeddings", None)
    return length if isinstance(length, int) and length > 0 else None
