"""The model card of a run: README.md in its folder and in each checkpoint, unless the user wrote one there."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specheads.files import replacing
from specheads.models import card

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from specheads.models.spec_model import SpecModel

FILE = "README.md"
_MARK = "<!-- written by specheads, and again after each evaluation unless you change it: {} -->\n"


def write(
    folder: Path, model: SpecModel, record: card.TrainingRecord, repo_id: str | None = None, license: str | None = None
) -> None:
    """Write the head's card in `folder`; a README.md that is not ours stays. repo_id: where the head is uploaded to; a
    local base is then not named."""
    path, source, named = folder / FILE, repo_id or folder.as_posix(), model.config.base_model_name_or_path
    if not is_ours(path):
        return
    argument = "" if named and (repo_id is None or card.on_the_hub(named)) else ', base="path/to/the/base"'
    served = (
        f"## Served\n\n`specheads export {source} served --to vllm` writes it for another program (sglang, trtllm, "
        "llamacpp …), or says why that does not read such a head."
    )
    text = card.text(model.config, model.head, record, f'"{source}"{argument}', served, license)
    with replacing(path) as temporary:  # half a card would lack the mark, and pass for the user's
        temporary.write_text(text + "\n" + _MARK.format(_digest(text + "\n")), "utf8")


def is_ours(path: Path) -> bool:
    """May the file be overwritten? Yes if it does not exist, or is unchanged since write()."""
    if not path.exists():
        return True
    text, marked, digest = path.read_text("utf8", errors="replace").rpartition(_MARK.partition("{}")[0])
    return bool(marked) and re.sub(r" -->\s*$", "", digest) == _digest(text)


def describe_training(arguments: TrainingArguments, steps: int, rows: Any, processes: int) -> list[str]:
    """How a run without a recipe was trained."""
    count = len(rows) if hasattr(rows, "__len__") else None
    batch = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * processes
    optimizer = "Muon with AdamW" if getattr(arguments, "muon", False) else getattr(
        arguments.optim, "value", arguments.optim)  # fmt: skip
    schedule = getattr(arguments.lr_scheduler_type, "value", arguments.lr_scheduler_type)
    return [
        f"{steps:,} steps of {batch:,} rows{'' if count is None else f' out of {count:,}'}, {optimizer}, learning rate "
        f"{arguments.learning_rate:g} ({schedule}), seed {arguments.seed}."
    ]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
