"""What the command line's words stand for: the prompt, the model and where it runs, the draft tree."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as hf_logging

from specheads.convert import SpecModel
from specheads.planner import DynamicTree, Plan, SampledTree, chain, comb, default_static

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
    place, wanted = placed(dtype, device)
    model: Any = SpecModel.from_pretrained(source, base=base, dtype=wanted)
    model.to(place)
    return model, AutoTokenizer.from_pretrained(base or model.base.name_or_path)


def load_base(source: str, dtype: str, device: str) -> tuple[PreTrainedModel, Any]:
    """A language model without a head, and its tokenizer, as `load`."""
    place, wanted = placed(dtype, device)
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=wanted or "auto")
    return model.to(place).eval(), AutoTokenizer.from_pretrained(source)


def placed(dtype: str, device: str) -> tuple[torch.device, torch.dtype | None]:
    """The device asked for and the dtype to load in; None: as it was saved. ValueError for what is not to be had."""
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype!r} is none of auto, {', '.join(DTYPES)}")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device!r} is not usable here: {error}") from error
    hf_logging.disable_progress_bar()
    return place, DTYPES.get(dtype, torch.float32 if place.type == "cpu" else None)


def parse_tree(spec: str | None, model: SpecModel | None) -> Plan | None:
    """chain:4 | comb:5[,2] | dynamic:60,7,10 | static[:16] | sampled:2,2,1 → the plan; None for the drafter's
    default. model: whose head drafts, None where none does."""
    if spec is None:
        return None
    kind, _, rest = spec.partition(":")
    expected = (
        "expected chain:DEPTH, comb:DEPTH[,WIDTH], dynamic:NODES,DEPTH,TOP_K, static[:NODES] or sampled:WIDTH,WIDTH,…"
    )
    try:
        numbers = [int(part) for part in rest.split(",")] if rest else []
    except ValueError as error:
        raise ValueError(f"--tree {spec!r}: {rest!r} is not whole numbers; {expected}") from error
    try:
        if kind == "chain" and len(numbers) == 1:
            return chain(*numbers)
        if kind == "comb" and len(numbers) in (1, 2):
            return comb(*numbers)
        if kind == "dynamic" and len(numbers) == 3:
            return DynamicTree(*numbers)
        if kind == "sampled" and numbers:
            return SampledTree(tuple(numbers))
        if kind == "static" and len(numbers) <= 1:
            return default_static(
                numbers[0] if numbers else 16,
                getattr(getattr(getattr(model, "head", None), "config", None), "num_heads", 5),
            )
    except ValueError as error:
        raise ValueError(f"--tree {spec!r}: {error}") from error
    raise ValueError(f"--tree {spec!r} is no tree; {expected}")
