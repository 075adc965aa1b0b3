"""SpecTrainer: transformers' Trainer with what heads need: accepted length in every log, learning rates per group,
checkpoints of the head alone."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import ProgressCallback, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput, TrainOutput, get_last_checkpoint

from specheads import zero
from specheads.faults import STATE, TrainingError, go_on, is_unwritten, refuse_not_finite
from specheads.fsdp import trained_alone
from specheads.joint import is_adapter
from specheads.launch import kind_of
from specheads.metrics import AcceptanceMeter, TrainingMeter
from specheads.optim import MuonAdamW, parameter_groups
from specheads.planner import StaticTree
from specheads.repeats import without_repeats
from specheads.resume import Unlogged, Writers, writers_of
from specheads.saved_head import CheckpointError
from specheads.spec_model import SpecModel, SpecOutput

_ADAMW = ("adamw_torch", "adamw_torch_fused")


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
        metadata={"help": "torch.optim.Muon on the head's hidden matrices, AdamW on the rest."},
    )

    def __post_init__(self) -> None:
        if self.use_cpu and int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.distributed.is_initialized():
            # transformers 5.23 hands ddp_timeout on for GPUs alone: a process that hangs would hang the others.
            PartialState(cpu=True, backend=self.ddp_backend, timeout=timedelta(seconds=self.ddp_timeout))
        super().__post_init__()
        if self.data_seed is None:
            # Else the order of the rows hangs on what drew random numbers before train(), and a resumed run differs.
            self.data_seed = self.seed
        if isinstance(self.head_lr_groups, str):
            self.head_lr_groups = json.loads(self.head_lr_groups)
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
            raise ValueError(f"muon=true goes with optim {' or '.join(_ADAMW)}, not {str(self.optim)!r}")

    @property
    def lr_multipliers(self) -> Mapping[str, float]:
        groups = self.head_lr_groups or {}
        if not isinstance(groups, Mapping):
            raise ValueError(f"head_lr_groups={groups!r}: expected {{regular expression: factor}}")
        return groups


class AcceptanceProgress(ProgressCallback):
    """transformers' progress bar with the accepted length and the loss behind it; evaluations are written above it."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.training_bar is None or not logs:
            return
        if "loss" not in logs:
            super().on_log(args, state, control, logs=logs, **kwargs)
            return
        shown = {"accepted": logs.get("accepted_length"), "loss": logs["loss"], "lr": logs.get("learning_rate")}
        self.training_bar.set_postfix({k: f"{float(v):.4g}" for k, v in shown.items() if v is not None})


class SpecTrainer(Trainer):
    """Trains the head of a SpecModel.

    Logs accepted_length, accuracy_depth_k and the head's loss terms, over everything since the last log; evaluations
    report them as eval_…, exact over the whole evaluation set, and those that metrics.AcceptanceMeter makes of the
    head's tree and of sampling. The loss of a step is that of its global batch: a mean
    over all supervised tokens, whatever the micro-batches and processes it was cut into.
    """

    args: SpecTrainingArguments

    def __init__(self, model: SpecModel, args: SpecTrainingArguments, **kwargs: Any) -> None:
        if not isinstance(model, SpecModel):
            raise ValueError(f"SpecTrainer trains a SpecModel, not {type(model).__name__}: make one with convert()")
        if args.n_gpu > 1:
            raise ValueError(
                f"one process sees {args.n_gpu} GPUs: start one process a GPU with `accelerate launch` or `torchrun`, "
                "or choose one with CUDA_VISIBLE_DEVICES"
            )
        self._training_meter, self._evaluation_meter = TrainingMeter(), TrainingMeter()
        super().__init__(model, args, **kwargs)
        if args.muon and self.is_deepspeed_enabled:
            raise ValueError(
                "muon=true steps on whole matrices, which DeepSpeed flattens: use recipes/accelerate/fsdp2.yaml or "
                "ddp.yaml, or muon=false"
            )
        if any(type(callback) is ProgressCallback for callback in self.callback_handler.callbacks):
            self.remove_callback(ProgressCallback)
            self.add_callback(AcceptanceProgress)

    # Loss and reports

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:  # fmt: skip
        tokens = supervised_tokens(inputs)
        told, step = self.accelerator.unwrap_model(model), self.state.global_step
        told.progress, told.draw_seed = step / max(1, self.state.max_steps), self.args.seed << 32 | step
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        refuse_not_finite(loss.detach(), "loss", self.state.global_step + 1, self.args.output_dir)
        divisor = tokens.clamp_min(1) if num_items_in_batch is None else num_items_in_batch
        self._training_meter.add(outputs.ranks, outputs.terms or {}, divisor, tokens)
        return (loss, outputs) if return_outputs else loss

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        state = self.accelerator.gradient_state
        own = (without_repeats(batch, state) for batch in epoch_iterator)
        return super().get_batch_samples(own, num_batches, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        # Trainer counts labels only; a batch may name its tokens by loss_mask instead.
        if batch_samples and "labels" not in batch_samples[0] and "loss_mask" in batch_samples[0]:
            batch_samples = [{"labels": torch.where(batch["loss_mask"].bool(), 0, -100)} for batch in batch_samples]
        return super()._get_num_items_in_batch(batch_samples, device)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs.update(self._report(self._training_meter))
            self._training_meter = TrainingMeter()
        super().log(logs, *args, **kwargs)

    def _report(self, meter: TrainingMeter) -> dict[str, float]:
        return TrainingMeter.combined(gather_object([meter.state()]), meter.acceptance.tree)

    def evaluation_loop(
        self, dataloader: Any, description: str, prediction_loss_only: bool | None = None, ignore_keys: Any = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:  # fmt: skip
        self._evaluation_meter = TrainingMeter(AcceptanceMeter(self._scored_tree()))
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        assert output.metrics is not None
        for name, value in self._report(self._evaluation_meter).items():
            output.metrics[f"{metric_key_prefix}_{name}"] = value
        return output

    def _scored_tree(self) -> StaticTree | None:
        """The tree the head will draft, where its shape is fixed."""
        plan = self.accelerator.unwrap_model(self.model).head.default_plan(self.args.device, do_sample=False)
        return plan if isinstance(plan, StaticTree) else None

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        inputs = without_repeats(self._prepare_inputs(inputs), self.accelerator.gradient_state)
        tokens = supervised_tokens(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs: SpecOutput = model(**inputs)
        assert outputs.loss is not None
        loss = outputs.loss.detach()
        terms = {"loss": loss, **(outputs.terms or {})}
        self._evaluation_meter.add(outputs.ranks, terms, tokens.clamp_min(1), tokens, outputs.overlaps)
        return loss, None, None

    # Optimizer

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is not None or not (self.args.muon or self.args.lr_multipliers):
            return super().create_optimizer(*([] if model is None else [model]))
        args, module = self.args, self.model if model is None else model
        assert isinstance(module, nn.Module)
        groups = parameter_groups(
            module.named_parameters(),
            learning_rate=args.learning_rate,
            weight_decay=args.weight_decay,
            decayed=self.get_decay_parameter_names(module),
            multipliers=args.lr_multipliers,
        )
        if args.muon:
            self.optimizer = MuonAdamW(groups, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_epsilon)
        else:
            kind, options = self.get_optimizer_cls_and_kwargs(args, module)  # type: ignore[arg-type]
            groups = [{key: value for key, value in group.items() if key != "names"} for group in groups]
            self.optimizer = kind(groups, **options)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        # Between making the engine and reading a checkpoint with it, transformers asks for nothing else.
        if self.is_deepspeed_enabled:
            zero.attend(self.accelerator.deepspeed_engine_wrapped.engine)
        return super().create_scheduler(num_training_steps, optimizer)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if norm is not None and self.accelerator.scaler is None:  # a scaler leaves out such steps and lowers its scale
            refuse_not_finite(norm, "gradient", self.state.global_step + 1, self.args.output_dir)
        return norm

    # Checkpoints

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """TrainingError where it cannot be written: what there is of it goes, and earlier ones stay."""
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.should_save:
            (folder / STATE).unlink(missing_ok=True)  # of an earlier run: until all is written it is not finished
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, RuntimeError, SafetensorError) as error:
            if not is_unwritten(error):
                raise
            if self.args.should_save:
                shutil.rmtree(folder, ignore_errors=True)
            reason = " ".join(str(error).split())[:200]
            raise TrainingError(
                f"{folder} could not be written ({reason}); {go_on(self.args.output_dir)}, once there is room"
            ) from error

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with trained_alone(self.accelerator):
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with trained_alone(self.accelerator):
            super()._load_from_checkpoint(*args, **kwargs)

    def _load_best_model(self) -> None:
        with trained_alone(self.accelerator):
            super()._load_best_model()

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        unlogged = Unlogged([self._training_meter.state()], float(self._tr_loss), self._globalstep_last_logged)
        unlogged.save(output_dir, self.args.process_index, self._writers())
        # The first process writes trainer_state.json next, which says that the checkpoint is whole.
        self.accelerator.wait_for_everyone()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        writers = None if checkpoint is None else writers_of(checkpoint, self.args.process_index)
        if checkpoint is None or writers is None:
            return
        if writers.processes != self.args.world_size:
            # transformers goes on with the numbers the run began with, which would drop the same weights once more.
            set_seed(self.args.seed + self.state.global_step)
        unlogged = Unlogged.load(checkpoint, self.args.process_index, self.args.world_size)
        self._training_meter = TrainingMeter.of_states(unlogged.meters, self.args.device)
        self._tr_loss.fill_(unlogged.loss)
        self._total_loss_scalar = -unlogged.loss  # train_loss stays the mean over the steps since the resumption
        self._globalstep_last_logged = unlogged.last_logged

    def _writers(self) -> Writers:
        """This run as its checkpoints tell of it."""
        rows = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        return Writers(self.args.world_size, rows * self.args.world_size, kind_of(self.accelerator))

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """transformers' own. ResumeError, a ValueError, for a checkpoint that this run would not go on from as the one
        that wrote it."""
        if resume_from_checkpoint:
            found = (
                get_last_checkpoint(self.args.output_dir) if resume_from_checkpoint is True else resume_from_checkpoint
            )
            if found is not None and (written := writers_of(found, self.args.process_index)) is not None:
                self._writers().refuse(written, Path(found), other_rows=self.args.ignore_data_skip)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """The head alone; a launcher that shards parameters passes what it gathered."""
        if self.args.should_save:
            model = self.accelerator.unwrap_model(self.model)
            model.save_pretrained(output_dir or self.args.output_dir, state_dict=state_dict)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        missing = [name for name in load_result.missing_keys if name.startswith("head.") or is_adapter(name)]
        if missing or load_result.unexpected_keys:
            raise CheckpointError(
                f"the checkpoint does not fit this head: missing {missing}, unexpected {load_result.unexpected_keys}; "
                "resume with the recipe it was made with"
            )


def supervised_tokens(inputs: Mapping[str, Any]) -> Tensor:
    """() int64: how many tokens of the batch are supervised."""
    if inputs.get("labels") is not None:
        return (inputs["labels"] != -100).sum()
    if inputs.get("loss_mask") is not None:
        return inputs["loss_mask"].bool().sum()
    raise ValueError(f"a batch has {sorted(inputs)}: expected labels or loss_mask; data.Collator makes them")
