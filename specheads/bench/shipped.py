"""A folder with the layout of checkpoints/: base/ with its tokenizer and held-out names, and a folder for each head."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from specheads.data import corpus
from specheads.models.convert import load_head
from specheads.models.spec_model import SpecModel

# Labels of the shipped heads that `bench` and the demo compare, by folder.
LABELS = {"medusa": "Medusa", "eagle": "EAGLE-1", "eagle3": "EAGLE-3"}


def find_base(checkpoints: Path | None) -> Path:
    """base/ in `checkpoints`, or in the shipped folder if that is None. FileNotFoundError if it does not exist."""
    base = (checkpoints or corpus.checkpoints_dir()) / "base"
    if not (base / "config.json").is_file():
        raise FileNotFoundError(f"no base model at {base}: name a folder that holds base/")
    return base


def load_base(base: Path, device: str | None = None) -> tuple[PreTrainedModel, Any]:
    """The model and its tokenizer. It is in float32, in which all decoders agree on the likeliest token.

    device None: the GPU if there is one, else the CPU.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return model, AutoTokenizer.from_pretrained(base)


def names_in(folder: Path | None) -> list[str]:
    """The names by which `bench` knows the heads and draft models in a folder; [] for None."""
    names = [] if folder is None else sorted(path.parent.name for path in folder.glob("*/config.json"))
    return [name for name in names if name != "base"]


def held_out_names(base: Path) -> list[str]:
    """The files that the base was not trained on, as recorded with it, else by the default rule."""
    recorded = base / "held_out.txt"
    return recorded.read_text("utf8").split() if recorded.is_file() else corpus.default_held_out()


def load_heads(model: PreTrainedModel, folder: Path, names: Iterable[str] = LABELS) -> dict[str, SpecModel]:
    """Label → head, for the heads in `folder`, loaded onto `model` in its dtype."""
    return {LABELS.get(name, name): load_head(model, folder / name, dtype=model.dtype) for name in names}
