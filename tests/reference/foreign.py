"""Heads as other programs write them, and what they draft: plain torch after docs of those programs, no specheads.

Written apart from the library, so that its reader is not tested against its own writer. Each writer makes a tiny random
checkpoint in a folder and returns its tensors; each forward gives draft logits (Vd,) for a chain of drafted tokens.
V vocabulary, Vd draft vocabulary, H hidden, n layers of the base, T tokens so far.
"""

from __future__ import annotations

import json

import torch
from safetensors.torch import save_file
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from tests.reference.foreign_rope import frequencies

V, H, N = 97, 32, 8  # those of conftest.tiny_llama
HEADS, KV_HEADS, HEAD_DIM, INNER, EPS, THETA = 2, 1, 12, 40, 1e-3, 500.0  # not those of the base
LLAMA = {
    "model_type": "llama", "hidden_size": H, "intermediate_size": INNER, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "num_hidden_layers": 1, "hidden_act": "silu",
    "rms_norm_eps": EPS, "vocab_size": V, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "tie_word_embeddings": False, "rope_theta": THETA,
}  # fmt: skip


class Random:
    """Tensors on a seed, of a scale at which every part of a head moves its logits."""

    def __init__(self, seed=11):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape, scale=0.3):
        return torch.randn(shape, generator=self.generator) * scale

    def norm(self, size):
        return 1 + self(size)

    def kept(self, count):
        """Sorted ids (count,) of a draft vocabulary."""
        return torch.randperm(V, generator=self.generator)[:count].sort().values


def write(folder, config, tensors, name="model.safetensors"):
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if name.endswith(".safetensors"):
        save_file(tensors, folder / name)
    else:
        torch.save(tensors, folder / name)
    return tensors


def block(make, prefix, width):
    """A Llama block whose attention reads `width` values."""
    wide, narrow = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    return {
        f"{prefix}self_attn.q_proj.weight": make(wide, width), f"{prefix}self_attn.k_proj.weight": make(narrow, width),
        f"{prefix}self_attn.v_proj.weight": make(narrow, width), f"{prefix}self_attn.o_proj.weight": make(H, wide),
        f"{prefix}mlp.gate_proj.weight": make(INNER, H), f"{prefix}mlp.up_proj.weight": make(INNER, H),
        f"{prefix}mlp.down_proj.weight": make(H, INNER),
        f"{prefix}post_attention_layernorm.weight": make.norm(H),
    }  # fmt: skip


# --- EAGLE-3 ---


def eagle3_tensors(prefix, features=3, draft=40):
    make = Random()
    kept = make.kept(draft)
    tensors = {
        **block(make, prefix, 2 * H), f"{prefix}hidden_norm.weight": make.norm(H),
        f"{prefix}input_layernorm.weight": make.norm(H), "fc.weight": make(H, features * H),
        "norm.weight": make.norm(H), "lm_head.weight": make(draft, H),
    }  # fmt: skip
    if draft < V:
        tensors["d2t"] = kept - torch.arange(draft)
        tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill_(0, kept, True)
    return tensors


def eagle3(folder, form="eagle", *, draft=40, embed=None, **changes):
    """form: who wrote it. changes: to its config, None taking a key away."""
    top, nested = changes.pop("top", None), changes.pop("nested", None)
    features = len(top or nested or (0, 0, 0))
    config = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": draft}
    name, prefix = "model.safetensors", "midlayer."
    if form == "eagle":
        name = "pytorch_model.bin"
    elif form == "vllm":
        prefix = "layers.0."
    elif form == "modelopt":
        prefix = "layers.0."
        flags = {"use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True}
        config["eagle_config"] = {**flags, "use_mtp_layernorm": False, "next_layer_regular": True}
        nested = nested or [1, N // 2 - 1, N - 4]
    elif form == "speculators":
        prefix = "layers.0."
        inner = {k: v for k, v in LLAMA.items() if k not in ("rope_theta", "tie_word_embeddings")}
        flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "embed_requires_grad")
        config = {
            "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "speculators_version": "0.9.0",
            "draft_vocab_size": draft, "target_hidden_size": None, **dict.fromkeys(flags, False),
            "eagle_aux_hidden_state_layer_ids": top, "tie_word_embeddings": False,
            "transformer_layer_config": {
                **inner, "rope_parameters": {"rope_theta": THETA, "rope_type": "default"}, "attention_bias": False,
            },
            "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": None, "architectures": []}},
        }  # fmt: skip
        top = None
    if top:
        config["eagle_aux_hidden_state_layer_ids"] = top
    if nested:
        config.setdefault("eagle_config", {})["eagle_aux_hidden_state_layer_ids"] = nested
    config = {k: v for k, v in {**config, **changes}.items() if v is not None}
    tensors, make = eagle3_tensors(prefix, features, draft), Random(16)
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": make.norm(H) for i in range(features)}
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = make.norm(features * H)
    if form == "modelopt":
        tensors.pop("t2d", None)
    if embed is not None:
        tensors["embed_tokens.weight"] = embed.clone()
    return write(folder, config, tensors, name)


def peagle(folder, form, *, layers=2, draft=40, mask=9, **changes):
    """form: vllm (whose keys Amazon's published heads have), automodel (NeMo's), specforge, speculators. With trained
    embeddings, as its trainers make them."""
    make = Random(40)
    tensors = eagle3_tensors("layers.0.", draft=draft)
    for i in range(1, layers):
        tensors |= block(make, f"layers.{i}.", H) | {f"layers.{i}.input_layernorm.weight": make.norm(H)}
    tensors |= {"mask_hidden": make(1, 1, 3 * H), "embed_tokens.weight": make(V, H, scale=1.0)}
    config = {**LLAMA, "num_hidden_layers": layers, "draft_vocab_size": draft, "norm_before_residual": False}
    if form == "vllm":
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "parallel_drafting": True, "ptd_token_id": mask}
    elif form == "specforge":
        config["architectures"] = ["PEagleDraftModel"]  # the token is among the options of its training alone
    elif form == "automodel":
        config |= {"architectures": ["LlamaEagle3DraftModel"], "mask_token_id": mask, "parallel_drafting": True}
        bare = ("lm_head.weight", "d2t", "t2d")
        tensors = {name if name in bare else f"model.{name}": tensor for name, tensor in tensors.items()}
    else:
        inner = {k: v for k, v in LLAMA.items() if k not in ("rope_theta", "tie_word_embeddings")}
        rope = {"rope_theta": THETA, "rope_type": "default"}
        flags = dict.fromkeys(("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"), False)
        config = {
            "architectures": ["PEagleDraftModel"], "speculators_model_type": "peagle", "speculators_version": "0.9.0",
            "draft_vocab_size": draft, "mask_token_id": mask, "embed_requires_grad": True, "target_hidden_size": None,
            **flags, "eagle_aux_hidden_state_layer_ids": None, "tie_word_embeddings": False,
            "transformer_layer_config": {**inner, "num_hidden_layers": layers, "rope_parameters": rope},
            "speculators_config": {"algorithm": "peagle", "verifier": {"name_or_path": None, "architectures": []}},
        }  # fmt: skip
    return write(folder, {k: v for k, v in {**config, **changes}.items() if v is not None}, tensors)


def rms(x, weight):
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight


PLAIN = {"rope_type": "default", "rope_theta": THETA}


def rotated(x, position, rope=PLAIN):
    """x (heads, T, d) in Llama's halves at positions (T,); with partial_rotary_factor that share of it, the first."""
    width = int(HEAD_DIM * rope.get("partial_rotary_factor", 1))
    half, x, rest = width // 2, x[..., :width], x[..., width:]
    angles, factor = frequencies(rope, width)
    angle = position.float().unsqueeze(1) * torch.tensor(angles)
    cos, sin = angle.cos() * factor, angle.sin() * factor
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


class Attention:
    """One layer that remembers keys and values of the chain so far."""

    def __init__(self, tensors, prefix, rope=PLAIN, window=None):
        self.w = {m: tensors[f"{prefix}self_attn.{m}_proj.weight"] for m in "qkvo"}
        self.b = {m: tensors.get(f"{prefix}self_attn.{m}_proj.bias", 0) for m in "qkvo"}
        self.rope, self.window = rope, window
        self.norms = [tensors.get(f"{prefix}self_attn.{m}_norm.weight") for m in "qk"]
        self.keys, self.values, self.length = [], [], 0

    def __call__(self, x):
        """x (T, width): T more positions, each seeing those before it and itself → (T, H)."""
        position = torch.arange(self.length, self.length + len(x))
        heads = {m: (x @ self.w[m].T + self.b[m]).view(len(x), -1, HEAD_DIM).transpose(0, 1) for m in "qkv"}
        for m, norm in zip("qk", self.norms, strict=True):
            heads[m] = heads[m] if norm is None else rms(heads[m], norm)
        self.keys.append(rotated(heads["k"], position, self.rope))
        self.values.append(heads["v"])
        self.length += len(x)
        keys, values = torch.cat(self.keys, 1)[0], torch.cat(self.values, 1)[0]  # one KV head for all
        scores = rotated(heads["q"], position, self.rope) @ keys.T / HEAD_DIM**0.5
        seen = torch.arange(self.length) <= position.unsqueeze(1)
        if self.window is not None:
            seen &= torch.arange(self.length) > position.unsqueeze(1) - self.window
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return (weights @ values).transpose(0, 1).flatten(1) @ self.w["o"].T + self.b["o"]


class LatentAttention:
    """The same for latent attention (MLA), by transformers' own DeepSeek-V3 layer, over the whole chain each time."""

    def __init__(self, tensors, prefix, rope=PLAIN):
        start = f"{prefix}self_attn."
        own = {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
        rank = own["kv_b_proj.weight"].shape[1]
        turned = own["kv_a_proj_with_mqa.weight"].shape[0] - rank
        queries = own["q_a_proj.weight"].shape[0] if "q_a_proj.weight" in own else None
        value = own["o_proj.weight"].shape[1] // HEADS
        plain = own["kv_b_proj.weight"].shape[0] // HEADS - value
        config = DeepseekV3Config(
            hidden_size=H, num_attention_heads=HEADS, num_key_value_heads=HEADS, q_lora_rank=queries, v_head_dim=value,
            kv_lora_rank=rank, qk_rope_head_dim=turned, qk_nope_head_dim=plain,
            rope_parameters=dict(rope), max_position_embeddings=2048, attn_implementation="eager",
        )  # fmt: skip
        self.layer, self.rotary = DeepseekV3Attention(config, 0), DeepseekV3RotaryEmbedding(config)
        for name in ("q_proj", "q_a_proj", "kv_a_proj_with_mqa"):  # which read a wider input here
            if f"{name}.weight" in own:
                rows, width = own[f"{name}.weight"].shape
                setattr(self.layer, name, torch.nn.Linear(width, rows, bias=False))
        for module in self.layer.modules():
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon = EPS
        self.layer.load_state_dict(own)
        self.inputs = []

    @torch.no_grad()
    def __call__(self, x):
        self.inputs.append(x)
        every = torch.cat(self.inputs).unsqueeze(0)
        count = every.shape[1]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        turns = self.rotary(every, torch.arange(count).unsqueeze(0))
        return self.layer(every, turns, mask)[0][0, -len(x) :]


def attention_of(tensors, prefix, rope, window=None):
    if f"{prefix}self_attn.kv_b_proj.weight" in tensors:
        return LatentAttention(tensors, prefix, rope)
    return Attention(tensors, prefix, rope, window)


def mlp(tensors, prefix, x, act=torch.nn.functional.silu):
    w = {m: tensors[f"{prefix}mlp.{m}_proj.weight"] for m in ("gate", "up", "down")}
    return (act(x @ w["gate"].T) * (x @ w["up"].T)) @ w["down"].T


def eagle3_logits(
    tensors, prefix, states, layers, embed, tokens, drafted, flags=(), rope=PLAIN, later=(), output=None, windows=(),
    act=torch.nn.functional.silu, mask=None,
):  # fmt: skip
    """Draft logits (Vd,) after the root, and after each drafted token.

    states: the base's hidden_states, each (T, H), of the T tokens before the root; layers: which are fused; tokens
    (T + 1,): those and the root; flags: those of the config that are true; rope: its positions; later: how the names
    of further blocks begin; output: the base's output matrix (V, H), where the head has none; windows: how many
    positions each block attends, its own included, None for all; mask: P-EAGLE's token.
    """
    first, *others = windows or [None] * (1 + len(later))
    attend = attention_of(tensors, prefix, rope, first)
    more = [(each, attention_of(tensors, each, rope, size)) for each, size in zip(later, others, strict=True)]
    output = tensors.get("lm_head.weight", output)

    def fuse(features):
        """One (T, H) of each layer → (T, H)."""
        if "fc_norm" in flags:
            features = [rms(state, tensors[f"fc_norm.{i}.weight"]) for i, state in enumerate(features)]
        fused = torch.cat(features, -1)
        if "norm_before_fc" in flags:
            fused = rms(fused, tensors["input_norm.weight"])
        return fused @ tensors["fc.weight"].T

    def step(tokens, hidden):
        x = [
            rms(embed[tokens], tensors[f"{prefix}input_layernorm.weight"]),
            rms(hidden, tensors[f"{prefix}hidden_norm.weight"]),
        ]
        hidden = (x[1] if "norm_before_residual" in flags else hidden) + attend(torch.cat(x, -1))
        hidden = hidden + mlp(tensors, prefix, rms(hidden, tensors[f"{prefix}post_attention_layernorm.weight"]), act)
        for each, attention in more:
            norm = tensors[
                next(n for n in (f"{each}hidden_norm.weight", f"{each}input_layernorm.weight") if n in tensors)
            ]
            hidden = hidden + attention(rms(hidden, norm))
            hidden = hidden + mlp(tensors, each, rms(hidden, tensors[f"{each}post_attention_layernorm.weight"]))
        return hidden

    hidden = step(tokens[1:], fuse([states[i] for i in layers]))[-1:]
    logits = [rms(hidden[-1], tensors["norm.weight"]) @ output.T]
    for token in drafted:
        if mask is not None:
            token, hidden = mask, fuse(tensors["mask_hidden"].reshape(1, -1).chunk(len(layers), -1))
        hidden = rms(hidden, tensors["norm.weight"]) if "norm_output" in flags else hidden
        hidden = step(torch.tensor([token]), hidden)
        logits.append(rms(hidden[-1], tensors["norm.weight"]) @ output.T)
    return logits


# --- EAGLE-1 ---


def eagle(folder, form="eagle", *, embed, bias=True, **changes):
    make = Random(12)
    tensors = {
        **block(make, "layers.0.", H), "fc.weight": make(H, 2 * H), "embed_tokens.weight": embed.clone(),
        "fc.bias": make(H) if bias else torch.zeros(H),
    }  # fmt: skip
    config = {**LLAMA, "architectures": ["LlamaForCausalLM"]}
    name = "pytorch_model.bin" if form == "eagle" else "model.safetensors"
    if form == "vllm":
        config["bias"] = False
        del tensors["fc.bias"], tensors["embed_tokens.weight"]
    if form == "sglang":
        config |= {"architectures": ["LlamaForCausalLMEagle"]} | ({} if bias else {"bias": False})
    return write(folder, {k: v for k, v in {**config, **changes}.items() if v is not None}, tensors, name)


def speculators_eagle(folder, embed, *, bias=False, **changes):
    """As the converter of speculators 0.1 and 0.2 made of an EAGLE-1 checkpoint."""
    make = Random(12)
    tensors = {f"transformer.{name}": tensor for name, tensor in block(make, "", H).items()}
    tensors |= {"fusion_fc.weight": make(H, 2 * H), "embed_tokens.weight": embed.clone()}
    if bias:
        tensors["fusion_fc.bias"] = make(H)
    config = {
        "architectures": ["EagleSpeculator", "LlamaDecoderLayer"], "speculators_model_type": "eagle",
        "speculators_version": "0.1.0", "fusion_bias": bias, "layernorms": False,
        "transformer_layer_architecture": "LlamaDecoderLayer", "transformer_layer_config": dict(LLAMA),
        "speculators_config": {"algorithm": "eagle", "verifier": {"name_or_path": None, "architectures": []}},
    }  # fmt: skip
    return write(folder, config | changes, tensors)


def eagle_logits(tensors, states, embed, lm_head, tokens, drafted, rope=PLAIN):
    """As eagle3_logits: the base's output matrix (V, H) on one block without norms at its two ends."""
    attend, prefix = Attention(tensors, "layers.0.", rope), "layers.0."
    hidden = states[-1]  # after the final norm

    def step(tokens, hidden):
        x = torch.cat([embed[tokens], hidden], -1) @ tensors["fc.weight"].T + tensors.get("fc.bias", 0)
        x = x + attend(x)
        return x + mlp(tensors, prefix, rms(x, tensors[f"{prefix}post_attention_layernorm.weight"]))

    hidden = step(tokens[1:], hidden)[-1:]
    logits = [hidden[-1] @ lm_head.T]
    for token in drafted:
        hidden = step(torch.tensor([token]), hidden)
        logits.append(hidden[-1] @ lm_head.T)
    return logits


# --- Which layers a consumer reads ---


def layers_read(consumer, config, options=""):
    """hidden_states indices that a consumer of EAGLE-3 feeds the head, of a base with N layers; options: the text of
    TensorRT-LLM's file."""
    nested = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    top = config.get("eagle_aux_hidden_state_layer_ids")
    usual = [2, N // 2, N - 3]
    if consumer == "eagle":  # hard-coded
        return usual
    if consumer in ("vllm", "speculators", "llamacpp"):
        return top or usual
    if consumer in ("sglang", "modelopt"):
        return [i + 1 for i in nested] if nested else usual
    assert consumer == "trtllm"
    found = [line.split(":")[1] for line in options.splitlines() if "eagle3_layers_to_capture" in line]
    return [i + 1 for i in json.loads(found[0])] if found else usual


def norms_read(consumer, config):
    """The flags of eagle3_logits that a consumer finds in a config, in the order of its code: vLLM 0.32, SGLang 0.5.23
    and TensorRT-LLM (main, 00679c66); speculators reads the top alone."""
    inner = config.get("eagle_config", {})
    names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    at_top = {name: config.get(name, False) for name in names}
    found = dict(at_top)
    if consumer in ("sglang", "trtllm"):
        found["norm_before_residual"] = False
    if consumer in ("vllm", "sglang"):
        found["norm_before_fc"] = inner.get("norm_before_fc", at_top["norm_before_fc"])
    if consumer == "trtllm":
        found["norm_before_fc"] = inner.get("norm_before_fc", False)
        found["norm_output"] = inner.get("return_hidden_post_norm", False) or at_top["norm_output"]
    return [name for name, value in found.items() if value]
