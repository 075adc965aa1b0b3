"""What ends a training run before its time, said in one line: with what is left, and how to go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

STATE = "trainer_state.json"


class TrainingError(RuntimeError):
    """A run that could not go on. What it had saved before is whole; the message says where to go on from."""


def finished(folder: Path) -> bool:
    """Is this checkpoint whole? Its state is written last, so one that a crash cut short has none, or half of one."""
    try:
        return isinstance(json.loads((folder / STATE).read_text("utf8")), dict)
    except (OSError, ValueError):
        return False


def last_finished(output_dir: Any) -> Path | None:
    """The newest checkpoint of a run that is whole."""
    numbered = {
        int(folder.name.rpartition("-")[2]): folder
        for folder in Path(output_dir).glob("checkpoint-*")
        if folder.name.rpartition("-")[2].isdigit()
    }
    return next((numbered[step] for step in sorted(numbered, reverse=True) if finished(numbered[step])), None)


def go_on(output_dir: Any) -> str:
    """How to go on, as the end of a message."""
    folder = last_finished(output_dir)
    if folder is None:
        return "no checkpoint was saved before it (training.save_steps says how often)"
    return f"{folder} is whole: go on from it with training.resume_from_checkpoint=auto"


def refuse_not_finite(value: Any, what: str, step: int, output_dir: Any) -> None:
    """TrainingError where a loss or a norm, which is what the next step would be made of, is no finite number."""
    number = float(value)
    if not torch.isfinite(torch.tensor(number)):
        raise TrainingError(
            f"step {step}: the {what} is {number}, and the step was not taken; {go_on(output_dir)}, with a lower "
            "training.learning_rate or training.max_grad_norm, in bf16 instead of fp16, or without that step's rows"
        )


def is_unwritten(error: BaseException) -> bool:
    """Could a file not be written? (torch.save says so by a RuntimeError.)"""
    return isinstance(error, OSError | SafetensorError) or "failed writing file" in str(error)


def is_lost_process(error: BaseException) -> bool:
    """Did another process of this run end, or not answer in time?"""
    signs = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "timeout caused pair closure")
    return isinstance(error, torch.distributed.DistError) or any(sign in str(error) for sign in signs)
