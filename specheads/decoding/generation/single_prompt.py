"""One prompt of many, and the options, as base.generate() prepares them for that prompt alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from specheads.decoding.generation.generate import through_front_door
from specheads.decoding.generation.stopping import Stopping, gives_scores
from specheads.decoding.verify.arguments import input_device
from specheads.decoding.verify.model_inputs import ModelInputs, model_inputs


@dataclass(frozen=True)
class SinglePrompt:
    """ids: the text to continue, which for an encoder-decoder is the decoder's; source: the prompt as given.

    inputs: what the model takes besides ids. hidden (S, H): the encoded source, None without an encoder.
    """

    index: int
    source: list[int]
    ids: list[int]
    processors: LogitsProcessorList
    stop: Stopping
    do_sample: bool
    inputs: ModelInputs
    hidden: Tensor | None

    @property
    def longest(self) -> int:
        """The most tokens that its text may have, prompt included."""
        return len(self.ids) + self.stop.limit

    @property
    def is_plain(self) -> bool:
        """Does the model take nothing besides its ids, or its source's?"""
        return not self.inputs.prompt and self.inputs.positions is None


def prepare(base: PreTrainedModel, index: int, ids: list[int], options: Mapping[str, Any]) -> SinglePrompt:
    """Prompt number `index`, under generate()'s options. Errors name the index."""

    def capture(
        base: PreTrainedModel, input_ids: Tensor, *, logits_processor: LogitsProcessorList, stopping_criteria: Any,
        generation_config: Any, **model_kwargs: Any,
    ) -> SinglePrompt:  # fmt: skip
        rows, columns = input_ids.tolist(), input_ids.shape[1]
        mask = None if base.config.is_encoder_decoder else model_kwargs.get("attention_mask")
        encoded = model_kwargs["encoder_outputs"][0][0] if base.config.is_encoder_decoder else None
        return SinglePrompt(
            index, ids, rows[0], logits_processor,
            Stopping(
                stopping_criteria, rows, columns, [columns], 0, input_ids.device, gives_scores(generation_config)
            ),
            bool(generation_config.do_sample), model_inputs(base, input_ids, mask, None, model_kwargs), encoded,
        )  # fmt: skip

    tensor = torch.tensor([ids], device=input_device(base))
    try:
        return through_front_door(base, capture, tensor, attention_mask=torch.ones_like(tensor), **options)
    except (ValueError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"prompt {index}: {error}") from error
