"""The dotted keys of a recipe, and which of them an option means that was given as a flag or in a wrong section."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import cache
from typing import Any

from specheads.data.config import DataConfig
from specheads.heads import HEADS
from specheads.models.base.lora import JointConfig
from specheads.options import nearest
from specheads.training.distributed.launch import LaunchConfig
from specheads.training.parity import ParityConfig

# Names that other trainers give to options.
_ELSEWHERE = {
    "lr": "training.learning_rate", "epochs": "training.num_train_epochs", "num_epochs": "training.num_train_epochs",
    "batch_size": "training.per_device_train_batch_size",
    "data": "data.train", "dataset": "data.train", "train_data": "data.train", "eval_data": "data.eval",
    "max_seq_length": "data.max_length", "model": "base", "model_name_or_path": "base", "base_model": "base",
    "head": "head.kind", "resume": "training.resume_from_checkpoint", "output": "training.output_dir",
}  # fmt: skip


SECTIONS = {"training": None, "head": None, "data": DataConfig, "launch": LaunchConfig, "parity": ParityConfig,
            "lora": JointConfig}  # fmt: skip


@cache
def names_in(section: str) -> frozenset[str]:
    """The options of a section; of `head`, those of every kind."""
    if section == "head":
        return frozenset(
            name for head in HEADS.values() for name in ("kind", *_names(head.Config), *head.Config.aliases)
        )
    if section == "training":
        from specheads.training.recipe.arguments import SpecTrainingArguments  # it takes seconds

        return frozenset(_names(SpecTrainingArguments))
    return frozenset(_names(SECTIONS[section]))


def key_of(name: str, top: Iterable[str], *, similar: bool = True) -> str | None:
    """The key that an option means, whatever its section and dashes: `--learning-rate` and `head.learning_rate` mean
    training.learning_rate. top: the keys without a section. similar: if no key has that name, take the nearest one."""
    last = name.lstrip("-").replace("-", "_").rpartition(".")[2]
    keys = {key: f"{section}.{key}" for section in reversed(SECTIONS) for key in sorted(names_in(section))}
    keys |= {key: key for key in top} | _ELSEWHERE
    found = last if last in keys or not similar else nearest(last, keys)
    return None if found is None else keys.get(found)


def _names(config: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(config) if field.init]
