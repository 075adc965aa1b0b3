"""Whole texts of a trained head and its own base, against transformers' generate()."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gpu_sections.speed import REFERENCE, measure_in_turn
from gpu_sections.timing import Deadline
from specheads.bench.compare.decoder_spec import BenchSetup, Cell
from specheads.bench.compare.decoder_texts import parse_decoder
from specheads.bench.compare.prompt_sets import default_sets, sets_from
from specheads.bench.figures.floor import measure_floor
from specheads.models.named import Models

TITLE = "A trained head, whole texts of one row, greedy"
# By importance: those that are not warm in time are skipped.
DECODERS = (
    REFERENCE, "plain", "head tree=chain:5", "head auto", "plain compile", "head tree=chain:5 compile",
    "head auto compile", "head tree=static:16 compile", "head tree=dynamic:16,5,4", "transformers-static",
)  # fmt: skip


def measure(
    head: str, base: str | None, file: Path | None, device: torch.device, deadline: Deadline, *,
    count: int = 8, new: int = 128, repeats: int = 2,
) -> dict[str, Any]:  # fmt: skip
    """head: a checkpoint; base: its model, if the checkpoint does not find it. file: of prompts, asked as a user's
    messages; held-out Python files if None. count: prompts; new: tokens of each text."""
    models = Models.load(head, base=base, device=str(device))
    sets = sets_from([file], models.tokenizer, count, chat=True) if file else default_sets(models.tokenizer, count, 64)
    prompts = sets[0]
    setup = BenchSetup(models, None, new, prompts.longest(new))
    cell = Cell(prompts.name, 1, 0.0)
    batches = [
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        for ids in (torch.tensor([row], device=device) for row in prompts.ids)
    ]
    floor = measure_floor(models.target)
    section = measure_in_turn(
        {text: parse_decoder(text).build(setup, cell) for text in DECODERS}, batches, deadline, device,
        repeats=repeats, floor_seconds=floor.seconds, prompts=prompts.name,
    )  # fmt: skip
    dtype = str(models.target.dtype).removeprefix("torch.")
    return {**section, "head": head, "base": str(models.target.name_or_path), "dtype": dtype, "floor": floor.to_dict()}
