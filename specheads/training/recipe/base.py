"""Loading the base model of a recipe."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from specheads.hub import hub_options
from specheads.models.base.loading import as_dtype, load_language_model, quantization
from specheads.training.recipe.recipe import Recipe


def load_base(recipe: Recipe) -> PreTrainedModel:
    hub = hub_options(recipe.base)
    dtype: Any = as_dtype(recipe.base_dtype) or "auto"
    options: dict[str, Any] = {**hub, "dtype": dtype}
    if recipe.attn_implementation is not None:
        options["attn_implementation"] = recipe.attn_implementation
    if recipe.bits is not None:
        if dtype == "auto":
            dtype = getattr(AutoConfig.from_pretrained(recipe.base, **hub), "dtype", None) or torch.float32
        options["quantization_config"] = quantization(recipe.bits, dtype)
    return load_language_model(recipe.base, **options)


def padding_id(tokenizer: Any) -> int:
    """The id that pads rows to the longest of a batch."""
    return next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
