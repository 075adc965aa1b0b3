"""One training run of a head: recipe → tokenizer, data, base + head → SpecTrainer → the head in output_dir."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from transformers import (
    AutoTokenizer,
    EarlyStoppingCallback,
    TrainerCallback,
    TrainerState,
    set_seed,
)
from transformers.integrations.deepspeed import (
    is_deepspeed_zero3_enabled,
    set_hf_deepspeed_config,
    unset_hf_deepspeed_config,
)

from specheads.data.datasets import Collator, build_datasets, token_counts
from specheads.heads.vocabulary import DraftVocabulary
from specheads.hub import options as hub_options
from specheads.models.card import Record
from specheads.models.convert import convert, load_head
from specheads.models.loading import as_dtype
from specheads.models.run_files import RECIPE, RESULTS
from specheads.models.spec_model import SpecModel
from specheads.training.base import load_base, padding_id
from specheads.training.distributed import launch
from specheads.training.distributed.launch import LaunchError
from specheads.training.errors import (
    STATE,
    TrainingError,
    TrainingStopped,
    finished,
    go_on,
    is_lost_process,
    last_finished,
    stop_signals,
    stopped_at,
)
from specheads.training.options import refuse_absent_reporters
from specheads.training.parity import Parity, ParityConfig, compare, prompts_of
from specheads.training.recipe import Recipe, RecipeError
from specheads.training.report import card as run_card
from specheads.training.report import curves
from specheads.training.trainer import SpecTrainer, SpecTrainingArguments

SHARDED = ("fsdp", "fsdp2", "zero3")  # no process has the whole model
_log = logging.getLogger(__name__)


@dataclass
class Run:
    """A run that is ready to start. checkpoint: the folder it resumes from."""

    trainer: SpecTrainer
    checkpoint: str | None
    parity: ParityConfig
    recipe: Recipe
    head_saved: bool = False

    def train(self) -> dict[str, float]:
        """Train, evaluate where there is something held out, save the head, compare it with real decoding, and return
        the final metrics. TrainingError where it cannot go on; TrainingStopped, a KeyboardInterrupt, where it was
        asked to stop; ParityError, with everything saved, where decoding is not as training said."""
        began = time.time()
        try:
            with stop_signals():
                metrics, parity = self._run()
        except KeyboardInterrupt as error:
            raise self._stopped(began, getattr(error, "number", signal.SIGINT)) from None
        except RuntimeError as error:
            if not is_lost_process(error):
                raise
            reason = " ".join(str(error).split())[:200]
            raise TrainingError(
                f"step {self.trainer.state.global_step + 1}: another process of this run has ended or does not answer "
                f"({reason}); {go_on(self.trainer.args.output_dir)}"
            ) from error
        if parity is not None:
            parity.refuse()
        return metrics

    def _stopped(self, began: float, number: int) -> TrainingStopped:
        trainer = self.trainer
        for callback in trainer.callback_handler.callbacks:
            if (bar := getattr(callback, "training_bar", None)) is not None:
                bar.close()  # which ends its line
        if not trainer.is_world_process_zero():
            return TrainingStopped(number=number)
        step, output = trainer.state.global_step, trainer.args.output_dir
        return TrainingStopped(stopped_at(step, output, began, self.checkpoint, self.head_saved), number)

    def _run(self) -> tuple[dict[str, float], Parity | None]:
        """All of it but the verdict, each part on disk before the next begins."""
        trainer = self.trainer
        metrics = self._at_the_end() or trainer.train(resume_from_checkpoint=self.checkpoint).metrics
        assert trainer.args.output_dir is not None
        output = Path(trainer.args.output_dir)
        trainer.save_model(str(output))
        self.head_saved = True
        trainer.save_state()
        if trainer.eval_dataset is not None:
            metrics |= trainer.evaluate()
        self._record(output, metrics)
        parity = self._parity()
        if parity is not None:
            metrics |= parity.metrics
            self._record(output, metrics)
            _log.warning("parity: %s", parity)
        return metrics, parity

    def _record(self, output: Path, metrics: dict[str, float]) -> None:
        if self.trainer.is_world_process_zero():
            self.trainer.save_state()
            (output / RECIPE).write_text(self.recipe.to_yaml(), "utf8")
            (output / RESULTS).write_text(json.dumps(metrics, indent=2, sort_keys=True) + "\n", "utf8")
            curves.draw(output, self.trainer.state.log_history)
            model = self.trainer.accelerator.unwrap_model(self.trainer.model, keep_fp32_wrapper=False)
            run_card.write(output, model, Record.of_folder(output))

    def _at_the_end(self) -> dict[str, float] | None:
        """The metrics of a run that had taken its last step before, with its head restored; transformers (5.23) would
        take one more step each time. None where there is something to do."""
        trainer, last = self.trainer, self.trainer.args.max_steps
        if self.checkpoint is None or last < 1 or launch.kind_of(trainer.accelerator) not in ("no", "ddp"):
            return None
        state = TrainerState.load_from_json(str(Path(self.checkpoint) / STATE))
        if state.global_step < last:
            return None
        best = state.best_model_checkpoint if trainer.args.load_best_model_at_end else None
        trainer._load_from_checkpoint(best if best and Path(best).is_dir() else self.checkpoint)
        trainer.state = state
        return {"train_loss": next((entry["loss"] for entry in reversed(state.log_history) if "loss" in entry), 0.0)}

    def _parity(self) -> Parity | None:
        """Decoded on the first process and told to all; None where nothing can be decoded."""
        trainer, kind = self.trainer, launch.kind_of(self.trainer.accelerator)
        parity = None
        if trainer.is_world_process_zero() and self.parity.prompts:
            if self.recipe.features:
                _log.warning(
                    "parity: not compared, because the base is not in memory; run `specheads parity %s --data ROWS`",
                    trainer.args.output_dir,
                )
            elif kind in SHARDED:
                _log.warning(
                    "parity: not compared, because %s has cut the model up; run `specheads parity %s --data ROWS`",
                    kind, trainer.args.output_dir,
                )  # fmt: skip
            else:
                model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
                rows: Any = trainer.eval_dataset if trainer.eval_dataset is not None else trainer.train_dataset
                parity = compare(model, prompts_of(rows, self.parity), self.parity)
                if parity is None:
                    _log.warning("parity: not compared, because no text was as long as a draft; give longer rows")
        (parity,) = broadcast_object_list([parity])
        return parity

    def summary(self, metrics: dict[str, float]) -> str:
        """One line on what train() gave."""
        length = metrics.get("eval_accepted_length")
        shown = "" if length is None else f", accepted length {length:.3f} on the held-out rows"
        return f"saved {self.trainer.args.output_dir}: loss {metrics['train_loss']:.4g}{shown}"


def prepare(recipe: Recipe) -> Run:
    """Load and check everything a run needs. Raises RecipeError, LaunchError, or another ValueError or OSError that
    says what is wrong with the data, the base or a checkpoint."""
    arguments = training_arguments(recipe)
    launch.check(recipe.launch, arguments.world_size)
    checkpoint = resume_point(recipe)
    set_seed(arguments.seed)
    with unsharded(arguments):
        model, train, held_out, collator = saved(recipe) if recipe.features else live(recipe, arguments)
    if recipe.features:
        arguments.remove_unused_columns = False  # by forward()'s signature, which does not name what was saved
    callbacks: list[TrainerCallback] = []
    if recipe.early_stopping is not None:
        callbacks.append(EarlyStoppingCallback(recipe.early_stopping))
    trainer = SpecTrainer(
        model, arguments, train_dataset=train, eval_dataset=held_out, data_collator=collator, callbacks=callbacks
    )
    trainer.recipe = recipe.to_yaml()
    kind = launch.kind_of(trainer.accelerator)
    launch.check(recipe.launch, trainer.accelerator.num_processes, kind)
    if kind in SHARDED and getattr(model.base, "is_quantized", False):
        raise LaunchError(
            f"{kind} would cut up a quantised base, whose weights are no matrices: use ddp, zero1 or zero2"
        )
    return Run(trainer, checkpoint, recipe.parity, recipe)


def live(recipe: Recipe, arguments: SpecTrainingArguments) -> tuple[SpecModel, Any, Any, Any]:
    """Model, rows to train on, rows held out and collator, with the base in memory."""
    assert recipe.data is not None
    tokenizer = AutoTokenizer.from_pretrained(recipe.base, **hub_options(recipe.base))
    with arguments.main_process_first(desc="reading the data"):
        train, held_out = build_datasets(recipe.data, tokenizer)
    return build_model(recipe, train), train, held_out, Collator(padding_id(tokenizer))


def saved(recipe: Recipe) -> tuple[SpecModel, Any, Any, Any]:
    """The same from saved features. FeatureError, a ValueError, says what is wrong with them."""
    from specheads.training.features.training import from_disk

    return from_disk(Path(str(recipe.features)), recipe.head, recipe.init_from, recipe.head_dtype)


def training_arguments(recipe: Recipe) -> SpecTrainingArguments:
    """The recipe's training section; on a machine without an accelerator use_cpu is true unless it says otherwise."""
    options = {name: value for name, value in recipe.training.items() if name != "resume_from_checkpoint"}
    # Without it, several processes on CPUs do not find one another and each trains on its own.
    options.setdefault("use_cpu", not torch.accelerator.is_available())
    try:
        refuse_absent_reporters(options.get("report_to"))
    except ValueError as error:
        raise RecipeError(str(error)) from error
    try:
        return SpecTrainingArguments(**options)
    except (TypeError, ValueError, ImportError) as error:
        raise RecipeError(f"training: {error}") from error


def resume_point(recipe: Recipe) -> str | None:
    """The checkpoint that resume_from_checkpoint names; auto or true is the last finished one in output_dir, if any."""
    wanted = recipe.training.get("resume_from_checkpoint")
    if not wanted:
        return None
    if wanted in ("auto", True):
        last = last_finished(recipe.training["output_dir"])
        return None if last is None else str(last)
    if not finished(Path(wanted)):
        raise RecipeError(f"training.resume_from_checkpoint={wanted!r} is no checkpoint folder of a run; or give auto")
    return str(wanted)


@contextlib.contextmanager
def unsharded(arguments: SpecTrainingArguments) -> Iterator[None]:
    """Models are loaded whole, since a head starts from the base's layers; the Trainer shards them later.

    transformers loads shards wherever ZeRO-3 is configured, whatever accelerate's zero3_init_flag says.
    """
    if not is_deepspeed_zero3_enabled():
        yield
        return
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        assert arguments.deepspeed_plugin is not None
        set_hf_deepspeed_config(arguments.deepspeed_plugin.hf_ds_config)


def build_model(recipe: Recipe, train: Iterable[Any]) -> SpecModel:
    """Base + head: new, with a draft vocabulary counted on the training data where it has one, or from a checkpoint."""
    base = load_base(recipe)
    dtype = base.dtype if recipe.head_dtype == "auto" else as_dtype(recipe.head_dtype)
    if recipe.init_from is not None:
        model = load_head(base, recipe.init_from)
        model.head.to(dtype)
    else:
        assert recipe.head is not None
        model = convert(base, recipe.head, dtype=dtype, lora=recipe.lora)
        head = model.head
        if isinstance(head, DraftVocabulary) and head.target_ids is not None:
            head.set_draft_vocabulary(token_counts(train, len(head.t2d)), base)
    return model
