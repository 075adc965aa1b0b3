"""Heads that draft a block at once as other programs write them, and what they draft; as in foreign.py, without
specheads: DFlash 1 and 2 and DSpark of speculators, z-lab's DFlash 1 and 2, JetSpec, ModelOpt's DFlash, DeepSpec's
DSpark, SpecForge's DSpark before and after its script that prepares it for SGLang, and its Domino."""

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
FORMS = (
    "dspark", "dflash", "z-lab", "modelopt", "jetspec", "deepspec", "specforge", "normalised", "dflash2", "dflash2-sp",
    "domino",
)  # fmt: skip
MARKED = ("dspark", "deepspec", "specforge", "normalised")  # with a Markov bias and a confidence


SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
GRU = 10


def head(folder, form, *, draft=None, rank=6, confidence=True, layers=2, base=None, markov="vanilla", **changes):
    """form: one of FORMS. draft: of a draft vocabulary. base: whose matrices DeepSpec stores too. markov: DSpark's type
    of bias. changes: to the config, None taking a key away; inner: the same, to its dflash_config."""
    make = Random(15)
    draft = V if draft is None else draft
    rank, confidence = (rank, confidence) if form in MARKED else (0, False)
    tensors = {"fc.weight": make(H, 3 * H), "hidden_norm.weight": make.norm(H), "norm.weight": make.norm(H)}
    for i in range(layers):
        tensors |= block(make, f"layers.{i}.", H) | {f"layers.{i}.input_layernorm.weight": make.norm(H)}
        tensors |= {f"layers.{i}.self_attn.{n}_norm.weight": make.norm(HEAD_DIM) for n in "qk"}
    if rank:
        tensors |= {"markov_head.markov_w1.weight": make(V, rank), "markov_head.markov_w2.weight": make(draft, rank)}
    if markov == "gated":
        tensors |= {"markov_head.gate_proj.weight": make(rank, H + rank), "markov_head.gate_proj.bias": make(rank)}
    if markov == "rnn":
        tensors |= {
            "markov_head.joint_proj.weight": make(3 * rank, 2 * rank + H), "markov_head.joint_proj.bias": make(3 * rank)
        }  # fmt: skip
    if form.startswith("dflash2"):
        for i in range(layers):
            for conv in ("attention_conv", "mlp_conv"):
                tensors |= {
                    f"layers.{i}.{conv}.base_kernel": make(2, 2, H) + torch.tensor([1.0, 0]).view(1, 2, 1),
                    f"layers.{i}.{conv}.kernel_projection.weight": make(2 * 2 * H // 8, H),
                }
        tensors |= {f"candidate_selector.{part}_codebook": make(V, 6) for part in ("predecessor", "successor")}
        tensors["candidate_selector.hidden_projection.weight"] = make(6, H)
    if form == "domino":
        tensors |= {"prefix_gru.weight_ih_l0": make(3 * GRU, H), "prefix_gru.weight_hh_l0": make(3 * GRU, GRU)}
        tensors |= {"embed_proj.0.weight": make(6, H + GRU), "embed_proj.2.weight": make(V, 6)}
    if confidence:
        read = rank if changes.get("confidence_head_with_markov", True) else 0
        tensors |= {"confidence_head.proj.weight": make(1, H + read), "confidence_head.proj.bias": make(1)}
    if draft < V:
        kept = make.kept(draft)
        tensors |= {"lm_head.weight": make(draft, H), "d2t": kept - torch.arange(draft)}
        tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill_(0, kept, True)
    if form == "deepspec":
        tensors["embed_tokens.weight"] = base.get_input_embeddings().weight.detach().clone()
        tensors["lm_head.weight"] = base.get_output_embeddings().weight.detach().clone()
    config, marked = CONFIGS[form](layers, draft), marks(form, rank, confidence, markov)
    nested = marked if form == "specforge" else {}
    config |= {} if nested else marked
    inner = {**config.get("dflash_config", {}), **nested, **changes.pop("inner", {})}
    if inner:
        config["dflash_config"] = {k: v for k, v in inner.items() if v is not None}
    return write(folder, {k: v for k, v in {**config, **changes}.items() if v is not None}, tensors)


def marks(form, rank, confidence, markov):
    if form not in MARKED:
        return {}
    return {
        "markov_rank": rank, "markov_head_type": markov, "enable_confidence_head": confidence,
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
    "dflash2": lambda layers, draft: qwen3(
        layers,
        "DFlash2DraftModel",
        block_size=None,
        is_causal=False,
        dflash_config={**OUTPUTS, **SELECTOR, "block_size": SLOTS},
    ),
    "dflash2-sp": lambda layers, draft: {**speculators("dflash2", "DFlash2")(layers, draft), **SELECTOR},
    "domino": lambda layers, draft: qwen3(
        layers,
        "DominoDraftModel",
        emb_dim=6,
        auto_map={"AutoModel": "domino.DominoDraftModel"},
        dflash_config={
            **OUTPUTS,
            "projector_type": "domino",
            "pure_draft_prefix_len": 1,
            "emb_dim": 6,
            "gru_hidden_dim": GRU,
            "shift_label": True,
        },
    ),
    "normalised": lambda layers, draft: qwen3(
        layers, "Qwen3DSparkModel", dflash_config={**OUTPUTS, "projector_type": "dspark"}
    ),
}


def projected(tensors, name, x):
    return x @ tensors[f"{name}weight"].T + tensors.get(f"{name}bias", 0)


def logits(
    tensors, form, states, embed, lm_head, tokens, drafted, predicts_next=None, rope=PLAIN, windows=None, causal=(),
    cut=lambda u: u,
):  # fmt: skip
    """Draft logits (Vd,) of the tokens after the root and after each drafted one, by one block.

    states: the base's hidden_states, each (T, H), of the T tokens before the root; tokens (T + 1,): those and the root;
    predicts_next: slot j, at the root's position + j, predicts the token after its position (DSpark), or else its own.
    windows, causal: by layer, how many positions a slot attends, its own included (None: all), and whether later ones
    are hidden.
    cut: scales and caps a slot's own logits.
    """
    predicts_next = form in (*MARKED, "domino") if predicts_next is None else predicts_next
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
        read, convolve = convolved(tensors, f"{prefix}attention_conv.", read)
        both = torch.cat([context, read])
        q = projected(tensors, f"{prefix}self_attn.q_proj.", read).view(SLOTS, HEADS, HEAD_DIM)
        k, v = (projected(tensors, f"{prefix}self_attn.{m}_proj.", both) for m in "kv")
        queries = rotated(rms(q, norms["q"]).transpose(0, 1), here, rope)
        keys = rotated(rms(k, norms["k"]).unsqueeze(0), torch.arange(len(both)), rope)[0]
        weights = (queries @ keys.T / HEAD_DIM**0.5).masked_fill(~seen, -torch.inf).softmax(-1)
        x = x + convolve(projected(tensors, f"{prefix}self_attn.o_proj.", (weights @ v).transpose(0, 1).flatten(1)))
        read = rms(x, tensors[f"{prefix}post_attention_layernorm.weight"])
        read, convolve = convolved(tensors, f"{prefix}mlp_conv.", read)
        x = x + convolve(mlp(tensors, prefix, read))
        layer += 1
    outputs = rms(x, tensors["norm.weight"])[0 if predicts_next else 1 :]
    before = torch.tensor([int(tokens[-1]), *drafted])
    outputs = outputs[: len(before)]
    return list(after_path(tensors, outputs, cut(outputs @ lm_head.T), before, embed))


def convolved(tensors, prefix, x):
    """A sublayer's input (SLOTS, H), convolved, and what convolves its output: DFlash 2's, tap 0 the slot itself."""
    if f"{prefix}base_kernel" not in tensors:
        return x, lambda y: y
    base = tensors[f"{prefix}base_kernel"]
    delta = (x @ tensors[f"{prefix}kernel_projection.weight"].T).view(len(x), 2, base.shape[1], -1, 1)
    kernels = base.view(1, 2, base.shape[1], delta.shape[3], -1) + delta
    kernels = kernels.flatten(3)  # (SLOTS, 2, taps, H)

    def convolve(side, y):
        padded = torch.cat([torch.zeros(1, y.shape[1]), y])
        return kernels[:, side, 0] * padded[1:] + kernels[:, side, 1] * padded[:-1]

    return convolve(0, x), lambda y: convolve(1, y)


def after_path(tensors, outputs, found, before, embed):
    """What the tokens before add to the logits (D, Vd) of slots with outputs (D, H)."""
    if "candidate_selector.successor_codebook" in tensors:
        best, ids = found.topk(SELECTOR["selector_top_k"])
        gate = tensors["candidate_selector.predecessor_codebook"][before]
        gate = gate * (outputs @ tensors["candidate_selector.hidden_projection.weight"].T)
        pairs = torch.einsum("dr,dcr->dc", gate, tensors["candidate_selector.successor_codebook"][ids])
        return torch.full_like(found, -torch.inf).scatter(1, ids, best + pairs)
    if "prefix_gru.weight_ih_l0" in tensors:
        gru = torch.nn.GRU(H, GRU, bias=False)
        gru.load_state_dict({n[11:]: t for n, t in tensors.items() if n.startswith("prefix_gru.")})
        with torch.no_grad():
            states = gru(embed[before].unsqueeze(1))[0][:, 0]
        read = torch.cat([outputs, states], 1) @ tensors["embed_proj.0.weight"].T
        added = torch.nn.functional.silu(read) @ tensors["embed_proj.2.weight"].T
        return torch.cat([found[:1], (found + added)[1:]])  # pure_draft_prefix_len 1
    if "markov_head.markov_w1.weight" not in tensors:
        return found
    own, w2 = tensors["markov_head.markov_w1.weight"][before], tensors["markov_head.markov_w2.weight"]
    if "markov_head.gate_proj.weight" in tensors:
        own = own * torch.sigmoid(projected(tensors, "markov_head.gate_proj.", torch.cat([outputs, own], 1)))
    if "markov_head.joint_proj.weight" in tensors:
        state, said = torch.zeros(own.shape[1]), []
        for e, h in zip(own, outputs, strict=True):
            gate, candidate, out = projected(tensors, "markov_head.joint_proj.", torch.cat([state, e, h])).chunk(3)
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
            said.append(out.tanh())
        own = torch.stack(said)
    return found + own @ w2.T
