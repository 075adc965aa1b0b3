"""A tiny random model of every family of decoder-only models."""

import inspect

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

from specheads.decoding.verify.model_inputs import cache_argument

VOCAB = 97

# Given to each config as far as it declares them. A window shorter than the prompts, so that it bites; weights larger
# than usual, so that greedy text varies instead of repeating one token.
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.6, "init_std": 0.6,
    "sliding_window": 8, "attention_chunk_size": 8, "rotary_dim": 4, "ffn_dim": 48, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 12, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 8,
}  # fmt: skip
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MAMBA2 = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2,
    "mamba_chunk_size": 32,
}  # fmt: skip
LINEAR = {"layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"]}
CONV = {"layer_types": ["conv", "full_attention"] * 2}
SHARED = ["linear_attention", "hybrid"] * 2  # Zamba's attention layers share their weights
# Family with recurrent layers → as below.
RECURRENT = {
    "Qwen3-Next": ("Qwen3NextConfig", DELTA),
    "Qwen3.5": ("Qwen3_5TextConfig", DELTA),
    "Qwen3.5-MoE": ("Qwen3_5MoeTextConfig", DELTA),
    "LFM2": ("Lfm2Config", CONV),
    "LFM2-MoE": ("Lfm2MoeConfig", CONV),
    "LFM3": ("Lfm3Config", CONV),
    "Falcon-H1": ("FalconH1Config", {**MAMBA2, "mamba_d_ssm": 64}),
    "Granite-4": ("GraniteMoeHybridConfig", {**MAMBA2, **LINEAR, "shared_intermediate_size": 48}),
    "Bamba": ("BambaConfig", {**MAMBA2, "attn_layer_indices": [1, 3]}),
    "Nemotron-H": (
        "NemotronHConfig",
        {
            "layers_block_type": ["linear_attention", "full_attention", "linear_attention", "mlp"],
            "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "chunk_size": 32,
        },
    ),
    "OLMo-hybrid": ("OlmoHybridConfig", {**DELTA, "linear_num_value_heads": 2}),
    "Jamba": ("JambaConfig", {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4}),
    "Zamba": (
        "ZambaConfig",
        {"layers_block_type": SHARED, "n_mamba_heads": 2, "mamba_d_state": 8, "mamba_dt_rank": 4,
         "tie_word_embeddings": True},
    ),
    "Zamba2": (
        "Zamba2Config",
        {"layers_block_type": SHARED, "n_mamba_heads": 8, "mamba_d_state": 8, "num_key_value_heads": 4,
         "chunk_size": 32, "tie_word_embeddings": True},
    ),
    "Lara-Mini": ("LaraMiniConfig", DELTA),
    "Kimi-Linear": ("KimiLinearConfig", {**LATENT, **LINEAR, "linear_head_dim": 8, "linear_num_heads": 4}),
    "Ling-3": ("BailingHybridConfig", {**LATENT, **LINEAR, "num_mtp_layers": 0}),
}  # fmt: skip
# Family → its config class and what it wants set otherwise. Untied where the embedding scale of a random model would
# make it repeat its last token for ever.
FAMILIES = {
    "Llama": ("LlamaConfig", {}),
    "Llama, tied, biased, one key head": (
        "LlamaConfig",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    ),
    "Qwen2": ("Qwen2Config", {"use_sliding_window": False}),
    "Qwen2, sliding layers": ("Qwen2Config", {"use_sliding_window": True, "max_window_layers": 2}),
    "Qwen3": ("Qwen3Config", {}),
    "Qwen2-MoE": ("Qwen2MoeConfig", {}),
    "Qwen3-MoE": ("Qwen3MoeConfig", {}),
    "Mistral": ("MistralConfig", {}),
    "Ministral": ("MinistralConfig", {}),
    "Mixtral": ("MixtralConfig", {}),
    "Gemma": ("GemmaConfig", {}),
    "Gemma-2": ("Gemma2Config", {"tie_word_embeddings": False}),
    "Gemma-3": ("Gemma3TextConfig", {"tie_word_embeddings": False, "initializer_range": 0.4, "num_hidden_layers": 6}),
    # The last of its layers has wider heads, and those of the first two have keys that later layers read.
    "Gemma-4": (
        "Gemma4TextConfig",
        {
            "tie_word_embeddings": False,
            "initializer_range": 0.4,
            "global_head_dim": 16,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 97,
        },
    ),
    "GPT-2": ("GPT2Config", {}),
    "GPT-J": ("GPTJConfig", {}),
    "CodeGen": ("CodeGenConfig", {}),
    "GPT-BigCode": ("GPTBigCodeConfig", {}),
    "GPT-NeoX": ("GPTNeoXConfig", {}),
    "Phi": ("PhiConfig", {}),
    "Phi-3": ("Phi3Config", {}),
    "PhiMoE": ("PhimoeConfig", {}),
    "OPT": ("OPTConfig", {"word_embed_proj_dim": 32}),
    "OLMo": ("OlmoConfig", {}),
    "OLMo-2": ("Olmo2Config", {}),
    "OLMo-3": ("Olmo3Config", {}),
    "OLMoE": ("OlmoeConfig", {}),
    "Falcon": ("FalconConfig", {}),
    "StarCoder2": ("Starcoder2Config", {}),
    "Cohere": ("CohereConfig", {}),
    "Cohere-2": ("Cohere2Config", {}),
    "Granite": ("GraniteConfig", {"logits_scaling": 3.0, "residual_multiplier": 0.5}),
    "GraniteMoE": ("GraniteMoeConfig", {"logits_scaling": 3.0}),
    "GLM": ("GlmConfig", {}),
    "GLM-4": ("Glm4Config", {}),
    "EXAONE-4": ("Exaone4Config", {}),
    "SmolLM3": ("SmolLM3Config", {}),
    "Nemotron": ("NemotronConfig", {}),
    "Persimmon": ("PersimmonConfig", {}),
    "gpt-oss": ("GptOssConfig", {}),
    "ERNIE-4.5": ("Ernie4_5Config", {}),
    "Arcee": ("ArceeConfig", {"initializer_range": 0.4}),
    "Apertus": ("ApertusConfig", {}),
    "Apertus-1.5": ("Apertus1p5TextConfig", {}),
    # Its middle layers run twice, with keys of their own each time.
    "Dory": ("DoryConfig", {"num_hidden_layers": 12, "n_input_layers": 4, "n_output_layers": 4}),
    "Sarvam-MoE": ("SarvamMoEConfig", {}),
    "Seed-OSS": ("SeedOssConfig", {}),
    "HunYuan": ("HunYuanDenseV1Config", {}),
    # Values of another width than keys, and layers that attend within their own chunk.
    "DeepSeek-V3": ("DeepseekV3Config", LATENT),
    "Llama-4": ("Llama4TextConfig", {"intermediate_size_mlp": 48}),
}


# Their rotary positions change at a length that the texts of the tests pass.
BOUNDARY = 24  # the length at which the frequencies of the two below change
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [3.0, 7.0, 5.0, 9.0],
    "original_max_position_embeddings": BOUNDARY, "factor": 4.0,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LENGTH_DEPENDENT = {
    "Phi-3": (
        "Phi3Config",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": BOUNDARY, "sliding_window": None},
    ),
    "Llama, longrope": ("LlamaConfig", {"rope_parameters": LONGROPE}),
    "Llama, dynamic": ("LlamaConfig", {"rope_parameters": DYNAMIC, "max_position_embeddings": BOUNDARY}),
    "Qwen3, dynamic": ("Qwen3Config", {"rope_parameters": DYNAMIC, "max_position_embeddings": BOUNDARY}),
}  # fmt: skip
# Than transformers 5.17, the lowest version that is served; all but the first two are of 5.24.
NEWER = (
    "BailingHybridConfig", "BeamConfig", "Apertus1p5TextConfig", "DoryConfig", "LaraMiniConfig", "Lfm3Config",
    "SarvamMoEConfig",
)  # fmt: skip


def build(name, options, **kwargs):
    """A random model of a config class, on a fixed seed."""
    if name in NEWER and not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}")
    config_class = getattr(transformers, name)
    declared = {*inspect.signature(config_class).parameters, *config_class.attribute_map}
    declared -= {key for key in declared if isinstance(getattr(config_class, key, None), property)}
    sizes = {key: value for key, value in SIZES.items() if key in declared}
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config_class(**{**sizes, **options}), **kwargs).eval()
    base.generation_config.eos_token_id, base.generation_config.pad_token_id = None, 0
    return base


def skip_where_transformers_loses_the_cache(base, boundary):
    """Skips a base whose own text is wrong beyond the length at which its rotary frequencies change."""
    ids, cache, states = torch.zeros(1, boundary + 1, dtype=torch.long), DynamicCache(), torch.zeros(1, 1, boundary, 1)
    cache.update(states, states, 0)
    name = cache_argument(base)
    fed = base.prepare_inputs_for_generation(ids, next_sequence_length=1, **{name: cache})
    if fed.get(name) is None and fed["input_ids"].shape[1] == 1:
        pytest.skip("this transformers drops the cache at the boundary and reads one token alone: its text is wrong")
