"""The arguments of generate_many(): prompts as ids, options shared and per prompt, and what is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from specheads.decoding.generation.hf_options import (
    check_lengths,
    effective_config,
    refuse_arguments,
    stop_string_criteria,
)
from specheads.decoding.generation.warnings import base_length
from specheads.decoding.verify.model_inputs import CACHE_NAMES, embedding_count
from specheads.options import require_count, shown

# Arguments that are themselves prompts, or say how the result of one call of generate() is returned.
REFUSED = (
    "input_ids", "attention_mask", "streamer", "return_dict_in_generate", "output_scores", "output_logits",
    "adapter_names", *CACHE_NAMES,
)  # fmt: skip


def require_list(prompts: Any) -> Iterable[Any]:
    if isinstance(prompts, str) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts={shown(prompts)} must be a list of prompts, each a text or a list of ids")
    return prompts


def refuse_many_options(base: PreTrainedModel, options: Mapping[str, Any]) -> None:
    """ValueError or TypeError for options that have no meaning for many prompts."""
    refuse_arguments(options)
    config = effective_config(base, options.get("generation_config"))
    lists = {"max_new_tokens": None} if is_list(options.get("max_new_tokens")) else {}
    check_lengths({**options, **lists}, config)
    for name in REFUSED:
        value = options.get(name)
        if value is None or value is False:
            continue
        raise ValueError(f"generate_many() takes no {name}={shown(value)}; call generate() for a batch of its own")
    if (count := options.get("num_return_sequences") or config.num_return_sequences or 1) > 1:
        raise ValueError(
            f"generate_many() gives one text for each prompt, not num_return_sequences={count}; give "
            "num_return_sequences=1, or repeat the prompts in the list"
        )
    if (options.get("num_beams") or config.num_beams or 1) > 1:
        raise ValueError("beam search does not combine with refilled batches; give num_beams=1, or call generate()")


def check_limits(options: Mapping[str, Any], count: int) -> None:
    """ValueError if max_new_tokens is a list that does not hold `count` numbers of at least 1."""
    limits: Any = options.get("max_new_tokens")
    if not is_list(limits):
        return
    if len(limits) != count:
        raise ValueError(
            f"max_new_tokens= has {len(limits)} numbers for {count} prompts; give one for each, or a single one"
        )
    for index, limit in enumerate(limits):
        check_limit(index, limit)


def check_limit(index: int, limit: Any) -> None:
    """ValueError or TypeError, with the prompt's index, unless its own max_new_tokens is a whole number of at least
    1."""
    require_count(f"prompt {index}: max_new_tokens", limit)
    if limit < 1:
        raise ValueError(f"prompt {index}: max_new_tokens={shown(limit)} must be at least 1 token")


def is_list(limits: Any) -> bool:
    """Is max_new_tokens= one number for each prompt?"""
    return isinstance(limits, Sequence) and not isinstance(limits, str)


def options_of(index: int, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options of prompt number `index`, with its own max_new_tokens if there is one for each."""
    limits: Any = options.get("max_new_tokens")
    if not is_list(limits):
        return options
    if index >= len(limits):
        raise ValueError(f"prompt {index}: max_new_tokens= has {len(limits)} numbers; give one for each prompt")
    limit = limits[index]
    check_limit(index, limit)
    return {**options, "max_new_tokens": limit}


def with_stop_strings(base: PreTrainedModel, options: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """The options with their stop strings as a criterion, made once because making it reads the whole vocabulary."""
    config = effective_config(base, options.get("generation_config"))
    strings = config.stop_strings if options.get("stop_strings") is None else options["stop_strings"]
    if not strings:
        return options
    criteria = stop_string_criteria(strings, tokenizer, options.get("stopping_criteria"))
    return {**options, "stop_strings": (), "stopping_criteria": criteria}


def encode_prompt(
    base: PreTrainedModel, index: int, prompt: Any, tokenizer: Any, options: Mapping[str, Any]
) -> list[int]:  # fmt: skip
    """A prompt's ids. TypeError or ValueError, with its index, for one that cannot be continued."""
    if isinstance(prompt, str) and tokenizer is None:
        raise TypeError(f"prompt {index} is text, {shown(prompt)}; give tokenizer= too, or its ids")
    ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
    ids = ids.tolist() if isinstance(ids, torch.Tensor) else ids
    if not isinstance(ids, Sequence) or not all(isinstance(token, int) for token in ids):
        raise TypeError(f"prompt {index} must be a text or a list of ids, not {shown(prompt)}")
    if not ids:
        raise ValueError(f"prompt {index} has no tokens; give at least one")
    count = embedding_count(base)
    if not 0 <= min(ids) <= max(ids) < (count or max(ids) + 1):  # a sharded matrix may be empty here
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise ValueError(f"prompt {index} holds id {wrong}, and the model has embeddings for 0 to {count - 1}")
    if base.config.is_encoder_decoder:
        return list(ids)
    config = effective_config(base, options.get("generation_config"))
    most = options.get("max_length") or (
        config.max_length if config.max_length != GenerationConfig().max_length else None
    )
    if options.get("max_new_tokens") or config.max_new_tokens:
        most = None
    for limit, what in ((most, "max_length"), (base_length(base), "the base's max_position_embeddings")):
        if limit is not None and len(ids) >= limit:
            raise ValueError(
                f"prompt {index} has {len(ids)} tokens, and {what}={limit} leaves no room for more; give a shorter one"
            )
    return list(ids)
