"""The files of a training run's folder: their names, its final metrics and its log."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from specheads.heads import DraftHead
from specheads.models.files import WEIGHTS, read_names, read_table, read_tensors

RESULTS, STATE, RECIPE, CURVES = "results.json", "trainer_state.json", "recipe.yaml", "curves.png"


def run_of(checkpoint: Any, head: DraftHead) -> Path | None:
    """The folder that the head was loaded from; None if there is none, or if its weights are no longer this head's, as
    after more training in memory, so that its metrics do not apply."""
    folder = Path(str(checkpoint or ""))
    if not checkpoint or not (folder / WEIGHTS).is_file():
        return None
    saved = read_tensors(folder / WEIGHTS, read_names(folder / WEIGHTS))
    for name, tensor in head.state_dict().items():
        there = saved.get(f"head.{name}")
        if there is None or not torch.equal(there.to(tensor.dtype), tensor.to("cpu")):
            return None
    return folder


def accepted_length(checkpoint: Any) -> float | None:
    """The accepted length that training measured on held-out rows; None if the checkpoint's folder has none."""
    folder = Path(str(checkpoint or ""))
    if not checkpoint or not folder.is_dir():
        return None
    length = results(folder).get("eval_accepted_length")
    if isinstance(length, int | float):
        return float(length)
    lengths = [log.get("eval_accepted_length") for log in reversed(history(folder))]
    return next((float(length) for length in lengths if isinstance(length, int | float)), None)


def results(run: Path) -> dict[str, Any]:
    """The final metrics of a run; {} if its folder has none."""
    return _table(run / RESULTS)


def history(run: Path) -> list[dict[str, Any]]:
    """The whole log of a run (some megabytes); [] if its folder has none."""
    return [log for log in _table(run / STATE).get("log_history") or () if isinstance(log, dict)]


def numbers(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that are numbers: an untrusted file, or one from another program, may hold anything."""
    return {name: value for name, value in figures.items() if isinstance(value, int | float)}


def _table(path: Path) -> dict[str, Any]:
    return (read_table(path, most=None) or {}) if path.is_file() else {}
