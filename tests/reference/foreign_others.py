"""Drafts of kinds that no format here reads, as their own programs write them: key names and config, tiny and random.
As in foreign.py, without specheads. Each returns its tensors."""

from __future__ import annotations

import json

from tests.reference.foreign import HEADS, INNER, LLAMA, H, Random, V, block, eagle3_tensors, write

STATE, DEPTHS = 24, 3  # of MLPSpeculator, Arctic and ReDrafter


def llama_model(make, layers, inner=INNER):
    """The tensors of a whole Llama or Qwen2 model under transformers' names."""
    tensors = {"model.embed_tokens.weight": make(V, H), "model.norm.weight": make.norm(H), "lm_head.weight": make(V, H)}
    for i in range(layers):
        prefix = f"model.layers.{i}."
        tensors |= block(make, prefix, H) | {f"{prefix}input_layernorm.weight": make.norm(H)}
    return tensors


def pard(folder):
    config = {**LLAMA, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "pard_token": 90}
    return write(folder, config | {"spd_type": "pard"}, llama_model(Random(31), 2))


def gemma4_assistant(folder):
    """Its layers have no keys and values of their own."""
    make, tensors = Random(32), {}
    for i in range(2):
        prefix = f"model.layers.{i}."
        own = block(make, prefix, H) | {f"{prefix}input_layernorm.weight": make.norm(H)}
        tensors |= {name: t for name, t in own.items() if "k_proj" not in name and "v_proj" not in name}
    tensors |= {"pre_projection.weight": make(H, 2 * H), "post_projection.weight": make(H, H)}
    text = {**LLAMA, "model_type": "gemma4_text", "num_hidden_layers": 2, "num_kv_shared_layers": 2}
    config = {"architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant", "text_config": text}
    return write(folder, {**config, "backbone_hidden_size": H}, tensors)


def muse_glimmer_assistant(folder):
    make = Random(33)
    tensors = {"model.fc.weight": make(H, 3 * H), "model.hidden_norm.weight": make.norm(H)}
    tensors |= {f"model.layers.0.{name}": t for name, t in block(make, "", H).items()}
    config = {**LLAMA, "architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant"}
    return write(folder, {**config, "block_size": 4, "mask_token_id": 9, "target_layer_ids": [0, 3, 5]}, tensors)


def mlp_speculator(folder):
    make, config = Random(34), {"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator"}
    tensors = {}
    for i in range(DEPTHS):
        tensors |= {
            f"speculator.emb.{i}.weight": make(V, STATE), f"speculator.head.{i}.weight": make(V, STATE),
            f"speculator.proj.{i}.weight": make(STATE, STATE if i else H),
            f"speculator.ln.{i}.weight": make.norm(STATE), f"speculator.ln.{i}.bias": make(STATE),
        }  # fmt: skip
    sizes = {"emb_dim": H, "inner_dim": STATE, "n_predict": DEPTHS, "n_candidates": 5, "vocab_size": V}
    return write(folder, config | sizes | {"tie_weights": False, "scale_input": False}, tensors)


def arctic(folder, kind="lstm"):
    make = Random(35)
    tensors = {"emb.0.weight": make(V, STATE), "head.0.weight": make(V, STATE)}
    for gate in ("forget", "input", "output", "cell") if kind == "lstm" else ("proj",):
        tensors[f"{gate}.0.weight"] = make(STATE, H)
    name = "ArcticLSTMSpeculatorPreTrainedModel" if kind == "lstm" else "ArcticMLPSpeculatorPreTrainedModel"
    sizes = {"emb_dim": str(STATE), "inner_dim": str(STATE), "n_predict": DEPTHS, "vocab_size": V, "method": "sum_lstm"}
    return write(folder, {"architectures": [name], "model_type": "mlp_speculator", **sizes}, tensors)


def redrafter(folder):
    make = Random(36)
    tensors = {"input_proj.weight": make(2 * H, 2 * H), "rnn_u.weight": make(H, H), "rnn_w.weight": make(H, H)}
    tensors |= {"lm_head.0.linear.weight": make(2 * H, 2 * H), "lm_head.1.weight": make(V, 2 * H)}
    config = {"model_type": "recurrent_drafting_drafter", "hidden_size": H, "exit_dim": 2 * H, "vocab_size": V}
    return write(folder, {**config, "num_draft_layers": 2, "rnn": True}, tensors)


def vllm_eagle(folder):
    """The wrapper that vLLM's own script once wrote around an EAGLE checkpoint."""
    make = Random(37)
    tensors = {f"layers.0.{name}": t for name, t in block(make, "", H).items()} | {"fc.weight": make(H, 2 * H)}
    config = {"model_type": "eagle", "architectures": ["EAGLEModel"], "num_lookahead_tokens": 5}
    return write(folder, {**config, "truncated_vocab_size": V, "model": {**LLAMA}}, tensors)


def dspine(folder):
    make = Random(38)
    tensors = {"fc.weight": make(H, 3 * H), "hidden_norm.weight": make.norm(H), "norm.weight": make.norm(H)}
    tensors |= block(make, "layers.0.", H) | {
        "spine.0.state_proj.weight": make(H, H),
        "spine.0.gate.weight": make(H, H),
    }
    return write(folder, {**LLAMA, "architectures": ["DSpineDraftModel"], "dspine_config": {"block_size": 4}}, tensors)


def quantised_eagle3(folder):
    """FP8 weights with a scale of each tensor, as SGLang and vLLM load such drafts."""
    import torch

    tensors = eagle3_tensors("midlayer.")
    for name in [n for n in tensors if n.endswith("proj.weight")]:
        scale = tensors[name].abs().max() / 448
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale.reshape(1)
    config = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 40}
    return write(
        folder, config | {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}, tensors
    )


def gguf(folder):
    """What llama.cpp's converter makes of a head: the magic number, version 3, nothing in it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "eagle3.gguf").write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(16))
    return {}


def medusa_2(folder, base):
    """FasterDecoding's Medusa-2: a whole model with its heads beside it."""
    from safetensors.torch import load_file, save_file

    make = Random(39)
    base.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for h in range(DEPTHS):
        tensors |= {f"medusa_head.{h}.0.linear.weight": make(H, H), f"medusa_head.{h}.0.linear.bias": make(H)}
        tensors[f"medusa_head.{h}.1.weight"] = make(V, H)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLM"], "medusa_num_heads": DEPTHS, "medusa_num_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def mla_eagle3(folder, queries=16, rope=None):
    """As vLLM reads Kimi-K2.5's and DeepSeek-V3's heads. queries: None without a narrow vector for queries."""
    make = Random(41)
    tensors = {n: t for n, t in eagle3_tensors("midlayer.").items() if "self_attn" not in n}
    rank, turned, nope, value = 16, 4, 8, 10
    attention = "midlayer.self_attn."
    if queries is None:
        tensors[f"{attention}q_proj.weight"] = make(HEADS * (nope + turned), 2 * H)
    else:
        tensors |= {
            f"{attention}q_a_proj.weight": make(queries, 2 * H), f"{attention}q_a_layernorm.weight": make.norm(queries),
            f"{attention}q_b_proj.weight": make(HEADS * (nope + turned), queries),
        }  # fmt: skip
    tensors |= {
        f"{attention}kv_a_proj_with_mqa.weight": make(rank + turned, 2 * H),
        f"{attention}kv_a_layernorm.weight": make.norm(rank),
        f"{attention}kv_b_proj.weight": make(HEADS * (nope + value), rank),
        f"{attention}o_proj.weight": make(H, HEADS * value),
    }  # fmt: skip
    config = {
        **LLAMA, "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "deepseek_v3", "q_lora_rank": queries,
        "kv_lora_rank": rank, "qk_rope_head_dim": turned, "qk_nope_head_dim": nope, "v_head_dim": value,
        "draft_vocab_size": 40, "num_key_value_heads": HEADS, "head_dim": turned,
        "n_routed_experts": 384, "num_experts_per_tok": 8, "first_k_dense_replace": 1, "routed_scaling_factor": 2.8,
    }  # fmt: skip
    if rope is not None:
        config |= {
            "rope_theta": rope["rope_theta"],
            "rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"},
        }
    return write(folder, config, tensors)
