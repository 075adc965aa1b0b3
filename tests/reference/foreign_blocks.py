"""Heads that draft a block at once as other programs write them, and what they draft; as in foreign.py, without
specheads: DFlash and DSpark of speculators, z-lab's DFlash, JetSpec, ModelOpt's DFlash, DeepSpec's DSpark, and
SpecForge's DSpark before and after its script that prepares it for SGLang."""

from __future__ import annotations

import torch

from tests.reference.foreign import (
    HEAD_DIM,
    HEADS,
    LLAMA,
    PLAIN,
    THETA,
    H,
    N,
    Random,
    V,
    block,
    mlp,
    rms,
    rotated,
    write,
)

SLOTS, MASK, LAYERS = 4, 9, (1, 4, 6)  # slots of a block; the token of masked slots; hidden_states that are read
FORMS = ("dspark", "dflash", "z-lab", "modelopt", "jetspec", "deepspec", "specforge", "normalised")
MARKED = ("dspark", "deepspec", "specforge", "normalised")  # with a Markov bias and a confidence


def head(folder, form, *, draft=None, rank=6, confidence=True, layers=2, base=None, **changes):
    """form: one of FORMS. draft: of a draft vocabulary. base: whose matrices DeepSpec stores too; changes: to the
    config, None taking a key away; inner: the same, to its dflash_config."""
    make = Random(15)
    draft = V if draft is None else draft
    rank, confidence = (rank, confidence) if form in MARKED else (0, False)
    tensors = {"fc.weight": make(H, 3 * H), "hidden_norm.weight": make.norm(H), "norm.weight": make.norm(H)}
    for i in range(layers):
        tensors |= block(make, f"layers.{i}.", H) | {f"layers.{i}.input_layernorm.weight": make.norm(H)}
        tensors |= {f"layers.{i}.self_attn.{n}_norm.weight": make.norm(HEAD_DIM) for n in "qk"}
    if rank:
        tensors |= {"markov_head.markov_w1.weight": make(V, rank), "markov_head.markov_w2.weight": make(draft, rank)}
    if confidence:
        tensors |= {"confidence_head.proj.weight": make(1, H + rank), "confidence_head.proj.bias": make(1)}
    if draft < V:
        kept = make.kept(draft)
        tensors |= {"lm_head.weight": make(draft, H), "d2t": kept - torch.arange(draft)}
        tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill_(0, kept, True)
    if form == "deepspec":
        tensors["embed_tokens.weight"] = base.get_input_embeddings().weight.detach().clone()
        tensors["lm_head.weight"] = base.get_output_embeddings().weight.detach().clone()
    config, marked = CONFIGS[form](layers, draft), marks(form, rank, confidence)
    nested = marked if form == "specforge" else {}
    config |= {} if nested else marked
    inner = {**config.get("dflash_config", {}), **nested, **changes.pop("inner", {})}
    if inner:
        config["dflash_config"] = {k: v for k, v in inner.items() if v is not None}
    return write(folder, {k: v for k, v in {**config, **changes}.items() if v is not None}, tensors)


def marks(form, rank, confidence):
    if form not in MARKED:
        return {}
    return {
        "markov_rank": rank, "markov_head_type": "vanilla", "enable_confidence_head": confidence,
        "confidence_head_with_markov": rank > 0,
    }  # fmt: skip


def speculators(kind, name):
    def config(layers, draft):
        inner = {k: v for k, v in LLAMA.items() if k not in ("rope_theta", "tie_word_embeddings")}
        return {
            "architectures": [f"{name}DraftModel"], "speculators_model_type": kind, "speculators_version": "0.9.0",
            "block_size": SLOTS, "draft_vocab_size": draft, "aux_hidden_state_layer_ids": list(LAYERS),
            "mask_token_id": MASK, "sample_from_anchor": kind == "dspark", "sliding_window_non_causal": False,
            "transformer_layer_config": {
                **inner, "model_type": "qwen3", "num_hidden_layers": layers,
                "rope_parameters": {"rope_theta": THETA, "rope_type": "default"},
            },
            "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": None, "architectures": []}},
        }  # fmt: skip

    return config


def qwen3(layers, architecture, **more):
    return {
        **LLAMA, "architectures": [architecture], "model_type": "qwen3", "num_hidden_layers": layers,
        "attention_bias": False, "layer_types": ["full_attention"] * layers, "use_sliding_window": False,
        "num_target_layers": N, "block_size": SLOTS, **more,
    }  # fmt: skip


OUTPUTS = {"mask_token_id": MASK, "target_layer_ids": [layer - 1 for layer in LAYERS]}  # numbered by their outputs
CONFIGS = {
    "dspark": speculators("dspark", "DSpark"),
    "dflash": speculators("dflash", "DFlash"),
    "z-lab": lambda layers, draft: qwen3(
        layers, "DFlashDraftModel", auto_map={"AutoModel": "dflash.DFlashDraftModel"}, dflash_config=dict(OUTPUTS)
    ),
    "modelopt": lambda layers, draft: qwen3(
        layers, "DFlashDraftModel", rope_scaling=None, dflash_config={**OUTPUTS, "causal": False}
    ),
    "jetspec": lambda layers, draft: qwen3(layers, "DFlashDraftModel", dflash_config={**OUTPUTS, "causal_head": True}),
    "deepspec": lambda layers, draft: qwen3(layers, "Qwen3DSparkModel", num_anchors=512, **OUTPUTS),
    "specforge": lambda layers, draft: qwen3(
        layers, "DSparkDraftModel", dflash_config={**OUTPUTS, "projector_type": "dspark", "attention_mode": "gqa"}
    ),
    "normalised": lambda layers, draft: qwen3(
        layers, "Qwen3DSparkModel", dflash_config={**OUTPUTS, "projector_type": "dspark"}
    ),
}


def projected(tensors, name, x):
    return x @ tensors[f"{name}weight"].T + tensors.get(f"{name}bias", 0)


def logits(
    tensors, form, states, embed, lm_head, tokens, drafted, predicts_next=None, rope=PLAIN, windows=None, causal=()
):
    """Draft logits (Vd,) of the tokens after the root and after each drafted one, by one block.

    states: the base's hidden_states, each (T, H), of the T tokens before the root; tokens (T + 1,): those and the root;
    predicts_next: slot j, at the root's position + j, predicts the token after its position (DSpark), or else its own.
    windows, causal: by layer, how many positions a slot attends, its own included (None: all), and whether later ones
    are hidden.
    """
    predicts_next = form in MARKED if predicts_next is None else predicts_next
    context = rms(torch.cat([states[i] for i in LAYERS], -1) @ tensors["fc.weight"].T, tensors["hidden_norm.weight"])
    x = embed[torch.tensor([int(tokens[-1]), *[MASK] * (SLOTS - 1)])]
    here = torch.arange(len(context), len(context) + SLOTS)
    every, layer = torch.arange(len(context) + SLOTS), 0
    while f"layers.{layer}.input_layernorm.weight" in tensors:
        prefix, seen = f"layers.{layer}.", torch.ones(SLOTS, len(every), dtype=torch.bool)
        if causal[layer] if causal else form == "jetspec":
            seen = every <= here.unsqueeze(1)
        if windows and windows[layer] is not None:
            seen = seen & (here.unsqueeze(1) - every < windows[layer])
        norms = {m: tensors[f"{prefix}self_attn.{m}_norm.weight"] for m in "qk"}
        read = rms(x, tensors[f"{prefix}input_layernorm.weight"])
        both = torch.cat([context, read])
        q = projected(tensors, f"{prefix}self_attn.q_proj.", read).view(SLOTS, HEADS, HEAD_DIM)
        k, v = (projected(tensors, f"{prefix}self_attn.{m}_proj.", both) for m in "kv")
        queries = rotated(rms(q, norms["q"]).transpose(0, 1), here, rope)
        keys = rotated(rms(k, norms["k"]).unsqueeze(0), torch.arange(len(both)), rope)[0]
        weights = (queries @ keys.T / HEAD_DIM**0.5).masked_fill(~seen, -torch.inf).softmax(-1)
        x = x + projected(tensors, f"{prefix}self_attn.o_proj.", (weights @ v).transpose(0, 1).flatten(1))
        x = x + mlp(tensors, prefix, rms(x, tensors[f"{prefix}post_attention_layernorm.weight"]))
        layer += 1
    found = (rms(x, tensors["norm.weight"]) @ lm_head.T)[0 if predicts_next else 1 :]
    before = torch.tensor([int(tokens[-1]), *drafted])
    if "markov_head.markov_w1.weight" in tensors:
        bias = tensors["markov_head.markov_w1.weight"][before] @ tensors["markov_head.markov_w2.weight"].T
        found = found[: len(before)] + bias
    return list(found[: len(before)])
