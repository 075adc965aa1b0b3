"""The parts of a run, each built from the recipe: arguments, checkpoint to resume, rows, base and head; and its budget,
its steps, and evaluations and a parity gate that take at most a share of their time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specheads.data.datasets import token_counts
from specheads.data.rows import IGNORED
from specheads.heads.vocabulary import DraftVocabulary
from specheads.models.base.loading import as_dtype
from specheads.models.convert import convert, load_head
from specheads.models.spec_model import SpecModel
from specheads.training.distributed.launch import QuantisedBase
from specheads.training.distributed.sharded_base import first_loads
from specheads.training.errors import is_finished, last_finished
from specheads.training.features.dataset import FeatureDataset
from specheads.training.features.plan import autocast_of
from specheads.training.recipe.arguments import SpecTrainingArguments, refuse_absent_reporters
from specheads.training.recipe.loading import collator_of, is_quantised, load_base, load_rows
from specheads.training.recipe.recipe import Recipe, RecipeError

MIN_ROWS = 8  # that an evaluation may always have
MIN_SECONDS = 30.0  # that the parity gate may always take


def live_parts(recipe: Recipe, arguments: SpecTrainingArguments) -> tuple[SpecModel, Any, Any, Any]:
    """Model, rows to train on, held-out rows and collator, with the base in memory: in that of the first process if it
    loads for all, else in every process's."""
    with arguments.main_process_first(desc="reading the data"):
        train, held_out, processing = load_rows(recipe)
    sharded = first_loads(arguments)
    if sharded and is_quantised(recipe):  # which could not be built without weights
        raise QuantisedBase
    weights = arguments.process_index == 0 or not sharded
    return build_model(recipe, train, weights), train, held_out, collator_of(processing)


def saved_parts(recipe: Recipe) -> tuple[SpecModel, Any, Any, Any]:
    """The same parts from saved features. FeatureError, a ValueError, says what is wrong with them."""
    from specheads.training.features.training import from_disk

    folder, autocast = Path(str(recipe.features)), autocast_of(recipe.training)
    return from_disk(folder, recipe.head, recipe.init_from, recipe.head_dtype, autocast)


def refuse_without_targets(train: Any) -> None:
    """RecipeError if no draft has a target: the first draft from a token predicts the second token after it."""
    rows = train.labels() if isinstance(train, FeatureDataset) else (train[i] for i in range(len(train)))
    for row in rows:
        documents = row.get("document_ids", [1] * len(row["labels"]))
        targets = zip(row["labels"][2:], documents, documents[2:], strict=False)
        if any(label != IGNORED and first == last for label, first, last in targets):
            return
    raise RecipeError(
        f"of the {len(train)} rows to train on no draft has a target: expected rows of 3 tokens or more, of which one "
        "after the second is learnt (data.max_length, and assistant turns, decide it)"
    )


def training_arguments(recipe: Recipe) -> SpecTrainingArguments:
    """The recipe's training section as arguments; without an accelerator use_cpu defaults to true."""
    options = {name: value for name, value in recipe.training.items() if name != "resume_from_checkpoint"}
    # Without it, several processes on CPUs would not find one another, and each would train on its own.
    options.setdefault("use_cpu", not torch.accelerator.is_available())
    try:
        refuse_absent_reporters(options.get("report_to"))
    except ValueError as error:
        raise RecipeError(str(error)) from error
    try:
        arguments = SpecTrainingArguments(**options)
    except (TypeError, ValueError, ImportError) as error:
        raise RecipeError(f"training: {error}") from error
    launched, wanted = arguments.mixed_precision, autocast_of(recipe.training)
    if launched != wanted:
        raise RecipeError(
            f"the launcher asks for mixed precision {launched!r}, and the recipe for {wanted!r}: give "
            f"--mixed_precision {wanted} to the one, or training.{launched}=true to the other"
        )
    return arguments


def resume_point(recipe: Recipe) -> str | None:
    """The checkpoint named by resume_from_checkpoint; auto or true mean the last finished one in output_dir, if any."""
    wanted = recipe.training.get("resume_from_checkpoint")
    if not wanted:
        return None
    if wanted in ("auto", True):
        last = last_finished(recipe.training["output_dir"])
        return None if last is None else str(last)
    if not is_finished(Path(wanted)):
        raise RecipeError(f"training.resume_from_checkpoint={wanted!r} is no checkpoint folder of a run; or give auto")
    return str(wanted)


def build_model(recipe: Recipe, train: Iterable[Any], weights: bool = True) -> SpecModel:
    """Base and head: a new head, its draft vocabulary (if any) counted on the training data, or a checkpoint's. Without
    weights, both are on the meta device."""
    base = load_base(recipe, weights)
    dtype = base.dtype if recipe.head_dtype == "auto" else as_dtype(recipe.head_dtype)
    if recipe.init_from is not None:
        model = load_head(base, recipe.init_from, dtype="auto")
        model.head.to(dtype)
    else:
        assert recipe.head is not None
        model = convert(base, recipe.head, dtype=dtype, lora=recipe.lora)
        head = model.head
        if isinstance(head, DraftVocabulary) and head.target_ids is not None:
            head.set_draft_vocabulary(token_counts(train, len(head.t2d)), base)
    return model


@dataclass(frozen=True)
class Budget:
    """rows, held_out: how many there are; steps, of `batch` rows over all processes; evaluations: during training and
    after it, each of `evaluated` held-out rows."""

    rows: int
    held_out: int
    batch: int
    steps: int
    evaluations: int
    evaluated: int

    @classmethod
    def of(
        cls, training: Mapping[str, Any], rows: int, held_out: int, share: float | None, processes: int = 1
    ) -> Budget:
        """training: options of SpecTrainingArguments; share: of the rows trained on that all evaluations together may
        have, None for no bound."""

        def option(name: str) -> Any:
            return training.get(name, getattr(SpecTrainingArguments, name))

        accumulated = option("gradient_accumulation_steps")
        rows_at_once = option("per_device_train_batch_size") * processes
        per_epoch = max(1, math.ceil(math.ceil(rows / rows_at_once) / accumulated))
        steps = option("max_steps") if option("max_steps") > 0 else math.ceil(option("num_train_epochs") * per_epoch)
        strategy = str(getattr(option("eval_strategy"), "value", option("eval_strategy")))
        every = {"steps": option("eval_steps") or option("logging_steps"), "epoch": per_epoch}.get(strategy, steps)
        every = math.ceil(steps * every) if every < 1 else every
        evaluations = math.ceil(steps / every) if held_out else 0
        batch, evaluated = rows_at_once * accumulated, held_out
        if share is not None and evaluations:
            evaluated = min(held_out, max(MIN_ROWS, int(share * steps * batch / evaluations)))
        return cls(rows, held_out, batch, steps, evaluations, evaluated)

    def select(self, held_out: Any) -> Any:
        """The rows to evaluate, spread evenly over the held-out ones."""
        if self.evaluated == self.held_out:
            return held_out
        return held_out.select([i * self.held_out // self.evaluated for i in range(self.evaluated)])


def gate_seconds(share: float | None, training: float) -> float:
    """How long the parity gate may take after so many seconds of training."""
    return math.inf if share is None else max(MIN_SECONDS, share * training)
