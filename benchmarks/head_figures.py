"""What heads.py and whole_run.py share: the prompts that heads are compared on, and accepted lengths of many runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from specheads.bench.prompts import held_out_prompts, package_prompts
from specheads.models.files import replacing


def prompts(tokenizer: Any, count: int) -> list[str]:
    """So many of held-out files, then as many of installed packages."""
    packaged, _ = package_prompts(tokenizer, count)
    return [*held_out_prompts(tokenizer, count), *(str(prompt.asked) for prompt in packaged)]


def write(path: Path, record: dict[str, Any]) -> None:
    with replacing(path) as partial:
        partial.write_text(json.dumps(record) + "\n", "utf8")


def accepted_length(work: Tensor) -> Tensor:
    """Tokens and steps (..., prompts, 2) → tokens a step over all prompts, and where there are seeds, over these."""
    tokens, steps = work.flatten(0, -2).sum(0)
    return tokens / steps


def shown(accepted_length: float | None, interval: tuple[float, float] | None, sign: str = "") -> str:
    if accepted_length is None:
        return "–"
    between = "" if interval is None else f" ({interval[0]:{sign}.2f} to {interval[1]:{sign}.2f})"
    return f"{accepted_length:{sign}.2f}{between}"
