"""Loading what a recipe names: its base model, the tokenizer, and rows of token ids."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from specheads.data.batches import Collator
from specheads.data.datasets import build_datasets
from specheads.data.images import processor_of, tokenizer_of
from specheads.hub import hub_options
from specheads.models.base.loading import (
    as_dtype,
    load_config,
    load_language_model,
    load_processing,
    stop_ids,
)
from specheads.training.recipe.recipe import Recipe


def load_base(recipe: Recipe, weights: bool = True) -> PreTrainedModel:
    """The base. Without weights, it is on the meta device."""
    hub = hub_options(recipe.base)
    options: dict[str, Any] = {**hub, "dtype": as_dtype(recipe.base_dtype) or "auto", "quantize": recipe.quantize}
    if recipe.attn_implementation is not None:
        options["attn_implementation"] = recipe.attn_implementation
    if not weights:
        options["device_map"] = {"": "meta"}
    return load_language_model(recipe.base, **options)


def is_quantised(recipe: Recipe) -> bool:
    """Will the base be quantised, as the recipe asks or as it was saved?"""
    config = load_config(recipe.base, **hub_options(recipe.base))
    return bool(recipe.quantize or getattr(config, "quantization_config", None))


def load_tokens(recipe: Recipe) -> tuple[PreTrainedConfig, Any, set[int]]:
    """The config of the base, its tokenizer, or its processor if it reads images, and the tokens at which it
    stops."""
    hub = hub_options(recipe.base)
    config = load_config(recipe.base, **hub)
    processing = load_processing(recipe.base, config, **hub)
    text = config.get_text_config(decoder=True)
    return config, processing, stop_ids(recipe.base, text, tokenizer_of(processing), **hub)


def load_rows(recipe: Recipe) -> tuple[Any, Any, Any]:
    """Rows to train on, held-out rows or None, and the base's tokenizer or processor."""
    assert recipe.data is not None
    config, processing, stops = load_tokens(recipe)
    vocab_size = config.get_text_config(decoder=True).vocab_size
    return *build_datasets(recipe.data, processing, vocab_size, stops), processing


def collator_of(processing: Any) -> Collator:
    """The collator of a base's rows, given its tokenizer or processor."""
    return Collator(padding_id(tokenizer_of(processing)), processor=processor_of(processing))


def padding_id(tokenizer: Any) -> int:
    """The id that pads rows to the longest of a batch."""
    return next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
