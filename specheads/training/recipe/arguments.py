"""SpecTrainingArguments: transformers' TrainingArguments with options for heads."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from accelerate import PartialState
from transformers import TrainingArguments

from specheads.heads import HEADS
from specheads.options import reason, refuse_unknown

_EXPECTED = 'expected {regular expression: factor}, as JSON in text: {"lm_head": 0.25}, say'
_AT_LEAST_1 = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")
_ADAMW = ("adamw_torch", "adamw_torch_fused")
# The package of each reporter whose presence transformers can check; the others say themselves what is missing.
_PACKAGES = {
    "comet_ml": "comet-ml", **{name: name for name in ("clearml", "codecarbon", "dagshub", "dvclive", "mlflow",
    "neptune", "swanlab", "tensorboard", "trackio", "wandb")},
}  # fmt: skip
# Evaluation metrics of any head; base: of adapters trained with it.
_METRICS = (
    "loss", "accepted_length", "accepted_length_error", "accepted_length_sampled", "accepted_length_tree", "base",
)  # fmt: skip
_BY_DEPTH = ("accuracy", "conditional_accuracy", "acceptance", "loss")
# Evaluation metrics that fall as a head learns; transformers recognises those that end in "loss".
_FALLS = re.compile(r"(loss_depth_\d+|feature|base|confidence|accepted_length_error)$")


_SPLITS = {"cp": "context", "sp": "sequence"}


def refuse_split_rows(config: Any) -> None:
    """ValueError for a launcher that divides rows between processes. config: accelerate's ParallelismConfig; None for
    what the launcher left in the environment."""
    for name, kind in _SPLITS.items():
        found = os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1") if config is None else None
        size = int(found) if found is not None else getattr(config, f"{name}_size", 1) or 1
        if size > 1:
            raise ValueError(
                f"{name}_size={size}: {kind} parallelism gives each process a part of a row, and ring attention its "
                "keys for the base alone: a head's later steps read keys, features and tokens of the whole row. Give "
                f"{name}_size=1: a head's memory is linear in a row's length, and activation checkpointing, fsdp2 or "
                "zero3 lower it"
            )


@dataclass
class SpecTrainingArguments(TrainingArguments):
    """transformers' TrainingArguments, and two options of heads."""

    head_lr_groups: dict[str, float] | str | None = field(
        default=None,
        metadata={
            "help": "Regular expression on parameter names → factor on learning_rate; as JSON on a command line."
        },
    )
    muon: bool = field(
        default=False,
        metadata={"help": "Muon on the head's hidden matrices, AdamW on the rest."},
    )

    def __post_init__(self) -> None:
        refuse_out_of_bounds(vars(self))
        if self.use_cpu and int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.distributed.is_initialized():
            # transformers 5.23 passes ddp_timeout on only for GPUs: a process that hangs would hang the others.
            PartialState(cpu=True, backend=self.ddp_backend, timeout=timedelta(seconds=self.ddp_timeout))
        if self.greater_is_better is None and _FALLS.search(self.metric_for_best_model or ""):
            self.greater_is_better = False
        super().__post_init__()
        if self.device.type == "cpu":  # pinning would only cause a warning
            self.dataloader_pin_memory = False
            if self.fp16:
                raise ValueError("fp16=true: a CPU would train in float32: give bf16=true, or neither")
        if getattr(self.accelerator_config, "split_batches", False):
            raise ValueError(
                "accelerator_config: split_batches=true would repeat rows that are learnt: leave it out, and divide "
                "per_device_train_batch_size by the number of processes"
            )
        refuse_split_rows(self.parallelism_config)
        if self.data_seed is None:
            # Else the order of the rows would depend on random draws before train(), and a resumed run would differ.
            self.data_seed = self.seed
        if isinstance(self.head_lr_groups, str):
            try:
                self.head_lr_groups = json.loads(self.head_lr_groups)
            except json.JSONDecodeError as error:
                raise ValueError(f"head_lr_groups={self.head_lr_groups!r}: {_EXPECTED}") from error
        for pattern, factor in self.lr_multipliers.items():
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"head_lr_groups: {pattern!r} is no regular expression: {error}") from error
            if not isinstance(factor, int | float) or factor < 0:
                raise ValueError(
                    f"head_lr_groups: {pattern!r} has the factor {factor!r}; expected a number of at least 0"
                )
        if self.muon and self.optim not in _ADAMW:
            raise ValueError(f"muon=true needs optim {' or '.join(_ADAMW)}, not {str(self.optim)!r}")
        for name in ("label_smoothing_factor", "neftune_noise_alpha"):
            if value := getattr(self, name):
                raise ValueError(f"{name}={value}: it has no effect on a head, whose base is frozen: leave it out")

    def __getstate__(self) -> dict[str, Any]:
        """Without hub tokens, because transformers pickles the arguments into the folder that it uploads."""
        return {name: None if name.endswith("_token") else value for name, value in vars(self).items()}

    @property
    def lr_multipliers(self) -> Mapping[str, float]:
        groups = self.head_lr_groups or {}
        if not isinstance(groups, Mapping):
            raise ValueError(f"head_lr_groups={groups!r}: {_EXPECTED}")
        return groups


def refuse_out_of_bounds(options: Mapping[str, Any], section: str = "") -> None:
    """ValueError for a number with which nothing is trained, or the loss rises. section: a prefix of names."""
    for name in _AT_LEAST_1:
        if options.get(name, 1) < 1:
            raise ValueError(f"{section}{name}={options[name]}: expected at least 1")
    if options.get("learning_rate", 0.0) < 0:
        raise ValueError(f"{section}learning_rate={options['learning_rate']:g}: expected at least 0")
    if options.get("num_train_epochs", 1) <= 0 and options.get("max_steps", -1) <= 0:
        raise ValueError(
            f"{section}num_train_epochs={options['num_train_epochs']}: expected more than 0, or {section}max_steps of "
            "at least 1"
        )


def refuse_unknown_metric(name: str) -> None:
    """ValueError for a metric that no evaluation of a head has."""
    kind, by_depth, depth = name.rpartition("_depth_")
    if not (by_depth and kind in _BY_DEPTH and depth.isdecimal() and int(depth) > 0):
        depths = [f"{kind}_depth_{depth}" for kind in _BY_DEPTH for depth in range(1, 9)]
        terms = [term for head in HEADS.values() for term in head.Config.loss_terms]
        refuse_unknown([name], [*_METRICS, *terms, *depths], "training.metric_for_best_model")


def refuse_absent_reporters(report_to: str | list[str] | None) -> None:
    """ValueError for a name in training.report_to that is unknown, or whose package is not installed. A Trainer would
    raise a RuntimeError only once everything is loaded."""
    from transformers.integrations import integration_utils as integrations

    names = [report_to] if isinstance(report_to, str) else list(report_to or ())
    names = [name for name in names if name not in ("none", "all")]
    refuse_unknown(names, [*integrations.INTEGRATION_TO_CALLBACK, "none", "all"], "training.report_to")
    installed = integrations.get_available_reporting_integrations()
    for name in set(names) - set(installed):
        lack = f"{_PACKAGES.get(name)} is not installed; pip install {_PACKAGES.get(name)}"
        if name not in _PACKAGES:
            try:
                integrations.INTEGRATION_TO_CALLBACK[name]()
                continue
            except (RuntimeError, ImportError) as error:
                lack = reason(error)
        raise ValueError(f"training.report_to={name}: {lack}, or give training.report_to=none")
