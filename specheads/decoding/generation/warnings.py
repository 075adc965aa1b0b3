"""What generate() warns of before it decodes: texts longer than the base or the head was made for, padding that
transformers handles differently, and bases whose passes over drafts are slow or give other logits.

Shapes: B batch rows, T positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging as hf_logging

from specheads.data.batches import documents_of
from specheads.decoding.probs.precision import bfloat16_is_fast
from specheads.decoding.verify.hf_base import has_state, layer_reach, text_config

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
            "text stays right, but drafts may be accepted less; for such texts train on longer rows (data.max_length) "
            "or give the head a window (head.sliding_window)"
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


def scaled_by_pass(base: PreTrainedModel) -> str | None:
    """What of this model scales activations by all tokens of a pass, for messages; None if nothing is known to.

    A scale of each token's own (FP8 by row or block, int8 by token) does not depend on the pass, and is not meant.
    """
    found = next(filter(None, map(_scaled_module, base.modules())), None)
    return found or _scaled_config(getattr(base.config, "quantization_config", None))


def _scaled_module(module: nn.Module) -> str | None:
    kind = type(module)
    if kind.__module__.startswith("torch.ao.nn.quantized.dynamic"):
        return f"torch.ao's dynamic {kind.__name__}"  # one scale for the whole input
    # LLM.int8 finds the columns that it leaves in 16 bits by the largest value of any token.
    if kind.__name__ == "Linear8bitLt" and getattr(getattr(module, "state", None), "threshold", 0) > 0:
        return "bitsandbytes' Linear8bitLt"
    weight = getattr(module, "weight", None)
    if type(weight).__module__.startswith("torchao") and any(
        "PerTensor" in repr(getattr(weight, name, None)) for name in ("act_quant_kwargs", "quant_kwargs")
    ):
        return f"torchao's {type(weight).__name__} with a scale per tensor"
    return None


def _scaled_config(config: Any) -> str | None:
    if config is None:
        return None
    settings = config if isinstance(config, Mapping) else config.to_dict()
    torchao = repr(getattr(config, "quant_type", settings.get("quant_type")))
    if "Float8DynamicActivation" in torchao and "PerRow" not in torchao:  # per tensor by default
        return "torchao's Float8DynamicActivation with a scale per tensor"
    for one in _mappings(settings):  # compressed-tensors, Quark
        is_dynamic = one.get("dynamic") is True or one.get("is_dynamic") is True
        if is_dynamic and (one.get("strategy") or one.get("qscheme")) in ("tensor", "per_tensor"):
            return f"{settings.get('quant_method')}'s dynamic activations with a scale per tensor"
    return None


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    """All mappings inside a config."""
    if isinstance(value, Mapping):
        yield value
    for part in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        yield from _mappings(part)


def warn_of_scales(base: PreTrainedModel, scaled: str | None) -> None:
    """Warn once if a pass that verifies drafts may give other logits than this base's own passes."""
    if scaled is not None:
        logger.warning_once(
            f"{type(base).__name__}: {scaled} scales activations by all tokens of a pass, so passes over drafts can "
            "give other logits than token by token, and another text: the output says lossless=False; give draft=False "
            "for the model's own text"
        )


def warn_of_slow_bfloat16(base: PreTrainedModel) -> None:
    """Warn once if drafts for this base are verified on a CPU without instructions for its bfloat16."""
    if base.dtype == torch.bfloat16 and base.device.type == "cpu" and not bfloat16_is_fast(base.device):
        logger.warning_once(
            "the base is in bfloat16, for which this processor has no instructions: prompts, and passes that verify "
            "drafts without compile=True, take longer than in float32; load it with dtype=torch.float32"
        )


def warn_of_right_padding(mask: Tensor | None) -> None:
    """Warn if a row is padded on the right, which transformers' generate() handles differently."""
    if mask is not None and not bool(mask[:, -1].all()):
        row = int((mask[:, -1] == 0).nonzero()[0])
        logger.warning(
            "row %d is padded on the right: its text continues after its own last token, as if padded on the left "
            "(transformers' generate() continues after the padding); set padding_side='left' in the tokenizer", row,
        )  # fmt: skip


def warn_of_holes(base: PreTrainedModel, mask: Tensor | None) -> None:
    """Warn if a row has masked columns between its tokens and not every layer of the base sees the whole text, so that
    transformers' generate() gives a different one."""
    if mask is None or bool(mask.all()):
        return
    tokens = mask.bool()
    begun, to_come = tokens.cumsum(1) > 0, tokens.flip(1).cumsum(1).flip(1) > 0
    holes = (begun & to_come & ~tokens).any(1)
    if not bool(holes.any()):
        return
    if has_state(base) or any(reach.kind != "full" for reach in layer_reach(text_config(base)).values()):
        logger.warning(
            "row %d has masked positions between its tokens: its text continues as if they were not there "
            "(transformers' generate() counts them in sliding windows and runs recurrent states over them)",
            int(holes.nonzero()[0]),
        )  # fmt: skip
