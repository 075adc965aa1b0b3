"""SpecTrainer: transformers' Trainer with what heads need: accepted length in every log, learning rates per group,
checkpoints without the base (`resumable.py`)."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import EvalLoopOutput, TrainOutput, get_last_checkpoint

from specheads.data.batches import documents_of
from specheads.decoding.planner import StaticTree
from specheads.heads.vocabulary import DraftVocabulary
from specheads.losses.metrics import AcceptanceMeter, TrainingMeter
from specheads.models.convert import explain_frozen, is_frozen_base
from specheads.models.spec_model import SpecModel, SpecOutput
from specheads.training.distributed import launch
from specheads.training.distributed.checkpoints import patch_engine
from specheads.training.distributed.launch import LaunchConfig, kind_of
from specheads.training.distributed.resume import refuse_head_alone
from specheads.training.distributed.sharded_base import first_loads, patch_prepare
from specheads.training.errors import TrainingError, resume_hint
from specheads.training.recipe.arguments import SpecTrainingArguments as SpecTrainingArguments
from specheads.training.report.log import AcceptanceProgress as AcceptanceProgress
from specheads.training.report.log import Pace, printer_for
from specheads.training.trainer.best_metric import refuse_absent_metric
from specheads.training.trainer.optim import MuonAdamW, parameter_groups
from specheads.training.trainer.resumable import ResumableTrainer
from specheads.training.trainer.rows import EndlessRows, EvenCollator, SeededLengthGroups, mask_repeats, prepared

_log = logging.getLogger(__name__)


class SpecTrainer(ResumableTrainer):
    """Trains the head of a SpecModel.

    train_dataset, eval_dataset: rows with input_ids, and labels (−100 where a token is not learnt), a loss_mask or
    neither; or rows of text or chats, which processing_class, a tokenizer, then turns into tokens. Rows with nothing to
    learn are left out, with a warning. data_collator: by default one that pads with `Collator`.

    Logs accepted_length, accuracy_depth_k and the head's loss terms over everything since the last log, and tokens_seen
    (supervised) and cpu_seconds (of all processes; what a killed process had not logged is lost) over the whole run.
    Evaluations report them as eval_…, exact over the whole evaluation set, with AcceptanceMeter's metrics for the
    head's tree and for sampling. A step's loss is that of its global batch: a mean over all supervised tokens, however
    many micro-batches and processes share it.
    """

    def __init__(self, model: SpecModel, args: SpecTrainingArguments, **kwargs: Any) -> None:
        if is_frozen_base(model):
            raise ValueError(explain_frozen(model))
        if not isinstance(model, SpecModel):
            raise ValueError(f"SpecTrainer trains a SpecModel, not {type(model).__name__}: make one with convert()")
        if not isinstance(args, SpecTrainingArguments):
            raise TypeError(
                "args must be specheads.SpecTrainingArguments, which takes all options of TrainingArguments; got "
                f"{type(args).__name__}"
            )
        for name in ("compute_metrics", "preprocess_logits_for_metrics"):
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{name} would never be called, as the evaluation of a head keeps no logits: leave it out, and "
                    "read its own figures, eval_accepted_length and others"
                )
        if args.n_gpu > 1:
            raise ValueError(
                f"one process sees {args.n_gpu} GPUs: start one process a GPU with `accelerate launch` or `torchrun`, "
                "or choose one with CUDA_VISIBLE_DEVICES"
            )
        self.failed = []
        self._training_meter, self._evaluation_meter = TrainingMeter(), TrainingMeter()
        self._pace = Pace()
        self._cpu_logged = time.process_time()
        head = model.head
        if isinstance(head, DraftVocabulary) and head.narrow and not head.d2t.any():
            _log.warning(
                "the head drafts no tokens but the first %d of %d, which are rarely the commonest: count those of the "
                "data, model.head.set_draft_vocabulary(token_counts(rows, %d), model.base)",
                len(head.d2t), len(head.t2d), len(head.t2d),
            )  # fmt: skip
        with args.main_process_first(desc="reading the rows"):
            kwargs |= prepared(model, **kwargs)
        if getattr(kwargs["data_collator"], "processor", None) is not None:
            args.remove_unused_columns = False  # the images, which the collator reads
        super().__init__(model, args, **kwargs)
        if args.muon and self.is_deepspeed_enabled:
            raise ValueError(
                "muon=true steps on whole matrices, which DeepSpeed flattens: launch with accelerate/fsdp2 or "
                "accelerate/ddp (see `specheads recipes`), or give muon=false"
            )
        for callback in list(self.callback_handler.callbacks):
            if (printer := printer_for(callback, self._pace)) is not None:
                self.remove_callback(callback)
                self.add_callback(printer)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if first_loads(self.args):  # before a model without weights is moved to the device
            launch.check(LaunchConfig(), self.args.world_size, kind_of(self.accelerator))
        patch_prepare(self.accelerator)

    # Loss and reports

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:  # fmt: skip
        tokens = supervised_tokens(inputs)
        unwrapped, step = self.accelerator.unwrap_model(model), self.state.global_step
        seed = self.args.seed % 2**31  # leaves room for the step in 64 bits
        unwrapped.progress, unwrapped.draw_seed = step / max(1, self.state.max_steps), seed << 32 | step
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        refuse_not_finite(loss.detach(), "loss", self.state.global_step + 1, self.args.output_dir)
        divisor = tokens.clamp_min(1) if num_items_in_batch is None else num_items_in_batch
        self._training_meter.add(outputs.ranks, outputs.terms or {}, divisor, tokens)
        length = longest_text(inputs)
        self._longest = length if self._longest is None else torch.maximum(self._longest, length)
        return (loss, outputs) if return_outputs else loss

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        sampler = super()._get_train_sampler(*args, **kwargs)
        if not isinstance(sampler, LengthGroupedSampler):
            return sampler
        assert self.args.data_seed is not None
        # Grouped by the rows of a global step, so that it has the same ones however many processes share it.
        rows = sampler.batch_size * self.args.world_size
        return SeededLengthGroups(rows, sampler.lengths, self.args.data_seed)

    def get_train_dataloader(self) -> DataLoader:
        rows = self.train_dataset
        if not isinstance(rows, IterableDataset) or hasattr(rows, "__len__"):
            return super().get_train_dataloader()
        self.train_dataset = EndlessRows(rows)
        try:
            return super().get_train_dataloader()
        finally:
            self.train_dataset = rows

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader:
        """A loader over all rows: transformers (5.23) would drop the last batch if dataloader_drop_last is true."""
        drop_last, self.args.dataloader_drop_last = self.args.dataloader_drop_last, False
        try:
            return super().get_eval_dataloader(*args, **kwargs)
        finally:
            self.args.dataloader_drop_last = drop_last

    def _get_dataloader(self, dataset: Any, description: str, batch_size: int, *args: Any, **kwargs: Any) -> DataLoader:
        """If the first process reads for all, it reads everyone's rows as one batch: accelerate (1.15) cannot
        concatenate batches of unequal width."""
        config, collator, processes = self.accelerator.dataloader_config, self.data_collator, self.args.world_size
        streamed = isinstance(dataset, IterableDataset)
        if processes == 1 or not (streamed if config.dispatch_batches is None else config.dispatch_batches):
            return super()._get_dataloader(dataset, description, batch_size, *args, **kwargs)
        config.split_batches, self.data_collator = True, EvenCollator(collator, processes)
        try:
            return super()._get_dataloader(dataset, description, batch_size * processes, *args, **kwargs)
        finally:
            config.split_batches, self.data_collator = False, collator

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        state = self.accelerator.gradient_state
        batches = (mask_repeats(batch, state) for batch in epoch_iterator)
        return super().get_batch_samples(batches, num_batches, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        # Trainer counts only labels; a batch may mark its tokens with loss_mask instead.
        if batch_samples and "labels" not in batch_samples[0] and "loss_mask" in batch_samples[0]:
            batch_samples = [{"labels": torch.where(batch["loss_mask"].bool(), 0, -100)} for batch in batch_samples]
        return super()._get_num_items_in_batch(batch_samples, device)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            states = gather_object([self._training_meter.state()])
            logs.update(TrainingMeter.combined(states))
            tokens, cpu_seconds = sum(int(state["tokens"][0]) for state in states), time.process_time()
            self._pace.tokens += tokens
            if not tokens and self.is_world_process_zero():
                _log.warning("step %d: no row since the last log had a token to learn from", self.state.global_step)
            self._training_meter = TrainingMeter()
            spent = sum(gather_object([cpu_seconds - self._cpu_logged]))
            before = next((entry for entry in reversed(self.state.log_history) if "tokens_seen" in entry), {})
            logs["tokens_seen"] = before.get("tokens_seen", 0) + tokens
            logs["cpu_seconds"] = before.get("cpu_seconds", 0.0) + spent
            self._cpu_logged = cpu_seconds
        if "train_loss" in logs:  # at the end: for steps since the last log it covers only this process
            shares = gather_object([logs["train_loss"]])
            logs["train_loss"] = sum(shares) / len(shares)
        super().log(logs, *args, **kwargs)

    def _report(self, meter: TrainingMeter) -> dict[str, float]:
        return TrainingMeter.combined(gather_object([meter.state()]), meter.acceptance.tree)

    def evaluation_loop(
        self, dataloader: Any, description: str, prediction_loss_only: bool | None = None, ignore_keys: Any = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:  # fmt: skip
        self._evaluation_meter = TrainingMeter(AcceptanceMeter(self._scored_tree()))
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        assert output.metrics is not None and output.num_samples is not None
        output.metrics[f"{metric_key_prefix}_rows"] = output.num_samples
        for name, value in self._report(self._evaluation_meter).items():
            output.metrics[f"{metric_key_prefix}_{name}"] = value
        return output

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        try:
            return super()._determine_best_metric(metrics, trial)
        except KeyError:
            known = ", ".join(sorted(name.removeprefix("eval_") for name in metrics if name.startswith("eval_")))
            raise TrainingError(
                f"training.metric_for_best_model={self.args.metric_for_best_model}: this head's evaluation has {known}"
            ) from None

    def _scored_tree(self) -> StaticTree | None:
        """The tree the head will draft, if its shape is fixed."""
        plan = self.accelerator.unwrap_model(self.model).head.default_plan(self.args.device, do_sample=False)
        return plan if isinstance(plan, StaticTree) else None

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        inputs = mask_repeats(self._prepare_inputs(inputs), self.accelerator.gradient_state)
        tokens = supervised_tokens(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs: SpecOutput = model(**inputs)
        assert outputs.loss is not None
        loss = outputs.loss.detach()
        terms = {"loss": loss, **(outputs.terms or {})}
        divisor = tokens.clamp_min(1)
        self._evaluation_meter.add(outputs.ranks, terms, divisor, tokens, outputs.overlaps, outputs.positions)
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
        # The only hook that transformers calls between creating the engine and loading a checkpoint with it.
        if self.is_deepspeed_enabled:
            patch_engine(self.accelerator.deepspeed_engine_wrapped.engine)
        return super().create_scheduler(num_training_steps, optimizer)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if norm is not None and self.accelerator.scaler is None:  # a scaler skips such steps and lowers its scale
            refuse_not_finite(norm, "gradient", self.state.global_step + 1, self.args.output_dir)
        return norm

    # Training

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """As in transformers. ResumeError, a ValueError, for a checkpoint that this run could not resume as its writer
        would have."""
        if resume_from_checkpoint:
            checkpoint = (
                get_last_checkpoint(self.args.output_dir) if resume_from_checkpoint is True else resume_from_checkpoint
            )
            if checkpoint is not None:
                self.refuse_other_run(Path(checkpoint))
                refuse_head_alone(Path(checkpoint), kind_of(self.accelerator))
        self._refuse_no_batch()
        head = self.accelerator.unwrap_model(self.model).head
        refuse_absent_metric(self.args, self.eval_dataset, head.scored_depths, self._scored_tree())
        if kind_of(self.accelerator) == "ddp" and not isinstance(self.model_wrapped, DistributedDataParallel):
            self._undo_evaluation()
        self._cpu_logged, self.restored_step = time.process_time(), None
        self._training_meter, self._pace.tokens = TrainingMeter(), 0  # drop what an earlier run had not logged
        output = super().train(resume_from_checkpoint, *args, **kwargs)
        self._note_trained_length()
        return output._replace(training_loss=output.metrics["train_loss"])

    def _undo_evaluation(self) -> None:
        """Undo an earlier evaluation's preparation of the model, which would count as ready to train without DDP
        (accelerate 1.15), so that each process would train on its own."""
        self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)  # training adds the autocast wrapper again
        self.accelerator._models.clear()
        self.model._is_accelerate_prepared = False  # type: ignore[union-attr]
        self.model_wrapped = self.model  # type: ignore[assignment]

    def _refuse_no_batch(self) -> None:
        args, rows = self.args, cast(Any, self.train_dataset)
        batch = args.train_batch_size * args.world_size
        if args.dataloader_drop_last and hasattr(rows, "__len__") and len(rows) < batch:
            raise ValueError(
                f"dataloader_drop_last=true leaves out the last batch that is not whole, and the {len(rows)} rows make "
                f"no batch of {batch}: leave it out, or give a lower per_device_train_batch_size"
            )


def supervised_tokens(inputs: Mapping[str, Any]) -> Tensor:
    """() int64: how many tokens of the batch are supervised."""
    if inputs.get("labels") is not None:
        return (inputs["labels"] != -100).sum()
    if inputs.get("loss_mask") is not None:
        return inputs["loss_mask"].bool().sum()
    raise ValueError(f"a batch has {sorted(inputs)}: expected labels or loss_mask; data.Collator makes them")


def longest_text(inputs: Mapping[str, Any]) -> Tensor:
    """() int64, the tokens of the longest document of a training batch: a row, or a packed part of one."""
    ids, documents, mask = inputs["input_ids"], inputs.get("document_ids"), inputs.get("attention_mask")
    if documents is None and (positions := inputs.get("position_ids")) is not None:
        documents = documents_of(positions, torch.ones_like(ids) if mask is None else mask)
    if documents is not None:
        index = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        starts = torch.ones_like(documents, dtype=torch.bool)
        starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
        lengths = index - torch.where(starts, index, 0).cummax(1).values + 1
        return torch.where(documents > 0, lengths, 0).max()
    if mask is not None:
        return mask.long().sum(1).max()
    return torch.tensor(ids.shape[1], device=ids.device)


def refuse_not_finite(value: Any, what: str, step: int, output_dir: Any) -> None:
    """TrainingError if a loss or a gradient norm is not finite."""
    number = float(value)
    if not math.isfinite(number):
        raise TrainingError(
            f"step {step}: the {what} is {number}, and the step was not taken; {resume_hint(output_dir)}, with a lower "
            "training.learning_rate or training.max_grad_norm, in bf16 instead of fp16, or without that step's rows"
        )
