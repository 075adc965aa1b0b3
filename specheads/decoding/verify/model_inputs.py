"""What the model takes besides ids: arguments for the prompt's pass, and those for later passes derived from them.

Shapes: B batch rows, T prompt columns, A axes of positions (for instance time, height and width).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import utils as hf_generation

from specheads.decoding.verify.arguments import CACHE_NAMES

# Arguments that generate() or the loop handles, and those that do not affect the text.
_HANDLED = {
    "input_ids", "attention_mask", *CACHE_NAMES, "use_cache", "logits_to_keep", "return_dict", "output_attentions",
    "output_hidden_states", "labels", "cache_position", "next_sequence_length",
}  # fmt: skip
_ENCODED = ("encoder_outputs", "decoder_attention_mask")
PER_TOKEN = ("position_ids", "token_type_ids", "mm_token_type_ids")
# Read by the prompt's pass only: transformers' list, the grids from which Qwen's positions are computed, and Gemma 4's
# patch positions, which transformers 5.17 does not list.
_PROMPT_ONLY = (
    *getattr(hf_generation, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", ()),
    "image_grid_thw", "video_grid_thw", "second_per_grid_ts", "image_position_ids", "video_position_ids",
)  # fmt: skip


# Per layer of the cache: keys and values (B, heads, P, d), None for a layer without its own.
Layers = list[tuple[Tensor, Tensor] | None]


@dataclass(frozen=True)
class Prefix:
    """Keys and values of the first tokens of each prompt, packed left, read in an earlier call.

    lengths (B,): how many tokens of each row; at least its last one is left to read.
    """

    layers: Layers
    lengths: Tensor


@dataclass(frozen=True)
class ModelInputs:
    """prompt: further arguments of forward() for the pass over the prompts; those with a value per token packed left.

    positions (B, T) or (A, B, T): of the prompts' tokens, packed left; None if they count from 0. token_types (B, T):
    likewise; generated tokens get the type of the prompt's last token, as in transformers. columns: the width of the
    prompts, padding included. prefix: the part of the prompts that need not be read. rows_may_part: may rows be read in
    several passes? Not where each may have an adapter of its own.
    """

    prompt: dict[str, Any] = field(default_factory=dict)
    positions: Tensor | None = None
    token_types: Tensor | None = None
    columns: int = 0
    prefix: Prefix | None = None
    rows_may_part: bool = False

    @property
    def is_text(self) -> bool:
        """Are the prompts ids alone, counted from 0 and read whole?"""
        return not self.prompt and self.positions is None and self.prefix is None

    def offset(self, lengths: Tensor) -> Tensor | None:
        """(B, 1) or (A, B, 1): the position of a token after the prompt, minus the number of tokens before it."""
        if self.positions is None:
            return None
        last = (lengths - 1).view(-1, 1)
        return self.positions.gather(-1, last.expand(*self.positions.shape[:-1], 1)) - last

    def generated_arguments(self, lengths: Tensor, columns: int) -> dict[str, Tensor]:
        """Arguments of forward() for a pass over (B, columns) generated tokens."""
        if self.token_types is None:
            return {}
        last = self.token_types.gather(1, (lengths - 1).unsqueeze(1))
        return {"token_type_ids": last.expand(-1, columns)}


def model_inputs(
    base: PreTrainedModel, ids: Tensor, mask: Tensor | None, order: Tensor | None, arguments: Mapping[str, Any]
) -> ModelInputs:
    """The arguments for prompts ids (B, T) under mask (B, T), as the base prepares them.

    order (B, T'): the columns of each row without padding, packed left; None for all in order. Raises ValueError, by
    name, for an argument whose effect on later tokens is not known, so that none is silently dropped.
    """
    rest = {name: value for name, value in arguments.items() if name not in _HANDLED and value is not None}
    if base.config.is_encoder_decoder:
        refuse_arguments(base, [name for name in rest if name not in _ENCODED])
        return ModelInputs()
    prepare: Any = base.prepare_inputs_for_generation
    prepared = prepare(ids, attention_mask=mask, is_first_iteration=True, use_cache=True, **rest)
    prepared = {name: value for name, value in prepared.items() if name not in _HANDLED and value is not None}
    lost = [name for name in rest if name not in prepared and name not in _PROMPT_ONLY]
    unknown = [name for name in prepared if name in rest and name not in (*PER_TOKEN, *_PROMPT_ONLY)]
    refuse_arguments(base, [*lost, *unknown])
    packed = {name: _pack(prepared.pop(name), ids, order, name) for name in PER_TOKEN if name in prepared}
    positions = packed.pop("position_ids", None)
    if positions is not None and bool((positions == torch.arange(positions.shape[-1], device=ids.device)).all()):
        positions = None
    return ModelInputs({**prepared, **packed}, positions, packed.get("token_type_ids"), ids.shape[1])


def refuse_arguments(base: PreTrainedModel, names: list[str]) -> None:
    """ValueError that names the arguments, if there are any."""
    if names:
        raise ValueError(
            f"generate() with drafts cannot serve {', '.join(f'{name}=' for name in sorted(set(names)))} of "
            f"{type(base).__name__}: what it means for later tokens is not known; leave it out, or call the base's own "
            "generate()"
        )


def _pack(value: Tensor, ids: Tensor, order: Tensor | None, name: str) -> Tensor:
    """Values per token (…, B or 1, T) → (…, B, T'), without padding, packed left."""
    if value.shape[-1] != ids.shape[1] or value.shape[-2] not in (1, len(ids)):
        raise ValueError(
            f"{name}= has shape {tuple(value.shape)}; for prompts {tuple(ids.shape)} it must end in the same shape"
        )
    value = value.to(ids.device).expand(*value.shape[:-2], *ids.shape)
    return value if order is None else value.gather(-1, order.expand(*value.shape[:-2], *order.shape))
