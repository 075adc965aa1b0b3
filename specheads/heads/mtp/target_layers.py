"""The target's own decoder layer, norm and rotary positions, built from the target's config alone.

transformers builds the target on the meta device, so that no class is named here. Shapes: B batch rows, T positions,
H hidden, d rotated width of a head.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedConfig, PreTrainedModel

from specheads.decoding.verify.grouped_attention import NAME as GROUPED
from specheads.decoding.verify.hf_base import UnsupportedModel, layer_reach
from specheads.decoding.verify.masks import Reach
from specheads.decoding.verify.model_inputs import CACHE_NAMES
from specheads.decoding.verify.taps import decoder_layers
from specheads.heads.layers.block import final_norm
from specheads.heads.layers.rope import LENGTH_DEPENDENT, RotaryTable, rope_type
from specheads.heads.limits import check_config_table, chooses_code
from specheads.options import reason, shown

# Entries of a config that do not affect the form of a layer, besides those that choose code.
_LEFT_OUT = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}
_FULL = ("full_attention", "attention")
_PARTS = ("mlp", "moe")  # layers that are only a feed-forward part
_CACHE_NAMES = (*CACHE_NAMES, "layer_past")
_GIVEN = {"self", "hidden_states", "position_embeddings", "attention_mask", "position_ids", "use_cache", *_CACHE_NAMES}


def config_table(base_config: PreTrainedConfig) -> dict[str, Any]:
    """The target's text config as a JSON-like dict. UnsupportedModel for a model that is not one of transformers' own.

    Rotary frequencies that change with the length of the text are replaced by unscaled ones, because keys in the cache
    are not rotated again.
    """
    if base_config.model_type not in CONFIG_MAPPING:
        raise UnsupportedModel(
            f"an MTP head has decoder layers of the target's class, and transformers has no class of model_type="
            f"{shown(base_config.model_type)}; use another kind of head"
        )
    table = json.loads(base_config.to_json_string(use_diff=True))
    table = {name: value for name, value in table.items() if name not in _LEFT_OUT and not chooses_code(name)}
    rope = table.get("rope_parameters")
    if isinstance(rope, dict):
        kinds = {name: one for name, one in rope.items() if isinstance(one, dict)}
        if kinds:
            table["rope_parameters"] = {**rope, **{name: _fixed(one) for name, one in kinds.items()}}
        else:
            table["rope_parameters"] = _fixed(rope)
    return {**table, "model_type": base_config.model_type}


def _fixed(rope: dict[str, Any]) -> dict[str, Any]:
    if rope_type(rope) not in LENGTH_DEPENDENT:
        return rope
    kept = ("rope_theta", "partial_rotary_factor")
    return {"rope_type": "default", **{name: rope[name] for name in kept if name in rope}}


def check_table(table: Mapping[str, Any]) -> None:
    """ValueError for a table that is no config, chooses code, or has numbers beyond any model's."""
    kind = table.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise ValueError(f"mtp head option target_config: model_type={shown(kind)} is not one of transformers'")
    check_config_table(table, "mtp head option target_config")


class TargetLayers:
    """Makes layers of the target's class at given indices, norms of its class, and its rotary positions."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self.decoder = _decoder(json.dumps(table, sort_keys=True))
        found = decoder_layers(self.decoder)
        if found is None or final_norm(self.decoder) is None:
            raise UnsupportedModel(f"{type(self.decoder).__name__} has no list of decoder layers with a norm after it")
        self.layers = found
        self.config = copy.deepcopy(self.decoder.config)
        # A copy, because layers read their config when they run.
        by_name = self.decoder._supports_sdpa and self.decoder._supports_attention_backend
        self.config._attn_implementation_internal = GROUPED if by_name else "eager"
        self.is_causal = by_name  # without a mask, attention is causal
        wide = (getattr(self.decoder, f"_keep_in_fp32_modules{strict}", None) or () for strict in ("", "_strict"))
        self.float32_names = tuple(name for names in wide for name in names)  # substrings of tensor names

    def usual_indices(self) -> tuple[int, ...]:
        """The last layer with full attention, else the last layer; and if attention and feed-forward are layers of
        their own, also the last feed-forward one."""
        types = self._types()
        full = [i for i, kind in enumerate(types) if kind in _FULL]
        parts = [i for i, kind in enumerate(types) if kind in _PARTS]
        return (full[-1] if full else len(self.layers) - 1, *parts[-1:])

    def _types(self) -> list[str]:
        return list(getattr(self.config, "layer_types", None) or getattr(self.config, "layers_block_type", None) or ())

    def type_of(self, index: int) -> str:
        """The type of a layer in the config, "" if it has none."""
        types = self._types()
        return types[index] if types else ""

    def reach(self, index: int) -> Reach:
        """How far back a layer looks. UnsupportedModel for one that keeps a state."""
        kind = self.type_of(index)
        if kind in _FULL:
            return Reach()
        if kind not in ("", "sliding_attention", "chunked_attention"):
            raise UnsupportedModel(
                f"layer {index} of {self.config.model_type} is of type {shown(kind)}; an MTP head needs one of "
                "full, sliding or chunked attention: give layer_indices"
            )
        return layer_reach(self.config)[kind]

    def common_reach(self, indices: Sequence[int]) -> Reach:
        """How far back the layers at these indices look. ValueError if they are of several types of attention."""
        types = {self.type_of(i): i for i in indices if self.type_of(i) not in _PARTS}
        if len(types) > 1:
            raise ValueError(
                f"mtp head option layer_indices={list(indices)} names layers of several types of attention "
                f"({', '.join(sorted(types))}); give layers of one"
            )
        return self.reach(indices[0])

    def layer(self, index: int, slot: int) -> nn.Module:
        """A new layer like the target's at `index`, on torch's default device. slot: its index in the head's cache."""
        if not 0 <= index < len(self.layers):
            raise ValueError(f"layer_indices has {index}, and the target has {len(self.layers)} layers, from 0 on")
        if self.type_of(index) not in _PARTS:
            self.reach(index)
        own_keys = len(self.layers) - (getattr(self.config, "num_kv_shared_layers", None) or 0)
        if index >= own_keys or getattr(self.config, "hidden_size_per_layer_input", None):
            raise UnsupportedModel(
                f"layer {index} of {self.config.model_type} reads keys of another layer, or inputs for each layer, "
                "which an MTP head does not have; use another kind of head"
            )
        kind: Any = type(self.layers[index])
        typed = "layer_type" in inspect.signature(kind.__init__).parameters
        with self.alone(index):
            layer: nn.Module = kind(self.config, index, **({"layer_type": self.type_of(index)} if typed else {}))
        indexed = [module for module in layer.modules() if hasattr(module, "layer_idx")]
        if len({module.layer_idx for module in indexed} - {None}) > 1:  # HunYuan's MLP has one that is not set
            raise UnsupportedModel(
                f"layer {index} of {self.config.model_type} has several parts with keys, and an MTP head keeps those "
                "of one; use another kind of head, 'eagle3' say"
            )
        for module in indexed:
            module.layer_idx = slot  # type: ignore[assignment]
        self._initialise(layer)
        return layer

    @contextmanager
    def alone(self, index: int) -> Iterator[None]:
        """UnsupportedModel for any error in the block, which makes or runs a layer outside its model."""
        try:
            yield
        except (UnsupportedModel, torch.OutOfMemoryError):
            raise
        except Exception as error:  # each class of layers fails in its own way
            types = sorted({*self._types()} - {self.type_of(index)})
            others = f", or layer_indices of another type ({', '.join(types)})" if types else ""
            raise UnsupportedModel(
                f"layer {index} of {self.config.model_type} does not work outside its model "
                f"({type(error).__name__}: {reason(error)}); use another kind of head, 'eagle3' say{others}"
            ) from error

    def norm(self) -> nn.Module:
        """A new norm of the class of the target's final norm."""
        norm = copy.deepcopy(final_norm(self.decoder))
        assert norm is not None
        norm.to_empty(device=torch.get_default_device())
        self._initialise(norm)
        return norm

    @torch.no_grad()
    def _initialise(self, module: nn.Module) -> None:
        for part in module.modules():
            self.decoder._init_weights(part)

    def rotary(self, index: int) -> TargetRotary | None:
        """The target's rotary positions for a layer; None if its layers take no positions, or compute their own."""
        names = ("rotary_emb", "pos_emb")  # pos_emb: of LFM2-MoE
        like = next((part for name in names if (part := getattr(self.decoder, name, None)) is not None), None)
        return None if like is None else TargetRotary(type(like), self.config, self.type_of(index))


def read_table(table: Mapping[str, Any]) -> PreTrainedConfig:
    """The config of `config_table`."""
    decode = getattr(PreTrainedConfig, "_decode_special_floats", dict)  # infinity, which JSON lacks
    values = decode(dict(table))
    return CONFIG_MAPPING[values.pop("model_type")].from_dict(values)


@lru_cache(maxsize=8)
def _decoder(text: str) -> PreTrainedModel:
    """The target's decoder on the meta device. ValueError if the config describes none."""
    table = json.loads(text)
    kind = table["model_type"]
    try:
        with torch.device("meta"):
            return AutoModel.from_config(read_table(table))
    except UnsupportedModel:
        raise
    except Exception as error:  # a stranger's config can fail in any way
        raise ValueError(f"target_config does not describe a {kind} model: {reason(error)}") from error


class LayerCall:
    """Calls a decoder layer with the argument names of its forward().

    UnsupportedModel for a layer that needs an argument only its own model can give.
    """

    def __init__(self, layer: nn.Module) -> None:
        parameters = inspect.signature(layer.forward).parameters
        varied = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        needed = {n for n, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
        cache = next((name for name in _CACHE_NAMES if name in parameters), None)
        if needed - _GIVEN or (cache is None and not varied):
            raise UnsupportedModel(
                f"{type(layer).__name__} needs {', '.join(sorted(needed - _GIVEN)) or 'a cache'} of its own model, "
                "which an MTP head does not have; use another kind of head"
            )
        self.cache = cache or _CACHE_NAMES[0]
        self.optional = {name for name in ("use_cache", "position_ids") if name in parameters}
        if varied:
            self.optional.add("position_ids")
        self.shares_keys = "shared_kv_states" in parameters  # a dict: Gemma 4's layers leave keys for later ones

    def __call__(
        self, layer: nn.Module, x: Tensor, mask: Tensor | None, position: Tensor, rotary: Any, cache: Any
    ) -> Tensor:
        """x (B, T, H), mask (B, 1, T, K), position (B, T) → (B, T, H)."""
        arguments = {"attention_mask": mask, self.cache: cache}
        if rotary is not None:
            arguments["position_embeddings"] = rotary
        if self.shares_keys:
            arguments["shared_kv_states"] = {}
        given = {"use_cache": True, "position_ids": position}
        out = layer(x, **arguments, **{name: given[name] for name in self.optional})
        return out[0] if isinstance(out, tuple) else out


class TargetRotary(RotaryTable):
    """The target's rotary module evaluated at every position, computed once and grown for longer texts."""

    def __init__(self, kind: type[nn.Module], config: PreTrainedConfig, layer_type: str) -> None:
        super().__init__(0, {})
        self.kind, self.config, self.layer_type = kind, config, layer_type

    def compute(self, size: int, like: Tensor) -> Tensor:
        with torch.device(like.device):
            module: Any = self.kind(self.config)
        arguments = (
            {"layer_type": self.layer_type} if "layer_type" in inspect.signature(module.forward).parameters else {}
        )
        position = torch.arange(size, device=like.device).unsqueeze(0)
        if hasattr(module, "mrope_section"):  # positions in time, height and width, which are the same in text
            position = position.expand(3, 1, size)
        found = module(like.new_zeros(1, 1, 1), position, **arguments)
        # (1 or 2, size, d): cos and sin, or one complex number for both.
        return torch.cat(found) if isinstance(found, tuple) else found

    def forward(self, position: Tensor) -> Any:
        """(B, T) positions → what the target's layers take as position_embeddings. Call `ensure` first."""
        assert self._table is not None
        found = self._table[:, position]
        return found[0] if len(found) == 1 else (found[0], found[1])
