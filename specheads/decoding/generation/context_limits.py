"""How long a text may be: the lengths the base was made for and the head was trained on, and warnings past them."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging as hf_logging

from specheads.decoding.verify.hf_base import text_config

logger = hf_logging.get_logger(__name__)


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
