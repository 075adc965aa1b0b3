"""Hydra as its repository writes it: hydra_mlp (one network a head), hydra_lm_head, Hydra++'s prefix_embeding_layer.

Two of its head architectures are read: mlp, and prefix-mlp (Hydra++), where Dropout layers take every other index. A
head's second and later blocks are one shared module, so they are equal. No server reads this format.
Shapes: K heads, L blocks a head, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specheads.decoding.verify.hf_base import text_config
from specheads.heads import HydraConfig
from specheads.heads.layers.rope import rope_of
from specheads.models.files import CheckpointError
from specheads.models.formats.files import Files
from specheads.models.formats.format import Format, count, scaled_embeddings
from specheads.models.formats.keys.config_table import flag, whole
from specheads.models.formats.medusa.medusa import (
    OF_THE_BASE,
    full_vocabulary,
    refuse_other_counts,
    refuse_other_sizes,
    tap_refusals,
    vocabulary_refusals,
)
from specheads.models.formats.parts.decoder import act_refusals, block_names
from specheads.models.formats.parts.positions import LINEAR
from specheads.models.formats.parts.windows import window_refusals
from specheads.models.formats.serving import base_name
from specheads.options import shown

_PREFIX = "prefix_embeding_layer."  # sic
_SIZES = (
    "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps", "rope_parameters",
)  # fmt: skip


@dataclass(frozen=True)
class Hydra(Format):
    kind: ClassVar[str] = HydraConfig.kind
    config_keys: ClassVar[tuple[str, ...]] = ("hydra_num_heads",)
    ignored: ClassVar[frozenset[str]] = OF_THE_BASE
    engine: str = "hydra"
    weights: str = "hydra_lm_head.pt"
    title: str = "Hydra (its repository's format)"
    versions: str = "zankner/Hydra (main)"
    serving: str = """\
```bash
python -m hydra.inference.cli --model $folder_arg
```
"""
    embeds: bool | None = None

    def recognises(self, files: Files) -> bool:
        assert files.weights is not None
        return "hydra_num_heads" in files.config or files.weights.name.startswith("hydra_")

    def options(self, files: Files, base: PreTrainedModel) -> dict[str, Any]:
        config, names = files.config, files.shapes
        prefix = any(name.startswith(_PREFIX) for name in names)
        arch = config.get("hydra_head_arch", "prefix-mlp" if prefix else "mlp")
        if arch != ("prefix-mlp" if prefix else "mlp"):
            raise CheckpointError(
                f"{files}: its heads are {shown(arch)}; mlp and prefix-mlp, with its tensors, are read"
            )
        if not flag(config, "grounded_heads", default=True):
            raise CheckpointError(f"{files}: grounded_heads=false; heads here read the tokens drafted before them")
        if offset := whole(config, "hidden_state_offset", 0, least=0):
            raise CheckpointError(
                f"{files}: hidden_state_offset={offset}; heads of this format are read only if they read the output of "
                "the final norm, which is 0"
            )
        if prefix and (wrong := _positions(base)):
            raise CheckpointError(f"{files}: {wrong}")
        refuse_other_sizes(files, config, base)
        heads, layers = count(files, "hydra_mlp."), count(files, "hydra_mlp.0.")
        refuse_other_counts(files, config, {"hydra_num_heads": heads, "hydra_num_layers": layers})
        base_config = text_config(base)
        return {
            "num_heads": heads, "num_layers": layers, "prefix_layer": prefix,
            "hidden_size": base_config.hidden_size, "vocab_size": base_config.vocab_size,
            "draft_vocab_size": base_config.vocab_size,
        }  # fmt: skip

    def names(self, head: HydraConfig, stored: Collection[str] = ()) -> dict[str, str]:
        names: dict[str, str] = {}
        for i in range(head.num_heads):
            for j in range(head.num_layers):
                theirs = f"hydra_mlp.{i}.{2 * j + 1 if head.prefix_layer else j}."
                for part in ("linear", "res_connection")[: 1 if j else 2]:
                    names |= {f"blocks.{i}.{j}.{part}.{w}": f"{theirs}{part}.{w}" for w in ("weight", "bias")}
            theirs = f"hydra_lm_head.{i}.1." if head.prefix_layer else f"hydra_lm_head.{i}."
            names |= {f"lm_heads.{i}.{w}": f"{theirs}{w}" for w in ("weight", "bias")}
        if head.prefix_layer:
            layer = f"{_PREFIX}layers.0."
            block = block_names(head, 0, layer)
            names |= {f"prefix.block.{ours.removeprefix('blocks.0.')}": theirs for ours, theirs in block.items()}
            names["prefix.input_layernorm.weight"] = f"{layer}input_layernorm.weight"
            names["prefix.norm.weight"] = f"{_PREFIX}norm.weight"
        return names

    def translate(self, files: Files, head: HydraConfig, base: PreTrainedModel) -> tuple[dict[str, Tensor], set[str]]:
        # The prefix layer is a complete one-layer model whose inputs are vectors: its embeddings are never used.
        return full_vocabulary(head), {
            f"{_PREFIX}embed_tokens.weight",
            f"{_PREFIX}layers.0.self_attn.rotary_emb.inv_freq",
        }

    def refusals(self, head: HydraConfig, tensors: dict[str, Tensor], base: PreTrainedModel) -> list[str]:
        wrong = tap_refusals(head, base) + scaled_embeddings(base) + vocabulary_refusals(head)
        later = [
            (i, j, w) for i in range(head.num_heads) for j in range(2, head.num_layers) for w in ("weight", "bias")
        ]
        if any(
            not torch.equal(tensors[f"blocks.{i}.{j}.linear.{w}"], tensors[f"blocks.{i}.1.linear.{w}"])
            for i, j, w in later
        ):
            wrong.append("its later blocks of a head differ, and one module is read for all of them")
        if head.prefix_layer:
            usual = HydraConfig(prefix_layer=True).with_base_defaults(text_config(base))
            if other := [name for name in _SIZES if getattr(head, name) != getattr(usual, name)]:
                wrong.append(f"its prefix layer has {', '.join(other)} of its own, and the base's is read")
            if head.attention_bias or head.mlp_bias:
                wrong.append("its prefix layer has biases, which are dropped")
            wrong += [unread] if (unread := _positions(base)) else LINEAR.refusals(head)
        return wrong + act_refusals(head) + window_refusals(head, readers=False)

    def config(self, head: HydraConfig, tensors: dict[str, Tensor], base: PreTrainedModel) -> dict[str, Any]:
        return {
            "base_model_name_or_path": base_name(base), "hydra_num_heads": head.num_heads,
            "hydra_num_layers": head.num_layers, "hydra_head_arch": "prefix-mlp" if head.prefix_layer else "mlp",
            "grounded_heads": True, "hidden_state_offset": 0,
        }  # fmt: skip


def _positions(base: PreTrainedModel) -> str:
    """Why a prefix layer here cannot use the base's rotary positions, as this format's layers do; "" if it can."""
    try:
        rope_of(text_config(base))
    except ValueError as error:
        return f"its prefix layer is read with the base's positions, which heads here cannot have: {error}"
    return ""


FORMATS = (Hydra(),)
