"""EAGLE-3 heads with latent attention (MLA), as vLLM 0.33 reads them for Kimi-K2.5 and DeepSeek-V3
(deepseek_eagle3.py): their config keys and the names of their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specheads.heads import Eagle3Config
from specheads.models.files import CheckpointError
from specheads.models.formats.files import Files
from specheads.models.formats.keys.config_table import flag, refusal, whole

CLASS, TYPE = "Eagle3DeepseekV2ForCausalLM", "deepseek_v3"
# Of experts, which a head's block has none of, and a sum of sizes.
WITHOUT_EFFECT = frozenset({
    "n_routed_experts", "n_shared_experts", "first_k_dense_replace", "moe_layer_freq", "n_group", "topk_group",
    "topk_method", "scoring_func", "seq_aux", "aux_loss_alpha", "routed_scaling_factor", "ep_size",
    "num_nextn_predict_layers", "qk_head_dim",
})  # fmt: skip


def has_latent_attention(config: Mapping[str, Any]) -> bool:
    return config.get("kv_lora_rank") is not None


def read_sizes(files: Files, config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Head options from a config's own keys. rope: its rope_parameters."""
    if not flag(config, "rope_interleave", True):
        raise refusal(files, "rope_interleave", False, "its readers turn neighbours of the rotated part together")
    if (rope.get("mscale") is None) != (rope.get("mscale_all_dim") is None):
        raise CheckpointError(f"{files}: its rope_scaling has one of mscale and mscale_all_dim; write both")
    rotated = whole(config, "qk_rope_head_dim")
    return {
        "kv_lora_rank": whole(config, "kv_lora_rank"), "v_head_dim": whole(config, "v_head_dim"),
        "q_lora_rank": None if config.get("q_lora_rank") is None else whole(config, "q_lora_rank"),
        "qk_rope_head_dim": rotated, "head_dim": whole(config, "qk_nope_head_dim") + rotated,
        "num_key_value_heads": None,
    }  # fmt: skip


def attention_names(head: Eagle3Config, i: int, theirs: str) -> dict[str, str]:
    """Our name → theirs for the attention of block i. theirs: prefix of the block's names."""
    queries = ("q_proj",) if head.q_lora_rank is None else ("q_a_proj", "q_a_layernorm", "q_b_proj")
    names = (*queries, "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
    return {f"blocks.{i}.{name}.weight": f"{theirs}self_attn.{name}.weight" for name in names}


def refusals(head: Eagle3Config, engine: str) -> list[str]:
    """Why a program does not read the head's attention; [] if it does, or if that is not latent."""
    if head.kv_lora_rank is None:
        return []
    if engine != "vllm":
        return ["its attention is latent (kv_lora_rank), and its readers' is not"]
    assert head.rope_parameters
    wrong = [f"it has {name}, which vLLM's class for latent attention does not" for name in
             ("norm_before_fc", "mlp_bias", "sliding_window", "mask_token_id", "own_embeddings")
             if getattr(head, name) not in (None, False)]  # fmt: skip
    if (kind := head.rope_parameters["rope_type"]) not in ("default", "yarn"):
        wrong.append(f"its positions are scaled (rope_type {kind}), and vLLM's class for latent attention has yarn")
    return wrong


def config_keys(head: Eagle3Config) -> dict[str, Any]:
    """What replaces and adds to a Llama block's config."""
    assert head.head_dim and head.qk_rope_head_dim
    return {
        "architectures": [CLASS], "model_type": TYPE, "head_dim": head.qk_rope_head_dim,
        "q_lora_rank": head.q_lora_rank, "kv_lora_rank": head.kv_lora_rank, "v_head_dim": head.v_head_dim,
        "qk_rope_head_dim": head.qk_rope_head_dim, "qk_nope_head_dim": head.head_dim - head.qk_rope_head_dim,
    }  # fmt: skip
