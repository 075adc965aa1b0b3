"""What heads.py and whole_run.py share: the prompts that heads are compared on, the check that saved figures belong to
the same run, and accepted lengths over many runs."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

from torch import Tensor

from specheads.bench.prompts import held_out_prompts, package_prompts
from specheads.files import replacing
from specheads.models.base.fingerprint import fingerprint_base
from specheads.training.distributed.resume import data_mark


def prompts(tokenizer: Any, count: int) -> list[str]:
    """`count` prompts from held-out files, then as many from installed packages."""
    packaged, _ = package_prompts(tokenizer, count)
    return [*held_out_prompts(tokenizer, count), *(str(prompt.asked) for prompt in packaged)]


def marks(base: Any, rows: Any, asked: list[Any]) -> dict[str, str | None]:
    """What figures depend on besides the options: digests of the base, the rows and the prompts."""
    digest = f"{zlib.crc32(json.dumps(asked).encode()):08x}"
    return {"base": fingerprint_base(base)["weights"], "data": data_mark(rows), "prompts": digest}


def refuse_other_runs(folder: Path, asked: dict[str, Any]) -> None:
    """SystemExit if the folder has figures of runs with other options or data than `asked`. Values that an older
    version did not record are not compared."""
    for path in sorted(folder.glob("*/figures.json")):
        kept = json.loads(path.read_text("utf8"))["budget"]
        other = [f"{n}: {kept[n]}, not {value}" for n, value in asked.items() if n in kept and kept[n] != value]
        if other:
            raise SystemExit(f"{path} is of another run ({'; '.join(other)}): give its options, or another --out")


def write(path: Path, record: dict[str, Any]) -> None:
    with replacing(path) as partial:
        partial.write_text(json.dumps(record) + "\n", "utf8")


def accepted_length(work: Tensor) -> Tensor:
    """Tokens and steps (…, prompts, 2) → tokens per step over all prompts and, if there are seeds, over all seeds."""
    tokens, steps = work.flatten(0, -2).sum(0)
    return tokens / steps


def shown(accepted_length: float | None, interval: tuple[float, float] | None, sign: str = "") -> str:
    if accepted_length is None:
        return "–"
    between = "" if interval is None else f" ({interval[0]:{sign}.2f} to {interval[1]:{sign}.2f})"
    return f"{accepted_length:{sign}.2f}{between}"
