"""`specheads.generate` for one prompt of ids, with the distribution of the model's logits and the given processors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from specheads.compat.processors import whole
from specheads.decoding.generation.generate import generate
from specheads.decoding.generation.hf_options import NEUTRAL
from specheads.decoding.verify.hf_base import text_config, unwrapped
from specheads.decoding.verify.model_inputs import input_device
from specheads.options import shown


def generate_raw(
    model: PreTrainedModel,
    ids: Tensor,
    max_new_tokens: int,
    *,
    processors: Sequence[Any] = (),
    do_sample: bool = False,
    **options: Any,
) -> Any:
    """ids (1, T) → the output of `specheads.generate(..., **options)` with its steps, for at most max_new_tokens.

    The model's own generation config is ignored, since the reference functions only use its logits."""
    ids = on_device(ids, model)
    return generate(
        model, ids, attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens, do_sample=do_sample, logits_processor=LogitsProcessorList(processors),
        return_dict_in_generate=True, **NEUTRAL, **options,
    )  # fmt: skip


def on_device(ids: Tensor, model: PreTrainedModel) -> Tensor:
    """ids on the device where the model takes its inputs."""
    return ids.to(input_device(model))


def room_for(model: PreTrainedModel, prompt_length: int, max_gen_len: int) -> int:
    """How many new tokens fit: max_gen_len, or fewer if the model has too few positions. ValueError if none fit."""
    whole("max_gen_len", max_gen_len)
    longest = getattr(text_config(model), "max_position_embeddings", None)
    if longest is None:
        return max_gen_len
    apart = bool(model.config.is_encoder_decoder)  # the decoder's text starts with the start token only
    if prompt_length >= longest + apart:
        raise ValueError(f"the prompt takes {prompt_length} tokens, and the model has positions for {longest}")
    return min(max_gen_len, longest - (1 if apart else prompt_length))


def checked_model(name: str, value: Any) -> PreTrainedModel:
    """The Hugging Face model given as `name`. TypeError for anything else."""
    try:
        return unwrapped(value)
    except TypeError:
        raise TypeError(
            f"{name}={shown(value)} must be a model: {name}=AutoModelForCausalLM.from_pretrained(...)"
        ) from None


def checked_ids(name: str, value: Any) -> list[int]:
    """A prompt given as a list of ids, or a tensor of one dimension. TypeError or ValueError for anything else."""
    ids = value.tolist() if isinstance(value, Tensor) and value.dim() == 1 else value
    if not isinstance(ids, list | tuple) or not all(
        isinstance(token, int) and not isinstance(token, bool) for token in ids
    ):
        what = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else shown(value)
        raise TypeError(f"{name} must be a list of ids, such as tokenizer(text).input_ids, not {what}")
    if not ids:
        raise ValueError(f"{name}=[] has nothing to continue; give at least one id (such as the BOS token)")
    return list(ids)


def checked_row(name: str, value: Any) -> Tensor:
    """A prompt given as a tensor (1, T). TypeError for anything else."""
    if not isinstance(value, Tensor) or value.dim() != 2 or len(value) != 1:
        what = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else shown(value)
        raise TypeError(
            f"{name} must be a tensor (1, T), such as tokenizer(text, return_tensors='pt').input_ids, not {what}"
        )
    return value


def checked_id(name: str, value: Any) -> int:
    """A token id given as `name`. TypeError for anything else."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}={shown(value)} must be the id of a token, or None for none")
    return value
