"""A head's decoder block as in a Llama checkpoint: tensor names and config keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config

from specheads.decoding.verify.hf_base import text_config
from specheads.heads.config import DecoderConfig
from specheads.heads.layers.block import ACTIVATIONS
from specheads.models.files import CheckpointError
from specheads.models.formats.files import Files
from specheads.models.formats.format import check_sizes, dtype_of
from specheads.models.formats.keys.config_table import flag, real, whole
from specheads.models.formats.parts import positions, windows
from specheads.options import shown

LATENT_TYPES = ("deepseek_v3", "deepseek_v2", "kimi_k2")  # model_type of configs with latent attention
_ATTENTION, _MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


def block_names(head: DecoderConfig, i: int, theirs: str, norm: str = "input_layernorm") -> dict[str, str]:
    """Our name → theirs for decoder block i. theirs: prefix of their names ("midlayer.", "layers.0."); norm: their name
    for the first norm of a later block."""
    ours = f"blocks.{i}."
    names = {f"{ours}{m}.weight": f"{theirs}self_attn.{m}.weight" for m in _ATTENTION}
    names |= {f"{ours}{m}.bias": f"{theirs}self_attn.{m}.bias" for m in _ATTENTION if head.attention_bias}
    return names | outer_names(head, i, theirs, norm)


def outer_names(head: DecoderConfig, i: int, theirs: str, norm: str = "input_layernorm") -> dict[str, str]:
    """Of `block_names` those outside of attention."""
    ours = f"blocks.{i}."
    names = {f"{ours}{m}.weight": f"{theirs}mlp.{m}.weight" for m in _MLP}
    names |= {f"{ours}{m}.bias": f"{theirs}mlp.{m}.bias" for m in _MLP if head.mlp_bias}
    names[f"{ours}post_attention_layernorm.weight"] = f"{theirs}post_attention_layernorm.weight"
    if i:
        names[f"later_norms.{i - 1}.weight"] = f"{theirs}{norm}.weight"
    return names


def block_options(
    files: Files, config: dict[str, Any], base: PreTrainedModel, layers: int, kind: str = "llama"
) -> dict[str, Any]:
    """Head options from a decoder's config; missing keys take transformers' defaults.

    layers: the number of blocks among the tensors. kind: of the head's block: llama, qwen3 or latent, whose sizes of
    attention the caller reads. CheckpointError if heads here do not support such a block.
    """
    usual: Any = Qwen3Config() if kind == "qwen3" else LlamaConfig()
    hidden, vocab = (whole(config, name, getattr(usual, name)) for name in ("hidden_size", "vocab_size"))
    if config is not files.config:
        windows.refuse_at_top(files, layers)
    for section in (files.config, config):  # the same one, unless the decoder's is nested
        if (target := section.get("target_hidden_size")) not in (None, hidden):
            raise CheckpointError(
                f"{files}: it reads features of {shown(target)} values in a stream of {hidden} (target_hidden_size); "
                "heads here have the base's hidden size"
            )
    types = {"latent": LATENT_TYPES}.get(kind, (kind,))
    if (model_type := config.get("model_type", types[0])) not in types:
        raise CheckpointError(
            f"{files}: its decoder is of type {shown(model_type)}; such heads here have {kind}'s block"
        )
    if (act := config.get("hidden_act", "silu")) not in (*ACTIVATIONS,):
        raise CheckpointError(f"{files}: its activation is {shown(act)}; heads here have {', '.join(ACTIVATIONS)}")
    check_sizes(files, {"hidden_size": hidden, "vocab_size": vocab}, base)
    if (claimed := whole(config, "num_hidden_layers", layers)) != layers:
        raise CheckpointError(f"{files}: its config says {claimed} decoder layers, and its tensors make up {layers}")
    heads = whole(config, "num_attention_heads", usual.num_attention_heads)
    return {
        "hidden_size": hidden, "vocab_size": vocab, "num_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": whole(config, "num_key_value_heads", 32 if kind == "qwen3" else heads),
        "head_dim": whole(config, "head_dim", usual.head_dim if kind == "qwen3" else max(1, hidden // heads)),
        "intermediate_size": whole(config, "intermediate_size", usual.intermediate_size),
        "rms_norm_eps": real(config, "rms_norm_eps", usual.rms_norm_eps),
        "rope_parameters": positions.read_rope(files, config),
        "attention_bias": _attention_bias(files, config, kind), "mlp_bias": flag(config, "mlp_bias"),
        "hidden_act": act, **windows.read_windows(files, config, layers),
    }  # fmt: skip


def zero_biases(files: Files, config: dict[str, Any], head: DecoderConfig) -> dict[str, Tensor]:
    """Zero biases (H,) of o_proj for the blocks of a file that has biases only on queries, keys and values (qkv_bias);
    {} for other files."""
    assert head.hidden_size
    if not flag(config, "qkv_bias") or flag(config, "attention_bias"):
        return {}
    dtype = next(t.dtype for t in files.shapes.values() if t.is_floating_point())
    return {f"blocks.{i}.o_proj.bias": torch.zeros(head.hidden_size, dtype=dtype) for i in range(head.num_layers)}


def _attention_bias(files: Files, config: dict[str, Any], kind: str) -> bool:
    """Does attention have biases? attention_bias means on all four matrices, qkv_bias on three, as the EAGLE repository
    and vLLM read it for a Llama block. CheckpointError if the two contradict each other."""
    every, three = flag(config, "attention_bias"), flag(config, "qkv_bias")
    if three and kind != "llama":
        raise CheckpointError(f"{files}: its head has qkv_bias=true, which readers of {kind}'s block do not know")
    if every and config.get("qkv_bias") is False:
        raise CheckpointError(
            f"{files}: its config says attention_bias=true and qkv_bias=false; its readers would disagree"
        )
    return every or three


def act_refusals(head: DecoderConfig) -> list[str]:
    """Why servers do not read a head's activation; [] if they do."""
    if head.hidden_act == "silu":
        return []
    return [f"its activation is {head.hidden_act}, and its readers have silu"]


def block_config(head: DecoderConfig, tensors: dict[str, Tensor], base: PreTrainedModel) -> dict[str, Any]:
    """The Llama config of a head's decoder, with every size given explicitly."""
    base_config, biases = text_config(base), {"attention_bias": head.attention_bias, "mlp_bias": head.mlp_bias}
    if not any(biases.values()):
        biases = {}
    ids = {name: getattr(base_config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {
        "model_type": "llama", "hidden_size": head.hidden_size, "vocab_size": head.vocab_size,
        "num_hidden_layers": head.num_layers, "num_attention_heads": head.num_attention_heads,
        "num_key_value_heads": head.num_key_value_heads, "head_dim": head.head_dim,
        "intermediate_size": head.intermediate_size, "hidden_act": head.hidden_act, "rms_norm_eps": head.rms_norm_eps,
        **positions.rope_keys(head), **windows.window_keys(head),
        "max_position_embeddings": getattr(base_config, "max_position_embeddings", None) or 2048,
        "tie_word_embeddings": False, "torch_dtype": dtype_of(tensors), **biases,
        **{name: value for name, value in ids.items() if value is not None},
    }  # fmt: skip
