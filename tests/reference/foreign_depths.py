"""Medusa and Hydra heads as other programs write them, and what they draft; as in foreign.py, without specheads."""

from __future__ import annotations

from copy import deepcopy

import torch
from transformers import LlamaModel

from tests.reference.foreign import H, Random, V, write

# --- Medusa ---


def medusa(folder, form="v1", *, heads=3, layers=1, draft=V, shared=False, biased=True, **changes):
    """form: v1 (FasterDecoding's pickle), v2 (without output matrices), trtllm, vllm. shared: one matrix for all."""
    make = Random(13)
    linear = {(h, i): (make(H, H), make(H)) for h in range(heads) for i in range(layers)}
    outputs = [make(draft, H) for _ in range(heads)]
    if form == "vllm":
        tensors = {f"blocks.{h}.layers.{i}.weight": w for (h, i), (w, _) in linear.items()}
        tensors |= {f"blocks.{h}.layers.{i}.bias": b for (h, i), (_, b) in linear.items() if biased}
        tensors |= (
            {"lm_head.weight": outputs[0]} if shared else {f"lm_heads.{h}.weight": w for h, w in enumerate(outputs)}
        )
        if draft < V:
            tensors["token_map"] = make.kept(draft)
        config = {
            "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": H, "vocab_size": V,
            "truncated_vocab_size": draft, "num_heads": heads, "num_hidden_layers": layers, "medusa_fc_bias": biased,
            "original_lm_head": shared,
        }  # fmt: skip
        return write(folder, {**config, **changes}, tensors)
    tensors = {f"{h}.{i}.linear.weight": w for (h, i), (w, _) in linear.items()}
    tensors |= {f"{h}.{i}.linear.bias": b for (h, i), (_, b) in linear.items()}
    config = {"base_model_name_or_path": "org/base", "medusa_num_heads": 2, "medusa_num_layers": layers}
    if form != "v2":
        tensors |= {f"{h}.{layers}.weight": w for h, w in enumerate(outputs)}
    if form == "v2":
        config["version"] = "2"
    if form == "trtllm":
        config["num_medusa_heads"] = heads
    name = "medusa_lm_head.pt" if form == "v1" else "medusa_lm_head.safetensors"
    return write(folder, {**config, **changes}, tensors, name)


def medusa_logits(tensors, state, lm_head, heads=3, layers=1):
    """Draft logits of each head on the base's last hidden state (H,), after the final norm."""
    logits = []
    for h in range(heads):
        x = state
        for i in range(layers):
            theirs = f"{h}.{i}.linear." if "0.0.linear.weight" in tensors else f"blocks.{h}.layers.{i}."
            x = x + torch.nn.functional.silu(x @ tensors[f"{theirs}weight"].T + tensors.get(f"{theirs}bias", 0))
        output = next(
            (tensors[n] for n in (f"{h}.{layers}.weight", f"lm_heads.{h}.weight", "lm_head.weight") if n in tensors),
            lm_head,
        )
        logits.append(x @ output.T)
    return logits


# --- Hydra ---


def hydra(folder, prefix=False, *, heads=3, layers=2, base=None, **changes):
    """A pickle; later blocks of a head are equal, as one module is. prefix: Hydra++, whose layer has the sizes of the
    base's config."""
    make = Random(14)
    tensors = {}
    for i in range(heads):
        later = make(H, H), make(H)
        for j in range(layers):
            name = f"hydra_mlp.{i}.{2 * j + 1 if prefix else j}."
            weight, bias = later if j else (make(H, (i + 2) * H), make(H))
            tensors |= {f"{name}linear.weight": weight.clone(), f"{name}linear.bias": bias.clone()}
            if j == 0:
                tensors |= {
                    f"{name}res_connection.weight": make(H, (i + 2) * H),
                    f"{name}res_connection.bias": make(H),
                }
        output = f"hydra_lm_head.{i}.1." if prefix else f"hydra_lm_head.{i}."
        tensors |= {f"{output}weight": make(V, H), f"{output}bias": make(V)}
    if prefix:
        layer, sizes = "prefix_embeding_layer.layers.0.", base.config
        wide, narrow = (n * sizes.head_dim for n in (sizes.num_attention_heads, sizes.num_key_value_heads))
        shapes = {"q": (wide, H), "k": (narrow, H), "v": (narrow, H), "o": (H, wide)}
        tensors |= {f"{layer}self_attn.{m}_proj.weight": make(*shape) for m, shape in shapes.items()}
        shapes = {
            "gate": (sizes.intermediate_size, H),
            "up": (sizes.intermediate_size, H),
            "down": (H, sizes.intermediate_size),
        }
        tensors |= {f"{layer}mlp.{m}_proj.weight": make(*shape) for m, shape in shapes.items()}
        tensors |= {f"{layer}{n}_layernorm.weight": make.norm(H) for n in ("input", "post_attention")}
        tensors |= {
            "prefix_embeding_layer.norm.weight": make.norm(H),
            "prefix_embeding_layer.embed_tokens.weight": make(V, H),
        }
    config = {
        "base_model_name_or_path": "org/base", "hydra_num_heads": heads, "hydra_num_layers": layers,
        "hydra_head_arch": "prefix-mlp" if prefix else "mlp", "grounded_heads": True, "hidden_state_offset": 0,
    }  # fmt: skip
    return write(folder, {**config, **changes}, tensors, "hydra_lm_head.pt")


def hydra_logits(tensors, states, embed, tokens, drafted, base=None, heads=3, layers=2):
    """Of each head, on the path of root and drafted tokens. base: for Hydra++, whose layer is one of that model."""
    prefix = "hydra_mlp.0.1.linear.weight" in tensors and base is not None
    state = states[-1]
    if prefix:
        state = prefix_states(tensors, state, base)
    path, logits = [state[-1], embed[tokens[-1]]], []
    for i in range(heads):
        x = torch.cat(path)
        for j in range(layers):
            name = f"hydra_mlp.{i}.{2 * j + 1 if prefix else j}."
            moved = torch.nn.functional.silu(x @ tensors[f"{name}linear.weight"].T + tensors[f"{name}linear.bias"])
            kept = x if j else x @ tensors[f"{name}res_connection.weight"].T + tensors[f"{name}res_connection.bias"]
            x = kept + moved
        output = f"hydra_lm_head.{i}.1." if prefix else f"hydra_lm_head.{i}."
        logits.append(x @ tensors[f"{output}weight"].T + tensors[f"{output}bias"])
        if i < len(drafted):
            path.append(embed[drafted[i]])
    return logits


def prefix_states(tensors, hidden, base):
    """A Llama model of one layer, by transformers' own code, over vectors (T, H) instead of tokens."""
    config = deepcopy(base.config)
    config.num_hidden_layers = 1
    model = LlamaModel(config).eval()
    own = {
        n.removeprefix("prefix_embeding_layer."): t
        for n, t in tensors.items()
        if n.startswith("prefix_embeding_layer.")
    }
    missing = model.load_state_dict(own, strict=False).missing_keys
    assert set(missing) <= {"embed_tokens.weight"}
    return model(inputs_embeds=hidden.unsqueeze(0), use_cache=False).last_hidden_state[0]
