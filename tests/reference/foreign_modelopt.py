"""EAGLE-3 heads as ModelOpt's Megatron exporter writes them, biases for others, and any head split over files; as in
foreign.py, without specheads.

Read in ModelOpt 0.47 (unified_export_megatron.py, mcore_llama.py): a config of Llama 3.1's with the sizes replaced and
no special tokens, one model.safetensors, "midlayer." for one decoder block and "midlayer.0." for the first of several,
whose later ones begin with a hidden_norm, and no lm_head.weight where all tokens are drafted.
"""

from __future__ import annotations

import json

from safetensors.torch import load_file, save_file

from tests.reference.foreign import HEAD_DIM, HEADS, KV_HEADS, LLAMA, H, N, Random, V, block, eagle3_tensors, write

EAGLE_CONFIG = {
    "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
    "use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, N // 2 - 1, N - 4],
    "next_layer_regular": True, "parallel_draft_step": 1, "parallel_draft_heads_num_layers": 1,
}  # fmt: skip


def config_of(draft=V, layers=1, inner=None, **changes):
    """inner: changes to eagle_config; None takes a key away, here and there."""
    config = {
        **LLAMA, **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id")),
        "architectures": ["LlamaForCausalLMEagle3Deep" if layers > 1 else "LlamaForCausalLMEagle3"],
        "num_hidden_layers": layers, "draft_vocab_size": draft, "eagle_config": {**EAGLE_CONFIG, **(inner or {})},
    }  # fmt: skip
    config["eagle_config"] = {k: v for k, v in config["eagle_config"].items() if v is not None}
    return {k: v for k, v in {**config, **changes}.items() if v is not None}


def tensors_of(draft=V, layers=1):
    first = "midlayer." if layers == 1 else "midlayer.0."
    tensors, make = eagle3_tensors(first, draft=draft), Random(17)
    tensors.pop("t2d", None)
    if draft == V:
        del tensors["lm_head.weight"]
    for i in range(1, layers):
        tensors |= block(make, f"midlayer.{i}.", H) | {f"midlayer.{i}.hidden_norm.weight": make.norm(H)}
    return tensors


def megatron(folder, *, draft=V, layers=1, **changes):
    return write(folder, config_of(draft, layers, **changes), tensors_of(draft, layers))


def biases(prefix, output=False):
    """Of queries, keys and values, and of the output where asked."""
    make, wide, narrow = Random(18), HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    sizes = {"q": wide, "k": narrow, "v": narrow} | ({"o": H} if output else {})
    return {f"{prefix}self_attn.{m}_proj.bias": make(size) for m, size in sizes.items()}


# --- Shards ---


def shard(folder, count=3, name="model-{:05d}-of-{:05d}.safetensors"):
    """model.safetensors of a folder as `count` files and an index, as save_pretrained splits large models; returns the
    index."""
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for i in range(count):
        file = name.format(i + 1, count)
        part = dict(list(whole.items())[i::count])
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(t.numel() * t.element_size() for t in whole.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    write_index(folder, index)
    return index


def write_index(folder, index):
    (folder / "model.safetensors.index.json").write_text(index if isinstance(index, str) else json.dumps(index))
