"""What a model's forward() takes: its arguments by name and the device of its inputs; what a prompt's pass is given
besides ids, and what later passes derive from that; and which prompts share a pass.

Shapes: B batch rows, T prompt columns, A axes of positions (for instance time, height and width).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import utils as hf_generation
from transformers.masking_utils import create_causal_mask

from specheads.data.images import PER_TOKEN as IMAGE_TYPES
from specheads.data.images import TYPES

# transformers: `cache` since 5.24, `past_key_values` before. Code shipped with a checkpoint may use either.
CACHE_NAMES = ("past_key_values", "cache")
if "cache" in inspect.signature(create_causal_mask).parameters:
    CACHE_NAMES = ("cache", "past_key_values")


def forward_arguments(base: PreTrainedModel) -> set[str]:
    """The argument names of the model's forward(). If that takes **kwargs (a wrapper, a decorator), they are passed on,
    so the names of its class's forward() count too, and so on up the base classes."""
    names: set[str] = set()
    for forward in (base.forward, *(vars(cls)["forward"] for cls in type(base).__mro__ if "forward" in vars(cls))):
        parameters = inspect.signature(forward).parameters
        names |= set(parameters)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return names


def cache_argument(base: PreTrainedModel) -> str:
    """The name under which forward() and generate() take the cache."""
    names = forward_arguments(base)
    return next((name for name in CACHE_NAMES if name in names), CACHE_NAMES[0])


def input_device(base: PreTrainedModel) -> torch.device:
    """The device for a base's ids and of its outputs, which a base spread over several devices sends back there."""
    embeddings: Any = base.get_input_embeddings()
    # Between calls an offloaded layer's weight is on meta, and its hook knows where it computes.
    device = getattr(getattr(embeddings, "_hf_hook", None), "execution_device", None)
    if device is None:
        # Of a quantised module `weight` may be a method, or be missing.
        weight = embeddings.weight if isinstance(embeddings.weight, torch.Tensor) else next(base.parameters())
        device = weight.device
    return torch.device(device)


def embedding_count(base: PreTrainedModel) -> int:
    """How many ids have an input embedding; 0 where a launcher shards the matrix."""
    embeddings: Any = base.get_input_embeddings()
    # Of a quantised module `weight` may be a method.
    return len(embeddings.weight) if isinstance(embeddings.weight, torch.Tensor) else embeddings.num_embeddings


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
class BasePositions:
    """Positions of several parts, as a base counts them beside images. table (A, B, T): of the prompts or rows, packed
    left, of lengths (B,); they go on by one after it."""

    table: Tensor
    lengths: Tensor

    def at(self, index: Tensor) -> Tensor:
        """How many tokens come before (B, P) → the base's positions (A, B, P)."""
        axes, last = len(self.table), (self.lengths - 1).unsqueeze(1)
        inside = torch.minimum(index, last)
        return self.table.gather(-1, inside.expand(axes, *index.shape)) + (index - inside)


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

    def base_positions(self, lengths: Tensor) -> BasePositions | None:
        """Positions of three parts; None if they have one. Of four, as transformers gives some models, the first is for
        masks."""
        if self.positions is None or self.positions.dim() < 3:
            return None
        return BasePositions(self.positions[-3:], lengths)

    def offset(self, lengths: Tensor) -> Tensor | None:
        """(B, 1) or (A, B, 1): the position of a token after the prompt, minus the number of tokens before it."""
        if self.positions is None:
            return None
        last = (lengths - 1).view(-1, 1)
        return self.positions.gather(-1, last.expand(*self.positions.shape[:-1], 1)) - last


def generated_types(types: Tensor, lengths: Tensor, columns: int) -> dict[str, Tensor]:
    """Arguments of forward() for a pass over (B, columns) generated tokens: they have the type of the prompt's last."""
    return {"token_type_ids": types.gather(1, (lengths - 1).unsqueeze(1)).expand(-1, columns)}


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


def image_arguments(base: PreTrainedModel, batch: Mapping[str, Any]) -> dict[str, Any]:
    """A collated batch's tensors of images as arguments of forward() and generate(); {} for a batch of text.

    What each token is goes under the name that the model has for it, and pixels in the model's dtype. TypeError for
    a model that reads no images."""
    given = {name: value for name, value in batch.items() if name in _PROMPT_ONLY and value is not None}
    if not given:
        return {}
    names, device = forward_arguments(base), input_device(base)
    if "pixel_values" not in names:
        raise TypeError(f"{type(base).__name__} reads text alone: {', '.join(sorted(given))} would be left out")
    given |= {name: batch[TYPES] for name in IMAGE_TYPES if name in names and batch.get(TYPES) is not None}
    floats = {name: t.to(base.dtype) for name, t in given.items() if t.is_floating_point()}
    return {name: t.to(device) for name, t in (given | floats).items()}


def has_position_parts(base: PreTrainedModel) -> bool:
    """Does the base count time, height and width beside images (mrope)?"""
    rope = getattr(base.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return bool(rope.get("mrope_section"))


def row_positions(base: PreTrainedModel, ids: Tensor, mask: Tensor, images: Mapping[str, Any]) -> BasePositions | None:
    """The positions of rows with images, padded on the right, as generate() has the base count them; None if they have
    one part."""
    if not has_position_parts(base):
        return None
    prepare: Any = base._prepare_position_ids_for_generation
    positions = prepare(ids, {"attention_mask": mask, **images})
    return ModelInputs(positions=positions).base_positions(mask.sum(1))


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


SHORT_PROMPT = 64  # tokens: a pass over fewer takes about as long as one over so many
LEAST_FULL = 0.75  # of a group's longest prompt: the length of its shortest


def similar_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """The rows of a batch by the lengths of their prompts: in a group the shortest has at least LEAST_FULL of the
    longest's. One group if several would save less than a fifth of the positions."""
    padded = [max(length, SHORT_PROMPT) for length in lengths]
    groups: list[list[int]] = []
    for row in sorted(range(len(padded)), key=lambda row: -padded[row]):
        if groups and padded[row] >= LEAST_FULL * padded[groups[-1][0]]:
            groups[-1].append(row)
        else:
            groups.append([row])
    read = sum(len(group) * padded[group[0]] for group in groups)
    return groups if read < 0.8 * len(padded) * max(padded) else [list(range(len(padded)))]
