"""A training run of a head: recipe → tokenizer, data, base and head → SpecTrainer → the head in output_dir."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerState, set_seed

from specheads import terminal
from specheads.files import replacing
from specheads.models.card import TrainingRecord
from specheads.models.files import CONFIG, RECIPE, RESULTS
from specheads.training.build import (
    Budget,
    gate_seconds,
    live_parts,
    refuse_without_targets,
    resume_point,
    saved_parts,
    training_arguments,
)
from specheads.training.distributed import launch
from specheads.training.distributed.launch import SHARDED, QuantisedBase
from specheads.training.distributed.resume import WHOLE
from specheads.training.distributed.sharded_base import first_loads, send_head, unsharded
from specheads.training.errors import (
    STATE,
    TrainingError,
    TrainingStopped,
    is_lost_process,
    resume_hint,
    sparing_the_head,
    step_of,
    stop_message,
    stop_signals,
    writing,
)
from specheads.training.parity import Parity, compare, prompts_of
from specheads.training.recipe.recipe import Recipe
from specheads.training.report import card as run_card
from specheads.training.report import curves
from specheads.training.trainer.trainer import SpecTrainer

_log = logging.getLogger(__name__)


@dataclass
class Run:
    """A run that is ready to start. checkpoint: the folder it resumes from."""

    trainer: SpecTrainer
    checkpoint: str | None
    recipe: Recipe
    head_saved: bool = False

    @property
    def failed(self) -> list[str]:
        """The parts, such as the model card, that failed after a head was saved."""
        return self.trainer.failed

    def train(self) -> dict[str, float]:
        """Train, save the head, evaluate on held-out rows if there are any, compare with real decoding → the final
        metrics.

        What fails after the head is saved, such as its evaluation or its upload, is logged and noted in `failed`; the
        other parts are done. TrainingError if training cannot continue; TrainingStopped, a KeyboardInterrupt, if it was
        asked to stop; ParityError, with everything saved, if decoding and training disagree.
        """
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
                f"({reason}); {resume_hint(self.trainer.args.output_dir)}"
            ) from error
        if parity is not None:
            parity.refuse()
        return metrics

    def _stopped(self, began: float, number: int) -> TrainingStopped:
        trainer = self.trainer
        for callback in trainer.callback_handler.callbacks:
            if (bar := getattr(callback, "training_bar", None)) is not None:
                bar.close()  # ends the bar's line
        if not trainer.is_world_process_zero():
            return TrainingStopped(number=number)
        step, output = trainer.state.global_step, trainer.args.output_dir
        return TrainingStopped(stop_message(step, output, began, self.checkpoint, self.head_saved), number)

    def _run(self) -> tuple[dict[str, float], Parity | None]:
        """Everything but the parity verdict; each part is on disk before the next begins."""
        trainer, output = self.trainer, Path(str(self.trainer.args.output_dir))
        if self.checkpoint is None and trainer.is_world_process_zero() and _holds_head(output):
            _log.warning("%s holds a finished head: it is replaced when this run ends", output)
        begun = step_of(Path(self.checkpoint)) if self.checkpoint else 0  # training may delete that checkpoint
        metrics = self._metrics_if_finished() or trainer.train(resume_from_checkpoint=self.checkpoint).metrics
        if trainer.restored_step is not None:
            metrics["head_step"] = trainer.restored_step
        with writing(output, output):
            if trainer.is_world_process_zero():
                (output / RESULTS).unlink(missing_ok=True)  # an earlier head's
            trainer.save_model(str(output), _internal_call=True)  # uploaded below, once everything is measured
            self.head_saved = True
            trainer.save_state()
        self._record(output, metrics)
        if trainer.eval_dataset is not None:
            with self._part("the evaluation"):
                metrics |= self._evaluated(begun)
            self._record(output, metrics)
        self._report(output)
        parity = self._parity(metrics.get("train_runtime", 0.0))
        if parity is not None:
            metrics |= parity.metrics
            self._record(output, metrics)
            self._report(output)
            if trainer.is_world_process_zero():
                _log.warning("parity: %s", parity)
        if trainer.args.push_to_hub:
            with self._part("the upload"):
                trainer.push_to_hub()
        return metrics, parity

    def _part(self, name: str) -> contextlib.AbstractContextManager[None]:
        return sparing_the_head(name, self.trainer.failed, self.trainer.args.output_dir)

    def _evaluated(self, begun: int) -> dict[str, float]:
        """Evaluation metrics of the head in memory: those this run, which began at step `begun`, has logged at the
        head's step, else measured now. The log has them once, under that step."""
        trainer, log = self.trainer, self.trainer.state.log_history
        step, last = trainer.head_step, trainer.state.global_step
        known = {
            name: value for entry in log if entry.get("step") == step
            for name, value in entry.items() if name.startswith("eval_")
        }  # fmt: skip
        if known and step > begun:
            return known
        earlier = list(log)
        trainer.state.global_step = step
        try:
            return trainer.evaluate()
        finally:
            trainer.state.global_step = last
            if known:
                trainer.state.log_history = earlier

    def _record(self, output: Path, metrics: dict[str, float]) -> None:
        """Write what the run has measured so far."""
        if not self.trainer.is_world_process_zero():
            return
        with writing(output, output):
            self.trainer.save_state()
            (output / RECIPE).write_text(self.recipe.to_yaml(), "utf8")
            with replacing(output / RESULTS) as path:
                path.write_text(json.dumps(metrics, indent=2, sort_keys=True) + "\n", "utf8")

    def _report(self, output: Path) -> None:
        """Draw the curves and write the card from what `_record` wrote."""
        if not self.trainer.is_world_process_zero():
            return
        with self._part("the figure of the curves"):
            curves.draw(output, self.trainer.state.log_history)
        with self._part("the model card"):
            model = self.trainer.accelerator.unwrap_model(self.trainer.model, keep_fp32_wrapper=False)
            run_card.write(output, model, TrainingRecord.of_folder(output))

    def _metrics_if_finished(self) -> dict[str, float] | None:
        """The metrics of a run that had already taken its last step, with its head restored; transformers (5.23) would
        take one more step each time, or none and report a loss of 0. None if there is something left to do."""
        trainer, arguments = self.trainer, self.trainer.args
        if self.checkpoint is None or launch.kind_of(trainer.accelerator) not in WHOLE:
            return None
        state = TrainerState.load_from_json(str(Path(self.checkpoint) / STATE))
        by_steps, patience = arguments.max_steps > 0, self.recipe.early_stopping
        left = state.global_step < arguments.max_steps if by_steps else (state.epoch or 0) < arguments.num_train_epochs
        if left and (patience is None or evaluations_waited(state) < patience):
            return None
        trainer.refuse_other_run(Path(self.checkpoint))
        best = state.best_model_checkpoint if trainer.args.load_best_model_at_end else None
        restored = best if best and Path(best).is_dir() else None
        trainer._load_from_checkpoint(restored or self.checkpoint)
        trainer.restored_step = step_of(Path(restored)) if restored else None
        trainer.note_length_of(Path(self.checkpoint))
        trainer.state = state
        return {"train_loss": next((entry["loss"] for entry in reversed(state.log_history) if "loss" in entry), 0.0)}

    def _parity(self, trained: float) -> Parity | None:
        """Parity, measured on the first process and sent to all; None if nothing can be decoded. trained: seconds."""
        trainer, kind = self.trainer, launch.kind_of(self.trainer.accelerator)
        parity = None
        if trainer.is_world_process_zero() and self.recipe.parity.prompts:
            if self.recipe.features:
                _log.warning(
                    "parity: not compared, because the base is not in memory; run `specheads parity %s --data ROWS`",
                    trainer.args.output_dir,
                )
            elif kind in SHARDED:
                _log.warning(
                    "parity: not compared, because %s has sharded the model; run `specheads parity %s --data ROWS`",
                    kind, trainer.args.output_dir,
                )  # fmt: skip
            else:
                with self._part("the parity gate"):
                    parity = self._compare(gate_seconds(self.recipe.evaluation_share, trained))
        (parity,) = broadcast_object_list([parity])
        return parity

    def _compare(self, seconds: float) -> Parity | None:
        trainer, config = self.trainer, self.recipe.parity
        model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
        rows: Any = trainer.eval_dataset if trainer.eval_dataset is not None else trainer.train_dataset
        with contextlib.ExitStack() as stack:
            report = None
            if not trainer.args.disable_tqdm:
                bar = terminal.progress(terminal.make_console(stderr=True), "parity gate")
                report = stack.enter_context(bar)
            processor = getattr(trainer.data_collator, "processor", None)
            parity = compare(model, prompts_of(rows, config), config, report, seconds, processor)
        if parity is None:
            _log.warning("parity: not compared, because the base answered every prompt with a single token")
        return parity

    def summary(self, metrics: dict[str, float]) -> str:
        """The result of train() in one line."""
        figures = {
            "mean training loss": metrics["train_loss"] if "eval_loss" not in metrics else None,
            "held-out loss": metrics.get("eval_loss"), "held-out accepted length": metrics.get("eval_accepted_length"),
        }  # fmt: skip
        shown = ", ".join(f"{name} {value:.4g}" for name, value in figures.items() if value is not None)
        step = metrics.get("head_step")
        best = "" if step is None else f" (the head of step {step}, the best)"
        return f"saved {self.trainer.args.output_dir}: {shown}{best}"


def evaluations_waited(state: TrainerState) -> int:
    """How many evaluations in a row, up to this state, were no better than the best."""
    callbacks: Any = state.stateful_callbacks
    kept = callbacks.get(EarlyStoppingCallback.__name__, {})
    return kept.get("attributes", {}).get("early_stopping_patience_counter", 0)


def _holds_head(folder: Any) -> bool:
    return (Path(folder) / CONFIG).is_file()


def prepare(recipe: Recipe) -> Run:
    """Load and check everything a run needs. RecipeError, LaunchError, or another ValueError or OSError for bad data, a
    bad base or a bad checkpoint."""
    arguments = training_arguments(recipe)
    launch.check(recipe.launch, arguments.world_size)
    checkpoint = resume_point(recipe)
    set_seed(arguments.seed)
    with unsharded(arguments):
        model, train, held_out, collator = saved_parts(recipe) if recipe.features else live_parts(recipe, arguments)
    if first_loads(arguments):
        send_head(model, arguments.device)
    refuse_without_targets(train)
    if held_out is not None:
        share = recipe.evaluation_share
        budget = Budget.of(recipe.training, len(train), len(held_out), share, arguments.world_size)
        held_out = budget.select(held_out)
        if len(held_out) < budget.held_out and arguments.process_index == 0:
            _log.warning(
                "evaluation: %d of %d held-out rows, %d times: at most evaluation_share=%g of the rows trained on "
                "(null for no bound)", budget.evaluated, budget.held_out, budget.evaluations, share,
            )  # fmt: skip
    if recipe.features:
        arguments.remove_unused_columns = False  # they would be removed, as forward() does not name them
    callbacks: list[TrainerCallback] = []
    if recipe.early_stopping is not None:
        stopping = EarlyStoppingCallback(recipe.early_stopping)
        if checkpoint is not None:
            state = TrainerState.load_from_json(str(Path(checkpoint) / STATE))
            stopping.early_stopping_patience_counter = evaluations_waited(state)
        callbacks.append(stopping)
    trainer = SpecTrainer(
        model, arguments, train_dataset=train, eval_dataset=held_out, data_collator=collator, callbacks=callbacks
    )
    trainer.recipe = recipe.to_yaml()
    kind = launch.kind_of(trainer.accelerator)
    launch.check(recipe.launch, trainer.accelerator.num_processes, kind)
    if kind in SHARDED and getattr(model.base, "is_quantized", False):
        raise QuantisedBase
    return Run(trainer, checkpoint, recipe)
