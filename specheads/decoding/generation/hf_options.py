"""Hugging Face's generate() options, read once at the edge: what is refused, and what prompts must look like.

Shapes: B batch rows, T prompt columns.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation import StopStringCriteria

from specheads.decoding.verify.model_inputs import embedding_count
from specheads.options import require_count, require_number, shown

# What would replace the loop or its prompts → what to do instead.
REFUSED_ARGUMENTS = {
    "assistant_model": "give draft=DraftModel(small), with both tokenizers if their vocabularies differ",
    "prompt_lookup_num_tokens": 'give draft="lookup:N"',
    "custom_generate": "call the base's own generate() for that",
    "inputs_embeds": "drafts continue ids: give input_ids (and pixel_values … for images), or call the base's own "
    "generate() for prompts that have no ids",
}
# Other decoding methods, which our loop would ignore, and token healing, whose tokenizer we do not pass on.
OTHER_DECODING = (
    "penalty_alpha", "dola_layers", "use_mtp", "force_words_ids", "constraints", "token_healing", "speculation_type",
    "assistant_early_exit", "assistant_ensemble_weight",
)  # fmt: skip
LENGTHS = ("max_new_tokens", "max_length", "min_new_tokens", "min_length")
REFUSED_OUTPUTS = ("output_attentions", "output_hidden_states")


def check_prompts(base: PreTrainedModel, prompts: Any, *, images: bool) -> None:
    """TypeError or ValueError for prompts that are not ids (B, T) of the base's vocabulary.

    images: some models mark where an image goes by an id beyond the vocabulary.
    """
    first = prompts[0] if isinstance(prompts, list | tuple) and prompts else prompts
    if isinstance(first, str):
        raise TypeError(
            f"the prompt {shown(prompts)} is text; give its ids: generate(..., **tokenizer(text, return_tensors='pt'))"
        )
    if prompts is None:  # Hugging Face begins with the BOS token
        return
    if base.config.is_encoder_decoder:  # its encoder may read something other than ids
        if isinstance(prompts, Tensor) and not prompts.is_floating_point():
            _check_vocabulary(base, prompts, images=images)
        return
    if not isinstance(prompts, Tensor):
        raise TypeError(
            f"the prompts must be a tensor of ids (B, T), not {type(prompts).__name__}; give **tokenizer(text, "
            "return_tensors='pt')"
        )
    if prompts.dim() != 2 or prompts.is_floating_point():
        hint = "; for one prompt give ids.unsqueeze(0)" if prompts.dim() == 1 else ""
        raise ValueError(
            f"the prompts must be ids (B, T), whole numbers, not {tuple(prompts.shape)} of {prompts.dtype}{hint}"
        )
    if not prompts.numel():
        raise ValueError(
            f"an empty prompt has nothing to continue: {tuple(prompts.shape)}; give at least one token a row (the BOS "
            "token, say)"
        )
    _check_vocabulary(base, prompts, images=images)


def _check_vocabulary(base: PreTrainedModel, prompts: Tensor, *, images: bool) -> None:
    if not prompts.numel():
        return
    least, most, count = int(prompts.min()), int(prompts.max()), embedding_count(base)
    if least < 0 or (most >= count > 0 and not images):  # a sharded matrix may be empty here
        raise ValueError(
            f"the prompts hold id {least if least < 0 else most}, and the model has embeddings for 0 to "
            f"{count - 1}; is the tokenizer that of another model?"
        )


def refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """ValueError for an argument that would replace the loop or its prompts."""
    for name, advice in REFUSED_ARGUMENTS.items():
        if arguments.get(name) is not None:
            raise ValueError(f"generate() with draft trees takes no {name}=; {advice}")


def refuse_options(arguments: Mapping[str, Any], config: GenerationConfig) -> None:
    """ValueError for options that drafts do not combine with, given as arguments or in the config; ValueError or
    TypeError for a limit that is no whole number."""
    for name in OTHER_DECODING:
        if value := arguments.get(name, getattr(config, name, None)):
            raise ValueError(f"{name}={value!r} does not combine with drafts; call the base's own generate() for it")
    check_lengths(arguments, config)
    if arguments.get("cache_implementation") == "paged":  # transformers would bypass our loop
        raise ValueError(
            "cache_implementation='paged' does not combine with drafts; generate_many() refills batches, and the "
            "base's own generate() pages them"
        )
    for name in REFUSED_OUTPUTS:
        if arguments.get(name, getattr(config, name, False)):
            raise ValueError(f"{name}=True is not kept by tree decoding; call the base's own generate() for it")


def check_lengths(arguments: Mapping[str, Any], config: GenerationConfig) -> None:
    """ValueError or TypeError for a limit of a text that is no whole number of tokens, or no number of seconds."""
    for name in LENGTHS:
        if (limit := arguments.get(name, getattr(config, name, None))) is not None:
            require_count(name, limit)
    if (seconds := arguments.get("max_time", config.max_time)) is not None:
        require_number("max_time", seconds)
        if math.isnan(seconds):
            raise ValueError(f"max_time={seconds} must be a number of seconds")


def stop_string_criteria(
    stop_strings: str | Sequence[str], tokenizer: Any, criteria: StoppingCriteriaList | None
) -> StoppingCriteriaList:
    """The criteria, and one that stops at the strings. generate() does not hand its tokenizer to a custom loop."""
    if tokenizer is None:
        raise ValueError("stop_strings needs tokenizer=, to know which text the tokens spell")
    strings = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
    return StoppingCriteriaList([*(criteria or ()), StopStringCriteria(tokenizer, strings)])


def effective_config(base: PreTrainedModel, config: GenerationConfig | None) -> GenerationConfig:
    """The config that applies where no argument overrides it: `config`, with the model's own values for those that are
    None, as transformers fills them in."""
    if config is None:
        return base.generation_config
    filled = copy.copy(config)
    for name, value in vars(base.generation_config).items():
        if getattr(filled, name, None) is None:
            setattr(filled, name, value)
    return filled


def without_stop_strings(config: GenerationConfig) -> GenerationConfig:
    """A copy of the config without stop strings, for which transformers would want a tokenizer."""
    config = copy.deepcopy(config)
    config.stop_strings = None
    return config


# Neutral values for everything a model's own generation config may set, such as a repetition penalty that came with its
# checkpoint, and for what generate() with drafts would refuse.
NEUTRAL: dict[str, Any] = {
    "num_beams": 1, "temperature": 1.0, "top_k": None, "top_p": 1.0, "min_p": None, "top_h": None, "typical_p": 1.0,
    "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "bad_words_ids": None, "sequence_bias": None,
    "suppress_tokens": None, "begin_suppress_tokens": None, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None, "min_length": 0, "min_new_tokens": None, "max_time": None,
    "guidance_scale": None, "watermarking_config": None, "penalty_alpha": None, "dola_layers": None, "use_mtp": False,
    "force_words_ids": None, "constraints": None, "token_healing": False, "output_attentions": False,
    "output_hidden_states": False, "num_return_sequences": 1, "stop_strings": (),
}  # fmt: skip
