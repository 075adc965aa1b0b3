"""What decoding must know about a Hugging Face base: its parts, whether it can verify trees, and its logits.

Shapes: B batch rows, T positions, H hidden size, V vocabulary, F = tapped layers × hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    PreTrainedModel,
)

from specheads.decoding.verify.masks import Reach
from specheads.decoding.verify.model_inputs import CACHE_NAMES, forward_arguments, input_device
from specheads.decoding.verify.recurrent_modules import UnsupportedState, probe_lock, recurrent_modules
from specheads.options import shown

RECURRENT = ("linear_attention", "conv")  # types of layers with a state and no attention
WITHOUT_EITHER = ("moe", "mlp")
WITH_BOTH = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
MASKED_ATTENTION = (None, "sdpa", "eager")  # implementations that obey a 4-D mask


class UnsupportedModel(ValueError):
    """A base model that tree decoding cannot serve; the message says why."""


def text_config(base: PreTrainedModel) -> Any:
    """The config that holds the language model's sizes (models with several parts nest it)."""
    return base.config.get_text_config(decoder=True)


def layer_count(config: Any) -> int:
    """How many hidden_states the decoder returns after the embeddings. LongCat-Flash's num_hidden_layers counts both
    halves of each layer, as its cache does; its num_layers counts the layers."""
    return config.num_layers if "num_layers" in declared_keys(config) else config.num_hidden_layers


_declared: dict[type, frozenset[str]] = {}


def declared_keys(config: Any) -> frozenset[str]:
    """The keys that a config's class declares. A config keeps any key of its file, so only these count."""
    kind = type(config)
    if kind not in _declared:
        _declared[kind] = frozenset(inspect.signature(kind).parameters)
    return _declared[kind]


def first_layer(config: Any) -> Any:
    """The config with the sizes of the first layer, for models whose layers differ in size (Gemma 4: the width of
    heads): transformers refuses to read such a size from the model's config."""
    layers = getattr(config, "per_layer_config", None)
    return config if layers is None else layers[0]


def unwrapped(base: Any) -> PreTrainedModel:
    """The Hugging Face model to verify with: of a peft model the model inside, whose adapters stay active."""
    if getattr(getattr(base, "config", None), "model_type", None) == "specheads":
        raise ValueError(
            "this model already has a head; convert(model.base, ...) makes another SpecModel of its base, and "
            "model.generate(...) decodes with the head it has"
        )
    if hasattr(base, "_orig_mod"):
        raise TypeError(
            "this model was wrapped by torch.compile(); give the model itself, and compile=True to generate(), which "
            "compiles whole steps"
        )
    if hasattr(base, "get_base_model"):
        adapter = getattr(base, "active_peft_config", None)
        if getattr(adapter, "is_prompt_learning", False):
            raise UnsupportedModel(f"{type(adapter).__name__} puts virtual tokens before each prompt, outside the base")
        base = base.get_base_model()
    if not isinstance(base, PreTrainedModel):
        given = shown(base) if isinstance(base, str) else type(base).__name__
        raise TypeError(
            f"expected a transformers model, not {given}; load one with AutoModelForCausalLM.from_pretrained(name)"
        )
    if base.get_output_embeddings() is None and not _has_language_model(base.config):
        raise UnsupportedModel(
            f"{type(base).__name__} is no language model, and its kind has none: a drafter of transformers' own goes "
            "to the model's own generate(assistant_model=...)"
        )
    if base.get_output_embeddings() is None:
        loader = "AutoModelForSeq2SeqLM" if base.config.is_encoder_decoder else "AutoModelForCausalLM"
        raise UnsupportedModel(f"{type(base).__name__} has no language-model head; load it with {loader}")
    if False in (base.config.return_dict, text_config(base).return_dict):
        raise UnsupportedModel(
            f"the config of {type(base).__name__} has return_dict=False, with which most models fail in transformers' "
            "own generate() too; set model.config.return_dict = True"
        )
    return base


def _has_language_model(config: Any) -> bool:
    """Does transformers, or the code that comes with a checkpoint, have a language model for such a config?"""
    own_code = getattr(config, "auto_map", None) or {}
    mappings = (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )
    return any(type(config) in mapping for mapping in mappings) or any("LM" in name for name in own_code)


def decoder_of(base: Any) -> Any:
    """The text decoder: layers and final norm, without the output matrix or a vision tower."""
    # Models name it differently, and for some get_decoder() returns the model itself or another part.
    candidates = (base.get_decoder(), base.base_model, getattr(base, "model", None))
    return next((part for part in candidates if isinstance(part, PreTrainedModel) and part is not base), base)


def layer_reach(config: Any) -> dict[str, Reach]:
    """Layer type → how far back it looks, from the config; {'': …} if all layers share one mask."""
    types = {WITH_BOTH.get(kind, kind) for kind in getattr(config, "layer_types", None) or ()}
    # A window counts only if the config's class declares it, or if there are such layers.
    has_window = "sliding_window" in declared_keys(config) or "sliding_attention" in types
    window = None
    if has_window and getattr(config, "use_sliding_window", True):
        window = getattr(config, "sliding_window", None)
    if "sliding_attention" in types and not window:
        raise UnsupportedModel(f"{config.model_type} has layers of sliding attention, and its config no sliding_window")
    recurrent = bool(types & set(RECURRENT))
    types -= {*RECURRENT, *WITHOUT_EITHER}
    known = {
        "full_attention": Reach(),
        "sliding_attention": Reach("sliding", window or 0),
        "chunked_attention": Reach("chunked", getattr(config, "attention_chunk_size", None) or 0),
    }
    if unknown := types - set(known):
        indexed = all("index" in name or "sparse" in name for name in unknown)
        reason = " (an indexer chooses which tokens each query sees, whatever its mask)" if indexed else ""
        raise UnsupportedModel(
            f"{config.model_type} has layers of type {', '.join(sorted(unknown))}; only full, sliding, chunked and "
            f"linear attention and convolutions can verify drafts{reason}"
        )
    if recurrent:
        types.add("full_attention")
    if recurrent or types - {"full_attention"}:
        return {name: known[name] for name in sorted(types)}
    return {"": Reach("sliding", window) if window and not types else Reach()}


def cache_layers(config: Any) -> int:
    """How many cache layers a pass writes: a looped model writes one for each loop of a layer."""
    loops = getattr(config, "n_recurrent_loops", 1)
    return config.num_hidden_layers + (loops - 1) * getattr(config, "n_recurrent_layers", 0)


def refuse_unsupported(base: PreTrainedModel) -> None:
    """UnsupportedModel, with the reason, for a base whose attention is not governed by a mask and position ids."""
    config = text_config(base)
    name = type(base).__name__
    arguments = forward_arguments(base)
    if base.config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} is an encoder-decoder model; draft heads need a decoder-only one")
    if getattr(config, "is_decoder", True) is False and any(vars(m).get("is_decoder") is False for m in base.modules()):
        raise UnsupportedModel(
            f"{name} attends to later tokens too: its config has is_decoder=False, with which it is no language model"
        )
    layer_reach(config)
    if "position_ids" not in arguments:
        raise UnsupportedModel(
            f"{name}.forward takes no position_ids (its positions follow the cache slots), so the nodes of a tree "
            "cannot be given their depths"
        )
    if not arguments & set(CACHE_NAMES):
        raise UnsupportedModel(f"{name}.forward takes no cache, so there is none to verify against")
    if getattr(config, "alibi", False):
        raise UnsupportedModel(f"{name} has alibi=True: its attention biases follow the cache slots, not position_ids")
    if getattr(config, "attention_layers", None):
        raise UnsupportedModel(
            f"{name} masks by cache slot inside its attention layers ({', '.join(sorted(set(config.attention_layers)))}"
            "), so a mask cannot say which nodes of a tree see one another"
        )
    if (mode := getattr(config, "recurrent_kv_cache_mode", "per_loop")) != "per_loop":
        raise UnsupportedModel(
            f"{name} with recurrent_kv_cache_mode={mode!r} reads the keys of its last loop past the cache's own update"
        )
    if has_state(base) and not any(parameter.is_meta for parameter in base.parameters()):
        try:
            recurrent_modules(base)
        except UnsupportedState as error:
            raise UnsupportedModel(str(error)) from None


def vocabulary_size(model: PreTrainedModel) -> int:
    """V, the number of logits the model returns per token."""
    lm_head: Any = model.get_output_embeddings()
    # Of a quantised module `weight` may be a method, or packed into fewer rows.
    return getattr(lm_head, "out_features", None) or len(lm_head.weight)


def has_floating_weight(module: Any) -> bool:
    """Does the module compute with a weight in floating point? Quantised ones hold whole numbers, or a method."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.is_floating_point()


def has_state(base: PreTrainedModel) -> bool:
    """Do some layers carry a state from token to token?"""
    types = set(getattr(text_config(base), "layer_types", None) or ())
    return bool(getattr(base, "_is_stateful", False) or types & {*RECURRENT, *WITH_BOTH})


@contextmanager
def without_dropout(base: PreTrainedModel) -> Iterator[None]:
    """In the block the base is in eval mode: the dropout of adapters in training would change the outputs, and advance
    the random state differently from a resumed run."""
    training = [module for module in base.modules() if module.training]
    base.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


_takes_dict: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def takes_mask_dict(base: PreTrainedModel) -> bool:
    """Does forward() take one mask per layer type? Tested once per model, on one token."""
    with probe_lock:
        if base not in _takes_dict:
            reach = layer_reach(text_config(base))
            taken = "" not in reach
            if taken:
                mask = torch.zeros(1, 1, 1, 1, dtype=base.dtype, device=input_device(base))
                ids = torch.zeros(1, 1, dtype=torch.long, device=input_device(base))
                masks = dict.fromkeys(RECURRENT) | dict.fromkeys(reach, mask)
                try:
                    with torch.no_grad(), without_dropout(base):
                        base(input_ids=ids, attention_mask=masks, position_ids=ids, use_cache=False)
                except (AttributeError, TypeError):
                    taken = False
            if not taken and len(reach) > 1:
                raise UnsupportedModel(
                    f"{type(base).__name__} has layers with different attention windows but takes only one mask"
                )
            _takes_dict[base] = taken
        return _takes_dict[base]


def logits_of(base: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Last hidden states (…, H) → the base's logits (…, V), on the same device: lm_head, then the scale and soft-cap of
    its config, which models apply outside lm_head."""
    lm_head = base.get_output_embeddings()
    if has_floating_weight(lm_head):
        hidden = hidden.to(lm_head.weight.dtype)
    logits = lm_head(hidden).to(hidden.device)
    config = text_config(base)
    if (scale := getattr(config, "logit_scale", None)) is not None:
        logits = logits * scale
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        logits = logits / divisor
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits


@torch.no_grad()
def lm_head_gives_logits(base: PreTrainedModel) -> bool:
    """Does `logits_of` reproduce the base's logits? Tested on a few tokens; True if the weights are not there."""
    weight: Any = base.get_input_embeddings().weight
    offloaded = getattr(base, "hf_device_map", None)  # its weights are loaded when a layer is called
    if weight.is_meta or not weight.numel() or (not offloaded and any(p.is_meta for p in base.parameters())):
        return True
    ids = torch.arange(4, device=weight.device).unsqueeze(0) % weight.shape[0]
    # Not with output_hidden_states: its hooks stay in the model, which then cannot be pickled.
    with without_dropout(base):
        hidden = decoder_of(base)(input_ids=ids, use_cache=False).last_hidden_state
        logits, reproduced = base(input_ids=ids, use_cache=False).logits.float(), logits_of(base, hidden).float()
    return bool((logits - reproduced.to(logits.device)).abs().max() <= 0.01 * logits.std() + 1e-6)


def refuse_more_than_lm_head(base: PreTrainedModel, kind: str) -> None:
    """UnsupportedModel if the base's logits are more than its output matrix, through which heads of that kind draft."""
    if not lm_head_gives_logits(base):
        raise UnsupportedModel(
            f"{type(base).__name__} applies more than its output matrix between the last hidden state and the logits, "
            f"and a head of kind {kind!r} drafts through that matrix alone; use 'eagle3' or 'medusa'"
        )
