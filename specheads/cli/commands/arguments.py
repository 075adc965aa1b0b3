"""What the command line's words stand for: the prompt, the model and where it runs, the draft tree."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.utils import logging as hf_logging

from specheads.decoding.planner import Plan, as_plan
from specheads.hub import options as hub_options
from specheads.models.spec_model import SpecModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """From --prompt, --prompt-file or stdin. ValueError where there is none, or more than one."""
    if prompt is not None and file is not None:
        raise ValueError("give --prompt or --prompt-file, not both")
    if file is not None:
        try:
            prompt = file.read_text("utf8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8 text: {error}") from error
        if not prompt:
            raise ValueError(f"{file} is empty: expected the text to continue")
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read()
    if not prompt:
        raise ValueError("no prompt: give --prompt TEXT or --prompt-file FILE, or pipe it in")
    return prompt


def load(source: str, base: str | None, dtype: str, device: str, **options: Any) -> tuple[SpecModel, Any]:
    """Base + head on the device asked for, and the base's tokenizer. options: of the loading of the base, which a
    device_map has put where it belongs. ValueError or OSError with the reason."""
    refuse_unshipped(source)
    wanted, place = placement(dtype, device)
    model: Any = SpecModel.from_pretrained(source, base=base, dtype=wanted, **options)
    (model.head if "device_map" in options else model).to(place)
    name = base or model.base.name_or_path
    return model, AutoTokenizer.from_pretrained(name, **hub_options(name))


def refuse_unshipped(source: str) -> None:
    """ValueError for a path in checkpoints/, as help and README name them, where there is no such folder."""
    if source.startswith("checkpoints/") and not Path("checkpoints").is_dir():
        raise ValueError(
            f"{source} is not here: the heads in checkpoints/ come with the repository, not with the wheel; "
            "`specheads demo` trains one of its own in runs/demo"
        )


def placement(dtype: str, device: str) -> tuple[torch.dtype | None, torch.device]:
    """--dtype and --device as torch's; None for the dtype a model was saved in. ValueError where they are none."""
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype!r} is none of auto, {', '.join(DTYPES)}")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device!r} is not usable here: {error}") from error
    hf_logging.disable_progress_bar()
    return DTYPES.get(dtype, torch.float32 if place.type == "cpu" else None), place


def parse_tree(spec: str | None, drafter: Any) -> Plan | None:
    """--tree as `tree_named` reads it for what is to draft; None for the drafter's default."""
    try:
        return as_plan(spec, drafter)
    except ValueError as error:
        raise ValueError(f"--tree {error}") from error
