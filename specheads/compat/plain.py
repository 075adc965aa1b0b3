"""One prompt of ids through `specheads.generate`, under the law of the model's logits and given processors alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from specheads import generation
from specheads.decode import Step
from specheads.target import text_config

# What a model's own generation config may switch on, switched off: the reference functions read the model's logits,
# and know nothing of a repetition penalty that came with its checkpoint.
PLAIN: dict[str, Any] = {
    "num_beams": 1, "temperature": 1.0, "top_k": None, "top_p": 1.0, "min_p": None, "top_h": None, "typical_p": 1.0,
    "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "bad_words_ids": None, "sequence_bias": None,
    "suppress_tokens": None, "begin_suppress_tokens": None, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None, "min_length": 0, "min_new_tokens": None, "max_time": None,
    "guidance_scale": None, "watermarking_config": None, "penalty_alpha": None,
}  # fmt: skip


def generate_plainly(
    model: PreTrainedModel,
    ids: Tensor,
    max_new_tokens: int,
    *,
    processors: Sequence[LogitsProcessor] = (),
    do_sample: bool = False,
    **options: Any,
) -> Any:
    """ids (1, T) → what `specheads.generate(..., **options)` gives with its steps, of at most max_new_tokens."""
    return generation.generate(
        model, ids.to(model.device), attention_mask=torch.ones_like(ids, device=model.device),
        max_new_tokens=max_new_tokens, do_sample=do_sample, logits_processor=LogitsProcessorList(processors),
        return_dict_in_generate=True, **PLAIN, **options,
    )  # fmt: skip


def room_for(model: PreTrainedModel, prompt_length: int, max_gen_len: int) -> int:
    """New tokens there is room for: max_gen_len, or what the model's positions leave. ValueError if that is none."""
    if max_gen_len < 1:
        raise ValueError(f"max_gen_len={max_gen_len} must be at least 1 token")
    longest = getattr(text_config(model), "max_position_embeddings", None)
    if model.config.is_encoder_decoder or longest is None:
        return max_gen_len
    if prompt_length >= longest:
        raise ValueError(f"the prompt takes {prompt_length} tokens, and the model has positions for {longest}")
    return min(max_gen_len, longest - prompt_length)


def accepted_and_drafted(steps: Sequence[Step], limit: int) -> tuple[int, int]:
    """Of a text of at most `limit` new tokens, which ends with a token of the target's own if nothing ends it earlier:
    how many of its tokens were drafted, and how many tokens were drafted for it."""
    accepted = drafted = 0
    length = len(steps[0].tokens[0])
    for step in steps[1:]:
        room = limit - length - 1
        accepted += min(step.accepted[0], room)
        drafted += min(step.drafted[0], room)
        length += len(step.tokens[0])
    return accepted, drafted
