"""ResumableTrainer: the half of SpecTrainer that saves and resumes. Checkpoints leave out the base."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import Trainer, set_seed
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from specheads.losses.metrics import TrainingMeter
from specheads.models.base.lora import is_adapter
from specheads.models.card import TrainingRecord
from specheads.models.checkpoint import correct_copied_name
from specheads.models.files import CONFIG, RESULTS, CheckpointError
from specheads.training.distributed.checkpoints import trained_weights_only
from specheads.training.distributed.launch import kind_of
from specheads.training.distributed.resume import Unlogged, Writers, data_mark, refuse_other_model, writers_of
from specheads.training.errors import STATE, TrainingError, is_finished, sparing_the_head, step_of, writing
from specheads.training.recipe.arguments import SpecTrainingArguments
from specheads.training.report import card as run_card


class ResumableTrainer(Trainer):
    """transformers' Trainer, whose resumed runs are bit-identical to uninterrupted ones.

    recipe: as YAML, if there is one. restored_step: the step whose head was restored at the end as the best, if any.
    failed: what could not be written beside a saved head, such as its card.
    """

    args: SpecTrainingArguments
    recipe: str | None = None
    restored_step: int | None = None
    failed: list[str]
    _training_meter: TrainingMeter
    _longest: Tensor | None = None  # () tokens of the longest text since it was last recorded in the head
    _data: str | None = None  # the data's mark, computed on first use

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """TrainingError if it cannot be written: the partial checkpoint is deleted, and earlier ones stay."""
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.should_save:
            (folder / STATE).unlink(missing_ok=True)  # an earlier run's: it marks a checkpoint as finished
        self._note_trained_length()
        kept: Any = self.state.stateful_callbacks  # in a resumed run only the checkpoint's (transformers 5.23)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, ExportableState):
                kept.setdefault(type(callback).__name__, callback.state())
        try:
            with writing(folder, self.args.output_dir):
                super()._save_checkpoint(model, trial)
        except TrainingError:
            if self.args.should_save:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with trained_weights_only(self.accelerator):
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with trained_weights_only(self.accelerator):
            super()._load_from_checkpoint(*args, **kwargs)

    def _load_best_model(self) -> None:
        with trained_weights_only(self.accelerator):
            super()._load_best_model()
        if is_finished(best := Path(str(self.state.best_model_checkpoint))):  # else transformers has warned
            self.restored_step = step_of(best)

    @property
    def head_step(self) -> int:
        """How many steps the head in memory has been trained for."""
        return self.state.global_step if self.restored_step is None else self.restored_step

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        unlogged = Unlogged([self._training_meter.state()], float(self._tr_loss), self._globalstep_last_logged)
        unlogged.save(output_dir, self.args.process_index, self._writers())
        # The first process writes trainer_state.json next, which marks the checkpoint as complete.
        self.accelerator.wait_for_everyone()

    def _note_trained_length(self) -> None:
        """Record the longest text of all processes, which call this together, in the head and so in its checkpoints."""
        longest = max(gather_object([0 if self._longest is None else int(self._longest)]))
        self.accelerator.unwrap_model(self.model).note_trained_length(longest)
        self._longest = None

    def note_length_of(self, checkpoint: Path) -> None:
        """Record the longest text that the checkpoint's head was trained on."""
        stored = json.loads((checkpoint / CONFIG).read_text("utf8"))
        self.accelerator.unwrap_model(self.model).note_trained_length(stored.get("trained_length"))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        writers = None if checkpoint is None else writers_of(checkpoint, self.args.process_index)
        if checkpoint is None or writers is None:
            return
        if writers.processes != self.args.world_size:
            # transformers would reuse the initial seed, which would repeat the same dropout masks.
            set_seed(self.args.seed + self.state.global_step)
        self.note_length_of(Path(checkpoint))
        unlogged = Unlogged.load(checkpoint, self.args.process_index, self.args.world_size)
        self._training_meter = TrainingMeter.of_states(unlogged.meters, self.args.device)
        self._tr_loss.fill_(unlogged.loss)
        self._total_loss_scalar = -unlogged.loss  # train_loss stays the mean over the steps since the resumption
        self._globalstep_last_logged = unlogged.last_logged

    def _writers(self) -> Writers:
        """This run, as recorded in its checkpoints."""
        rows = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        self._data = self._data or data_mark(self.train_dataset)
        kind, processes = kind_of(self.accelerator), self.args.world_size
        return Writers(processes, rows * processes, kind, self._data, self.args.data_seed)

    def refuse_other_run(self, checkpoint: Path) -> None:
        """ResumeError if a run with another head, base, data or rows per step wrote the checkpoint."""
        refuse_other_model(self.accelerator.unwrap_model(self.model).config, checkpoint)
        if (written := writers_of(checkpoint, self.args.process_index)) is not None:
            self._writers().refuse(written, checkpoint, other_rows=self.args.ignore_data_skip)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save the head without its base. state_dict: as gathered by a launcher that shards parameters."""
        if self.args.should_save:
            model = self.accelerator.unwrap_model(self.model)
            if self._longest is not None:  # between checkpoints, which record it over all processes
                model.note_trained_length(int(self._longest))
            folder = output_dir or self.args.output_dir
            model.save_pretrained(folder, state_dict=state_dict)
            with sparing_the_head("the model card", self.failed, folder):
                run_card.write(Path(str(folder)), model, self.record())

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """transformers' method, which copies the head into the run's folder and uploads that; then fixes the base's
        path."""
        if self.recipe is not None and self.is_world_process_zero():
            (Path(str(self.args.output_dir)) / RESULTS).unlink(missing_ok=True)  # an earlier run's
        super()._push_from_checkpoint(checkpoint_folder)
        if self.is_world_process_zero():
            correct_copied_name(Path(checkpoint_folder), Path(str(self.args.output_dir)))

    def create_model_card(  # type: ignore[override]
        self, *, license: str | None = None, model_name: str | None = None, **options: Any
    ) -> None:
        """Write the head's own card before an upload; transformers' would replace it, and call the head a model."""
        if options:
            raise TypeError(f"the card of a head is written from its run: leave out {', '.join(sorted(options))}")
        if self.is_world_process_zero():
            folder, model = Path(str(self.args.output_dir)), self.accelerator.unwrap_model(self.model)
            with sparing_the_head("the model card", self.failed, folder):
                record = self.record() if self.recipe is None else TrainingRecord.of_folder(folder)
                run_card.write(folder, model, record, self.hub_model_id, license)

    def record(self) -> TrainingRecord:
        """What a model card says about the run so far."""
        steps, processes = self.state.global_step, self.args.world_size
        trained = [] if self.recipe else run_card.describe_training(self.args, steps, self.train_dataset, processes)
        return TrainingRecord(
            history=self.state.log_history, recipe=self.recipe, trained=trained, restored_step=self.restored_step
        )

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        missing = [name for name in load_result.missing_keys if name.startswith("head.") or is_adapter(name)]
        if missing or load_result.unexpected_keys:
            raise CheckpointError(
                f"the checkpoint does not fit this head: missing {missing}, unexpected {load_result.unexpected_keys}; "
                "resume with the recipe it was trained with"
            )
