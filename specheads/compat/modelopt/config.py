"""Translates ModelOpt's modes and configs to a kind of head and its options.

Written for nvidia-modelopt 0.47. Names of earlier versions (eagle_num_layers, use_aux_hidden_state at the top level)
are also accepted. An option that heads here do not have is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import fields
from typing import Any

from transformers import LlamaConfig

from specheads.decoding.verify.hf_base import layer_count
from specheads.heads import Eagle3Config, EagleConfig
from specheads.heads.layers.rope import USUAL_THETA, complete_rope
from specheads.options import refuse_unknown, shown

MODES = ("medusa", "eagle", "eagle1", "eagle3")

# ModelOpt's default sizes of a draft block, whatever the base: those of Llama-3-8B.
default_eagle_config: dict[str, Any] = {
    "hidden_act": "silu", "rope_scaling": {"rope_type": "default", "rope_theta": USUAL_THETA},
    "rope_theta": USUAL_THETA, "num_hidden_layers": 1, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False,
    "use_aux_hidden_state": False, "use_last_layernorm": False, "eagle_aux_hidden_state_layer_ids": [],
}  # fmt: skip
eagle3_default_config: dict[str, Any] = {
    **deepcopy(default_eagle_config), "use_aux_hidden_state": True, "use_last_layernorm": True,
}  # fmt: skip
# ModelOpt's examples change these in place before passing them to convert().
EAGLE1_DEFAULT_CFG: dict[str, Any] = {
    "algorithm": "eagle", "config": {"eagle_architecture_config": deepcopy(default_eagle_config)},
}  # fmt: skip
EAGLE3_DEFAULT_CFG: dict[str, Any] = {
    "algorithm": "eagle", "config": {"eagle_architecture_config": eagle3_default_config},
}  # fmt: skip

# Options of ModelOpt's modes for which only one value is supported here; None: the option does not affect a head.
_FIXED: dict[str, Any] = {
    "eagle_offline": False, "eagle_hidden_state_distillation": False, "eagle_freeze_base_model": True,
    "eagle_reuse_base_decoder": False, "eagle_decoder_type": "llama", "eagle_mix_hidden_states": False,
    "eagle_base_lora": False, "eagle_self_logit_distillation": None, "eagle_disable_moe": None,
    "eagle_report_acc": None, "eagle_use_torch_compile": None, "eagle_enable_nvtx": None,
    "eagle_export_rope_scaling": None,
    # How adapters are trained; eagle_base_lora says whether they are.
    "eagle_base_lora_rank": None, "eagle_base_lora_alpha": None, "eagle_base_lora_target_modules": None,
    "eagle_base_lora_preservation_loss_weight": None, "eagle_base_lora_warmup_steps": None,
    "eagle_base_lora_start_layer": None, "eagle_base_lora_logits_detach_prob": None,
}  # fmt: skip
_INSTEAD = {
    "eagle_offline": "`specheads train` trains on saved features",
    "eagle_base_lora": "specheads.convert(model, 'eagle3', lora={...}) trains adapters too",
}
_NAMES = {"eagle_ttt_steps": "steps", "eagle_loss_decay_factor": "step_decay", "eagle_num_layers": "num_layers"}
# The same for the keys of eagle_architecture_config, which may also have any other key of a Llama config.
_SIZES = {
    "num_hidden_layers": "num_layers", "intermediate_size": "intermediate_size", "rms_norm_eps": "rms_norm_eps",
    "num_attention_heads": "num_attention_heads", "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim", "attention_bias": "attention_bias", "mlp_bias": "mlp_bias",
}  # fmt: skip
_FIXED_SHAPE: dict[str, Any] = {
    "hidden_act": "silu", "position_embedding_type": "rope", "use_mtp_layernorm": False, "parallel_draft_step": 1,
    "attention_dropout": 0.0, "parallel_draft_heads_num_layers": None, "has_lm_head": None, "torch_dtype": None,
}  # fmt: skip
_FIXED_SHAPE_OF_EAGLE3 = {"use_last_layernorm": True, "use_input_layernorm_in_first_layer": True}
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_SHAPE = {*_SIZES, *_FIXED_SHAPE, *_FIXED_SHAPE_OF_EAGLE3, _LAYERS, "use_aux_hidden_state", "draft_vocab_size"}


def read_mode(mode: Any, base: Any) -> tuple[str, dict[str, Any]]:
    """convert()'s mode → a kind of head and its options. base: the text config of the model to convert.

    mode: a name, [name], [(name, config)] or {"algorithm": name, "config": config}. ValueError says what is wrong.
    """
    config: Any = None
    name = mode
    if isinstance(mode, Mapping):
        refuse_unknown(mode, ["algorithm", "config"], what="key of mode")
        name, config = mode.get("algorithm"), mode.get("config")
    elif isinstance(mode, list | tuple):
        pair = mode[0] if len(mode) == 1 else None
        if not isinstance(pair, str):
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise ValueError(f"mode={shown(mode)} must be a name or [(name, config)], of one head")
            pair, config = pair
        name = pair
    if not isinstance(name, str) or name not in MODES:
        known = ", ".join(MODES)
        raise ValueError(f"unknown mode {shown(name)}; known: {known} (other heads: specheads.convert(model, kind))")
    if config is not None and not isinstance(config, Mapping):
        raise ValueError(f"the config of mode {name!r} is {shown(config)}; expected options by name")
    options = dict(config or {})
    if name == "medusa":
        return "medusa", options if options.keys() & {"medusa_num_heads", "num_heads"} else {"num_heads": 2, **options}
    return _eagle(name, options, base)


def _eagle(mode: str, config: dict[str, Any], base: Any) -> tuple[str, dict[str, Any]]:
    """\"eagle\" means EAGLE-3 unless use_aux_hidden_state is false. Sizes not in config are default_eagle_config's."""
    nested = config.pop("eagle_architecture_config", None)
    if nested is not None and not isinstance(nested, Mapping):
        raise ValueError(f"eagle_architecture_config={shown(nested)}; expected options by name")
    known = {field.name for field in fields(Eagle3Config)} | {field.name for field in fields(EagleConfig)}
    shape = {name: config.pop(name) for name in (_SHAPE - known) & config.keys()}  # where earlier versions put them
    shape |= nested or {}
    refuse_unknown(shape, sorted(_SHAPE | LlamaConfig().to_dict().keys() | {"rope_scaling", "rope_theta"}),
                   section="eagle_architecture_config.")  # fmt: skip
    three = mode == "eagle3" or (mode == "eagle" and shape.get("use_aux_hidden_state", True))
    options = _options(config, three)
    for name, wanted in (_FIXED_SHAPE | (_FIXED_SHAPE_OF_EAGLE3 if three else {})).items():
        _refuse_other(f"eagle_architecture_config.{name}", shape.get(name, wanted), wanted)
    drafted = shape.get("draft_vocab_size", base.vocab_size)
    if three:
        options = {"steps": 3, "step_decay": 0.9, "draft_vocab_size": drafted, "norm_before_residual": False} | options
        if ids := shape.get(_LAYERS):
            last = layer_count(base) - 1  # ModelOpt hooks layers, so of the last it takes the output before the norm
            options = {"taps": tuple(i + 1 + (i == last) for i in ids)} | options
    elif drafted != base.vocab_size:
        raise ValueError(f"eagle_architecture_config.draft_vocab_size={shown(drafted)} goes with EAGLE-3 alone")
    sizes = default_eagle_config | shape
    block = {ours: sizes[theirs] for theirs, ours in _SIZES.items()} | {"rope_parameters": _rope(shape, base)}
    return "eagle3" if three else "eagle", block | options


def _options(config: dict[str, Any], three: bool) -> dict[str, Any]:
    """The options other than the architecture. Unknown names are left for the head's config to refuse."""
    options = {}
    for name, value in config.items():
        if name in _FIXED:
            _refuse_other(name, value, _FIXED[name])
        elif name in _NAMES and (three or _NAMES[name] != "step_decay"):
            options[_NAMES[name]] = value
        elif name not in _NAMES:
            options[name] = value
    return options


def _rope(shape: Mapping[str, Any], base: Any) -> dict[str, Any]:
    scaling = shape.get("rope_scaling") or shape.get("rope_parameters") or {}
    longest = shape.get("max_position_embeddings") or getattr(base, "max_position_embeddings", None) or 2048
    theta = scaling.get("rope_theta") or shape.get("rope_theta") or USUAL_THETA
    rope = {**complete_rope(scaling, longest), "rope_theta": theta}
    return rope if rope["rope_type"] != "default" else {"rope_type": "default", "rope_theta": theta}


def _refuse_other(name: str, value: Any, wanted: Any) -> None:
    if wanted is not None and value is not None and value != wanted:
        instead = f"; {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise ValueError(f"{name}={shown(value)} is not supported, only {wanted!r}{instead}")
