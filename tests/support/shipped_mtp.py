"""Tiny random targets on disk whose checkpoints hold MTP modules, as each family names them. No code of the library."""

import inspect
import json

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

V, H, L = 97, 32, 3
SIZES = {
    "vocab_size": V, "hidden_size": H, "intermediate_size": 48, "num_hidden_layers": L, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.3,
    "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
    "tie_word_embeddings": False, "sliding_window": 8,
}  # fmt: skip
MLA = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 12, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
# Family → config class, more options, the layer whose form the module's has, the modules' names, how many there are.
FAMILIES = {
    "deepseek_v3": ("DeepseekV3Config", {**MLA, "num_nextn_predict_layers": 1}, 2, "deepseek", 1),
    "deepseek_v3, three modules": ("DeepseekV3Config", {**MLA, "num_nextn_predict_layers": 3}, 2, "deepseek", 3),
    "glm4_moe": (
        "Glm4MoeConfig",
        {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "use_qk_norm": True},
        2, "deepseek", 1,
    ),
    "exaone_moe": ("ExaoneMoeConfig", {"n_group": 1, "topk_group": 1}, 0, "qwen", 1),
    "mimo": ("Qwen2Config", {"num_nextn_predict_layers": 2}, 2, "mimo", 2),
    "ernie4_5": ("Ernie4_5Config", {"num_nextn_predict_layers": 1}, 2, "ernie", 1),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            "num_hidden_layers": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
        3, "qwen", 1,
    ),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        {
            "num_hidden_layers": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
        3, "qwen", 1,
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "mamba_num_heads": 4,
            "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8, "moe_shared_expert_intermediate_size": 24,
            "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1,
            "mtp_layers_block_type": ["full_attention", "moe"],
        },
        (2, 3), "nemotron", 1,
    ),
}  # fmt: skip


def names_of(naming, k, layers):
    """Part of a module → its name: embedding norm, hidden norm, projection, prefix of the layer, final norm."""
    n = f"model.layers.{layers + k}."
    return {
        "deepseek": (f"{n}enorm", f"{n}hnorm", f"{n}eh_proj", n, f"{n}shared_head.norm"),
        "qwen": ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", f"mtp.layers.{k}.", "mtp.norm"),
        "mimo": (
            f"model.mtp_layers.{k}.token_layernorm", f"model.mtp_layers.{k}.hidden_layernorm",
            f"model.mtp_layers.{k}.input_proj", f"model.mtp_layers.{k}.", f"model.mtp_layers.{k}.final_layernorm",
        ),
        "ernie": (
            f"model.mtp_emb_norm.{k}", f"model.mtp_hidden_norm.{k}", f"model.mtp_linear_proj.{k}",
            f"model.mtp_block.{k}.", None,
        ),
        "nemotron": (
            "mtp.layers.0.enorm", "mtp.layers.0.hnorm", "mtp.layers.0.eh_proj", ("mtp.layers.0.", "mtp.layers.1."),
            "mtp.layers.1.final_layernorm",
        ),
    }[naming]  # fmt: skip


def config_of(family, **other_sizes):
    name, options, *_ = FAMILIES[family]
    config_class = getattr(transformers, name)
    declared = {*inspect.signature(config_class).parameters, *config_class.attribute_map}
    declared -= {key for key in declared if isinstance(getattr(config_class, key, None), property)}
    sizes = {key: value for key, value in SIZES.items() if key in declared}
    return config_class(**{**sizes, **options, **other_sizes})


def write(folder, family, sharded=True, dtype=torch.float32, **sizes):
    """A target with its modules in `folder`, in two files and an index, or in one. Returns the modules' tensors.

    dtype: of all but the biases that choose experts, which stay in float32, as published. sizes: in place of those
    of this file."""
    _, options, form, naming, count = FAMILIES[family]
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config_of(family, **sizes)).eval()
    target.generation_config.eos_token_id = None
    target.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {name: value for name, value in options.items() if "nextn" in name}
    (folder / "config.json").write_text(json.dumps(config))
    own = load_file(folder / "model.safetensors")
    layers, hidden = target.config.num_hidden_layers, target.config.hidden_size
    modules = {}
    generator = torch.Generator().manual_seed(7)

    def random(shape, scale):
        return torch.randn(shape, generator=generator) * scale

    for k in range(count):
        enorm, hnorm, projection, prefix, norm = names_of(naming, k, layers)
        for name in filter(None, (enorm, hnorm, norm)):
            modules[f"{name}.weight"] = 1 + random((hidden,), 0.3)
        modules[f"{projection}.weight"] = random((hidden, 2 * hidden), 0.2)
        forms, prefixes = (form, prefix) if isinstance(form, tuple) else ((form,), (prefix,))
        for one, start in zip(forms, prefixes, strict=True):  # of a layer's form, with values of its own
            for name, tensor in own.items():
                _, layer, part = name.partition(f".layers.{one}.")
                if layer:
                    values = random(tensor.shape, 0.3) + (1 if tensor.ndim == 1 and "norm" in name else 0)
                    modules[start + part] = values.to(tensor.dtype)
        if naming == "deepseek":  # with copies of the target's matrices, as published
            modules[f"{prefix}embed_tokens.weight"] = own["model.embed_tokens.weight"].clone()
            modules[f"{prefix}shared_head.head.weight"] = own["lm_head.weight"].clone()
    own, modules = (
        {name: t if "correction_bias" in name else t.to(dtype) for name, t in tensors.items()}
        for tensors in (own, modules)
    )
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config))
    if not sharded:
        save_file(own | modules, folder / "model.safetensors", metadata={"format": "pt"})
        return modules
    (folder / "model.safetensors").unlink()
    files = {"model-00001-of-00002.safetensors": own, "model-00002-of-00002.safetensors": modules}
    for name, tensors in files.items():
        save_file(tensors, folder / name, metadata={"format": "pt"})
    index = {tensor: name for name, tensors in files.items() for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return modules


# What speculators' converter calls the parts of Qwen's module, in a file of its own.
SPECULATORS = {
    "mtp.fc.": "mtp_layers.0.input_proj.", "mtp.norm.": "mtp_layers.0.final_layernorm.",
    "mtp.pre_fc_norm_hidden.": "mtp_layers.0.hidden_layernorm.",
    "mtp.pre_fc_norm_embedding.": "mtp_layers.0.token_layernorm.", "mtp.layers.0.": "mtp_layers.0.",
}  # fmt: skip


def write_apart(folder, family):
    """The module of a target of Qwen's naming in a folder of its own, as speculators writes it: one tensor for all
    experts. The target is in folder/target, with its module. Returns the modules' tensors by the names there."""
    modules = write(folder / "target", family)
    named = {}
    for name, tensor in modules.items():
        start = next(each for each in SPECULATORS if name.startswith(each))
        named[SPECULATORS[start] + name.removeprefix(start)] = tensor
    experts = "mtp_layers.0.mlp.experts."
    if f"{experts}0.up_proj.weight" in named:
        number = len([name for name in named if name.startswith(experts) and name.endswith("up_proj.weight")])
        of = {m: [named.pop(f"{experts}{i}.{m}_proj.weight") for i in range(number)] for m in ("gate", "up", "down")}
        named[f"{experts}gate_up_proj"] = torch.stack(
            [torch.cat(pair) for pair in zip(of["gate"], of["up"], strict=True)]
        )
        named[f"{experts}down_proj"] = torch.stack(of["down"])
    verifier = {"name_or_path": str(folder / "target"), "architectures": []}
    config = {
        "architectures": ["MTPDraftModel"], "speculators_model_type": "mtp", "speculators_version": "0.9.0",
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": json.loads((folder / "target" / "config.json").read_text()),
        "speculators_config": {
            "algorithm": "mtp", "default_proposal_method": "greedy", "verifier": verifier,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    return modules
