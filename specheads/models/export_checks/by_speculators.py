"""Loads an export with speculators' from_pretrained, and compares every tensor with the file."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from specheads.models.export_checks.by_transformers import llama
from specheads.models.export_checks.comparison import compare_tensors

if TYPE_CHECKING:
    from specheads.models.spec_model import SpecModel


def check(folder: Path, model: SpecModel) -> str:
    from speculators import SpeculatorModel

    program = f"speculators {version('speculators')}"
    loaded = SpeculatorModel.from_pretrained(str(folder), attn_implementation="eager")
    found = (
        f"{program} loads it, with the values of all {compare_tensors(program, folder, loaded.state_dict())} tensors"
    )
    if model.head.config.kind != "eagle3":  # other kinds have Qwen3's block, not Llama's
        return found
    return f"{found}, {llama(program, folder, loaded.config.transformer_layer_config, model.head.config)}"
