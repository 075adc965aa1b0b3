"""Checks an export with a Llama config against transformers, on which every program that reads it relies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specheads.heads.layers.rope import rope_of
from specheads.models.export_checks.comparison import compare_rotary, compare_values, positions_below
from specheads.models.formats.files import Files

if TYPE_CHECKING:
    from specheads.models.spec_model import SpecModel

_SIZES = (
    "hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "rms_norm_eps", "attention_bias", "mlp_bias",
)  # fmt: skip


def check(folder: Path, model: SpecModel) -> str:
    """One line on what was compared; "" if the config is not a Llama's."""
    if (Files(folder).config or {}).get("model_type") != "llama":
        return ""
    program, head = f"transformers {transformers.__version__}", model.head.config
    config = AutoConfig.from_pretrained(folder)
    assert isinstance(config, LlamaConfig)
    return f"{program} reads its config as the head's: {llama(program, folder, config, head)}"


def llama(program: str, folder: Path, config: Any, head: Any) -> str:
    """Compare a Llama config in memory with a head, rotary angles included → what was compared, as text."""
    wanted = {**{name: getattr(head, name) for name in _SIZES}, "num_hidden_layers": head.num_layers}
    found = {name: getattr(config, name, None) for name in wanted}
    compare_values(
        program, folder, {**found, "rope_parameters": rope_of(config)},
        {**wanted, "rope_parameters": head.rope_parameters},
    )  # fmt: skip
    positions = positions_below(2 * config.max_position_embeddings)
    rotary = LlamaRotaryEmbedding(config)
    cos, sin = (t[0].chunk(2, -1)[0] for t in rotary(rotary.inv_freq, positions.unsqueeze(0)))
    return f"{len(wanted)} sizes, {compare_rotary(program, head, positions, cos, sin)}"
