"""What each program takes of a block head's files, after its own reader and without specheads.

A reader is given config.json and the tensors, and tells what it would run: which hidden_states are fed in, the token
of masked slots, the slots of a block, whether slots see only those before them, whether slot j speaks of the token
after its position, the Markov rank, and the tensors under the names of foreign_blocks.py. It raises where the program
would, and where the program would leave a tensor out without a word. docs/compatibility.md has the versions. Read in:

sglang     sglang/srt/models/dflash.py, dspark.py, speculative/dflash_utils.py, dspark_components/dspark_config.py
trtllm     tensorrt_llm/_torch/models/modeling_dflash.py, llmapi/llm_args.py
llamacpp   conversion/qwen.py, src/models/dflash.cpp, common/speculative.cpp (b11549)
openvino   optimum/exporters/openvino/model_patcher.py, convert.py (optimum-intel 2.2); dflash_model_transforms.cpp
vllm       vllm/model_executor/models/qwen3_dspark.py, vllm/config/speculative.py (0.32)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Read:
    layers: list[int]
    mask: int
    slots: int
    causal: bool
    predicts_next: bool
    rank: int
    tensors: dict[str, Any]


def backbone(config, tensors, more=()):
    """Tensors of a Qwen3 stack with fc and hidden_norm; an error for any other that is not in `more`."""
    wanted = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    for i in range(config["num_hidden_layers"]):
        layer = f"layers.{i}."
        wanted |= {f"{layer}{norm}_layernorm.weight" for norm in ("input", "post_attention")}
        wanted |= {f"{layer}self_attn.{name}_norm.weight" for name in "qk"}
        wanted |= {f"{layer}mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
        parts = ("weight", "bias") if config["attention_bias"] else ("weight",)
        wanted |= {f"{layer}self_attn.{name}_proj.{part}" for name in "qkvo" for part in parts}
    if missing := wanted - set(tensors):
        raise ValueError(f"missing {missing}")
    if left_out := set(tensors) - wanted - set(more):
        raise ValueError(f"left out {left_out}")
    return tensors


def full_attention(config):
    """No layer slides; not causal where none does."""
    types = config.get("layer_types")
    if types is not None and (len(types) != config["num_hidden_layers"] or set(types) != {"full_attention"}):
        raise ValueError(f"layers {types}")
    return bool(config.get("is_causal", False))


def dflash(config, tensors):
    """SGLang's DFLASH, TensorRT-LLM's DFlash and OpenVINO's export: all read the table, then the top."""
    if config["architectures"] != ["DFlashDraftModel"] or config["model_type"] != "qwen3":
        raise ValueError(f"{config['architectures']} of {config['model_type']}")
    inner = config["dflash_config"]
    if inner.get("projector_type") or inner.get("use_swa") or inner.get("markov_rank"):
        raise ValueError("another kind of head")
    layers = inner.get("target_layer_ids", config.get("target_layer_ids"))
    if max(layers) >= config["num_target_layers"]:
        raise ValueError("a layer that the target has not")
    slots = inner.get("block_size", config.get("block_size"))
    mask = inner.get("mask_token_id", config.get("mask_token_id"))
    return Read([i + 1 for i in layers], mask, slots, full_attention(config), False, 0, backbone(config, tensors))


def dflash_gguf(config, tensors):
    """llama.cpp: the same, but for biases, which its loader has no name for, and the key that says causal."""
    if any(name.endswith(".bias") for name in tensors) or config.get("use_sliding_window"):
        raise ValueError("biases or a window")
    read = dflash(config, tensors)
    causal = config.get("is_causal", config["dflash_config"].get("causal", False))
    return Read(read.layers, read.mask, read.slots, bool(causal), False, 0, tensors)


def dspark(config, tensors, narrow, biases=True):
    """What vLLM, SGLang and llama.cpp share of DSpark's reading: DeepSpec's keys, at the top."""
    if config["architectures"] != ["Qwen3DSparkModel"] or config.get("markov_head_type") != "vanilla":
        raise ValueError(f"{config['architectures']}, {config.get('markov_head_type')}")
    if config["markov_rank"] < 1 or "speculators_model_type" in config:
        raise ValueError("no Markov bias, or slots that predict their own position")
    own = ["markov_head.markov_w1.weight", "markov_head.markov_w2.weight"]
    if config["enable_confidence_head"]:
        if not config["confidence_head_with_markov"]:
            raise ValueError("a confidence without the Markov embedding")
        own += ["confidence_head.proj.weight", "confidence_head.proj.bias"]
    draft = config.get("draft_vocab_size") or config["vocab_size"]
    if draft < config["vocab_size"]:
        if not narrow:
            raise ValueError(f"drafts {draft} tokens")
        own += ["d2t", "t2d", "lm_head.weight"]
        if len(tensors["markov_head.markov_w2.weight"]) != draft or len(tensors["d2t"]) != draft:
            raise ValueError("rows that are not the draft vocabulary's")
    if not biases and any(name.endswith("_proj.bias") for name in tensors):
        raise ValueError("biases")
    if not set(own) <= set(tensors):
        raise ValueError(f"missing {set(own) - set(tensors)}")
    layers, predicts_next = config["target_layer_ids"], config.get("sample_from_anchor", True)
    return Read(
        [i + 1 for i in layers], config["mask_token_id"], config["block_size"], full_attention(config), predicts_next,
        config["markov_rank"], backbone(config, tensors, own),
    )  # fmt: skip


READERS = {
    ("sglang", "dflash"): dflash, ("trtllm", "dflash"): dflash, ("openvino", "dflash"): dflash,
    ("llamacpp", "dflash"): dflash_gguf,
    ("vllm", "dspark"): lambda config, tensors: dspark(config, tensors, True),
    ("sglang", "dspark"): lambda config, tensors: dspark(config, tensors, False),
    ("llamacpp", "dspark"): lambda config, tensors: dspark(config, tensors, True, biases=False),
}  # fmt: skip
