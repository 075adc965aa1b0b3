"""ModelOpt's names for converting, saving and restoring: `import specheads.compat.modelopt as mtsp`, and as mto.

As in ModelOpt, convert() and restore() change the given object and return it. `config` has the default configs,
`plugins` the models and the validation of acceptance.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel

from specheads.compat.modelopt import config, plugins
from specheads.compat.modelopt.acceptance import AcceptanceRateValidation, HFARValidation
from specheads.compat.modelopt.config import EAGLE1_DEFAULT_CFG, EAGLE3_DEFAULT_CFG, read_mode
from specheads.compat.modelopt.in_place import transform
from specheads.compat.modelopt.plugins import HFEagleModel, HFMedusaModel, HFModel, of_kind
from specheads.decoding.verify.hf_base import text_config, unwrapped
from specheads.models.config import SpecConfig
from specheads.models.convert import convert as convert_native
from specheads.models.convert import load_head
from specheads.models.spec_model import SpecModel

__all__ = [
    "EAGLE1_DEFAULT_CFG", "EAGLE3_DEFAULT_CFG", "AcceptanceRateValidation", "HFARValidation", "HFEagleModel",
    "HFMedusaModel", "config", "convert", "enable_huggingface_checkpointing", "export_hf_checkpoint",
    "is_master", "plugins", "print_rank_0", "restore", "save",
]  # fmt: skip


def convert(model: PreTrainedModel, mode: Any) -> SpecModel:
    """Give `model` a head and return it: the same object, now a SpecModel whose `base` is the former model.

    mode: "medusa", "eagle" (EAGLE-3) or "eagle1"; [(mode, config)]; or {"algorithm": mode, "config": config}.
    On ValueError `model` is unchanged.
    """

    def make(base: Any) -> SpecModel:
        kind, options = read_mode(mode, text_config(unwrapped(base)))
        return of_kind(convert_native(base, kind, **options))

    return transform(model, make)


def save(model: SpecModel, f: str | Path) -> None:
    """Save the head alone in the folder `f`."""
    if not isinstance(model, SpecModel):
        raise ValueError(f"this {type(model).__name__} has no head to save; convert() it first")
    model.save_pretrained(_path(f))


def restore(model: PreTrainedModel, f: str | Path) -> SpecModel:
    """Give `model` the head saved in the folder `f`, and return it: the same object, changed as by convert()."""
    return transform(model, lambda base: of_kind(load_head(base, _path(f), dtype="auto")))


def _path(f: Any) -> str | Path:
    if not isinstance(f, str | Path):
        raise ValueError(f"a head is saved in a folder: give its path, not a {type(f).__name__}")
    return f


def enable_huggingface_checkpointing() -> None:
    """Make AutoModelForCausalLM load a saved head with its base, as convert() returns them, for further training."""
    AutoModelForCausalLM.register(SpecConfig, HFModel, exist_ok=True)


def export_hf_checkpoint(model: SpecModel, dtype: Any = None, *, export_dir: str | Path) -> None:
    """Save the head in a folder in the format that ModelOpt writes for TensorRT-LLM. Only EAGLE-3."""
    model.export(export_dir, "modelopt", dtype=dtype)


def is_master() -> bool:
    """Is this the main process of a run?"""
    return not dist.is_initialized() or dist.get_rank() == 0


def print_rank_0(*values: Any) -> None:
    """print(), in the main process of a run only."""
    if is_master():
        print(*values)
