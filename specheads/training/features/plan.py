"""What saving features will need, known before the base is loaded: layers, bytes, and free space."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import torch

from specheads.decoding.verify.hf_base import layer_count
from specheads.decoding.verify.taps import last_output
from specheads.heads import HEADS
from specheads.models import saved_head
from specheads.options import OptionError
from specheads.training.features import frozen_weights
from specheads.training.features.index import parse_teacher_probs
from specheads.training.features.shards import FLOAT8, FeatureError
from specheads.training.recipe.recipe import Recipe

DTYPES = ("auto", "bfloat16", "float16", "float32", "float8_e4m3fn")
Confirm = Callable[[str], bool]


@dataclass(frozen=True)
class SaveOptions:
    """taps: hidden_states to save (default: those the recipe's head reads); dtype: theirs, auto is the base's.

    teacher_probs: what is saved of the base's distribution. hidden: the last hidden state; a number K: the K likeliest
    tokens and the probability of the rest; none: nothing. batch_size: rows per pass; shard_mb: approximate megabytes
    per file.
    """

    output: Path
    taps: tuple[int, ...] | None = None
    dtype: str = "auto"
    teacher_probs: str | int = "hidden"
    batch_size: int = 8
    shard_mb: float = 512

    def __post_init__(self) -> None:
        object.__setattr__(self, "teacher_probs", parse_teacher_probs(self.teacher_probs))
        if self.dtype not in DTYPES:
            raise OptionError(f"{{dtype}}: expected one of {', '.join(DTYPES)}", dtype=self.dtype)
        for name, least in (("batch_size", 1), ("shard_mb", 0.001)):
            if (value := getattr(self, name)) < least:
                raise OptionError(f"{{{name}}} must be at least {least}", **{name: value})


def tapped_layers(recipe: Recipe, options: SaveOptions, config: Any) -> tuple[int, ...]:
    taps = options.taps
    if taps is None:
        head = recipe.head if recipe.init_from is None else saved_head.read_configs(recipe.init_from, config)[0]
        assert head is not None
        with torch.device("meta"):
            taps = HEADS[head.kind](head.with_base_defaults(config)).layers
    layers = layer_count(config)
    if not taps or not all(0 <= tap <= last_output(config) for tap in taps):
        raise OptionError(
            f"{{taps}}: expected some of 0 to {layers}, the hidden states of a base of {layers} layers, or "
            f"{layers + 1}, the last layer's output before its final norm",
            taps=taps,
        )
    return tuple(sorted(set(taps)))


AUTOCAST = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_of(training: Mapping[str, Any]) -> str:
    """The autocast precision of a recipe's run, base included: a key of AUTOCAST."""
    return next((name for name in ("bf16", "fp16") if training.get(name)), "no")


def num_tokens(rows: Any) -> int:
    batches = rows.select_columns("input_ids").with_format("arrow").iter(1000)
    return sum(pc.sum(pc.list_value_length(batch["input_ids"])).as_py() for batch in batches)


def base_dtype(config: Any, recipe: Recipe) -> torch.dtype:
    name = recipe.base_dtype if recipe.base_dtype != "auto" else str(config.dtype or torch.float32)
    dtype = getattr(torch, name.removeprefix("torch."))
    assert isinstance(dtype, torch.dtype)
    return dtype


def bytes_per_token(config: Any, taps: Sequence[int], options: SaveOptions, recipe: Recipe) -> int:
    dtype = base_dtype(config, recipe) if options.dtype == "auto" else getattr(torch, options.dtype)
    states = len(taps) + (options.teacher_probs == "hidden" and layer_count(config) not in taps)
    likeliest = min(options.teacher_probs, config.vocab_size) if isinstance(options.teacher_probs, int) else 0
    probs = 8 * likeliest + 4 if likeliest else 0
    return 13 + states * (config.hidden_size * dtype.itemsize + 4 * (dtype == FLOAT8)) + probs


def saved_files(folder: Path) -> list[Path]:
    """The files of a folder of features: its shards, and that of the base's parts."""
    kept = folder / frozen_weights.FOLDER / frozen_weights.WEIGHTS
    return [*folder.glob("*.safetensors"), *[kept] * kept.exists()]


def confirm_size(folder: Path, tokens: int, each: int, kept: int, ask: Confirm | None) -> None:
    """FeatureError if there is too little space, or `ask` declines. kept: bytes of the base's parts."""
    whole, free = tokens * each + kept, free_bytes(folder)
    there = sum(path.stat().st_size for path in saved_files(folder))
    plan = (
        f"{tokens:,} tokens, {each:,} bytes each, and {size_text(kept)} of the base: {size_text(whole)} in {folder}, "
        f"where {size_text(free)} are free"
    )
    if there:
        plan += f" and {size_text(there)} are saved already"
    if whole - there > free:
        raise FeatureError(
            f"too little room: {plan}; give another {{output}}, {{dtype}}, or less data", output=..., dtype=FLOAT8
        )
    if ask is not None and not ask(plan):
        raise FeatureError(f"nothing was saved: {plan}")


def free_bytes(folder: Path) -> int:
    """Free disk space for a folder that may not exist yet."""
    while not folder.exists():
        folder = folder.parent
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def size_text(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:,.1f} TB"
