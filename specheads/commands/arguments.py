"""What the command line's words stand for: the prompt, the model and where it runs, the draft tree."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as hf_logging

from specheads.hub import options as hub_options
from specheads.planner import Plan, tree_named
from specheads.planner.named import STATIC_DEPTH
from specheads.spec_model import SpecModel

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
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read()
    if not prompt:
        raise ValueError("no prompt: give --prompt TEXT or --prompt-file FILE, or pipe it in")
    return prompt


def load(source: str, base: str | None, dtype: str, device: str) -> tuple[SpecModel, Any]:
    """Base + head on the device asked for, and the base's tokenizer. ValueError or OSError with the reason."""
    wanted, place = placement(dtype, device)
    model: Any = SpecModel.from_pretrained(source, base=base, dtype=wanted)
    model.to(place)
    name = base or model.base.name_or_path
    return model, AutoTokenizer.from_pretrained(name, **hub_options(name))


def load_base(source: str, dtype: str, device: str) -> tuple[PreTrainedModel, Any]:
    """A language model without a head, and its tokenizer, as `load`."""
    wanted, place = placement(dtype, device)
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=wanted or "auto")
    return model.to(place).eval(), AutoTokenizer.from_pretrained(source)


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


def parse_tree(spec: str | None, model: SpecModel) -> Plan | None:
    """--tree as `tree_named` reads it; None for the head's default."""
    if spec is None:
        return None
    try:
        return tree_named(spec, getattr(model.head.config, "num_heads", STATIC_DEPTH))
    except ValueError as error:
        raise ValueError(f"--tree {error}") from error
