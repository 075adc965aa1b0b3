"""ModelOpt's names for converting, saving and restoring: `import specheads.compat.modelopt as mtsp`, and as mto.

A base is not changed in place: convert() and restore() return the model with the head, and the base stays as it was.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

import specheads
from specheads.convert import load_head
from specheads.spec_model import SpecModel

# ModelOpt's "eagle" is EAGLE-3 unless its config says otherwise.
_MODES = {"eagle": "eagle3", "eagle1": "eagle", "medusa": "medusa", "eagle3": "eagle3"}


def convert(model: PreTrainedModel, mode: Any) -> SpecModel:
    """mode: "medusa", "eagle" (EAGLE-3) or "eagle1"; [(mode, config)]; or {"algorithm": mode, "config": config}."""
    config: dict[str, Any] = {}
    if isinstance(mode, dict):
        if unknown := set(mode) - {"algorithm", "config"}:
            raise ValueError(f"mode has {', '.join(sorted(unknown))}; expected algorithm and config")
        mode, config = mode["algorithm"], mode.get("config") or {}
    elif not isinstance(mode, str):
        if len(mode) != 1 or len(mode[0]) != 2:
            raise ValueError(f"mode={mode!r} must be a name or [(name, config)], of one head")
        mode, config = tuple(mode[0])
    if mode not in _MODES:
        raise ValueError(f"unknown mode {mode!r}; known: {', '.join(_MODES)}")
    return specheads.convert(model, _MODES[str(mode)], **config)


def save(model: SpecModel, path: str | Path) -> None:
    """The head alone, in a folder."""
    model.save_pretrained(path)


def restore(model: PreTrainedModel, path: str | Path) -> SpecModel:
    """The head saved in a folder, beside this base."""
    return load_head(model, path)


def enable_huggingface_checkpointing() -> None:
    """Nothing to do: `import specheads` registers the type, so that AutoModelForCausalLM loads base and head."""
