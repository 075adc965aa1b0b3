"""Trainers of heads on a tiny base, their rows, and what they logged."""

from dataclasses import fields

import datasets
import torch

from specheads.data.datasets import Collator
from specheads.models.convert import convert
from specheads.training.trainer.trainer import SpecTrainer, SpecTrainingArguments
from tests.support.tiny_models import tiny_llama

OPTIONS = {
    "medusa": {"num_heads": 2}, "hydra": {"num_heads": 2, "prefix_layer": True}, "eagle": {"metric_steps": 2},
    "eagle3": {"steps": 2, "draft_vocab_size": 60},
    "mtp": {"steps": 2},
    "parallel": {"block_size": 2, "markov_rank": 4, "anchors": 3, "confidence": True, "draft_vocab_size": 60},
}  # fmt: skip

# What transformers calls the recomputing of activations, since 5.23 and before.
SWITCHES = [
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in {field.name for field in fields(SpecTrainingArguments)}
]


def model_of(kind="eagle3", seed=0, base=None, **options):
    base = tiny_llama(num_hidden_layers=3, **(base or {}))
    torch.manual_seed(seed)
    return convert(base, kind, **{**OPTIONS[kind], **options})


def rows(count=12, seed=0, lengths=(4, 14), masked=1):
    """Rows of unequal lengths, so that a mean of means would show; of each the first tokens are not learnt."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        length = int(torch.randint(*lengths, (1,), generator=generator))
        ids = torch.randint(3, 97, (length,), generator=generator).tolist()
        made.append({"input_ids": ids, "labels": [-100] * masked + ids[masked:]})
    return datasets.Dataset.from_list(made)


def trainer_of(folder, model=None, evaluation=None, callbacks=None, data=None, **options):
    settings = {
        "use_cpu": True, "max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 1,
        "disable_tqdm": True, "report_to": "none", "save_strategy": "no", "seed": 5, "lr_scheduler_type": "linear",
    }  # fmt: skip
    arguments = SpecTrainingArguments(output_dir=str(folder), **{**settings, **options})
    return SpecTrainer(
        model or model_of(), arguments, train_dataset=data or rows(), eval_dataset=evaluation,
        data_collator=Collator(0), callbacks=callbacks,
    )  # fmt: skip


def logged(trainer, *names):
    """What was logged in training: a dict for each log, without times."""
    kept = [entry for entry in trainer.state.log_history if "loss" in entry]
    timed = ("cpu_seconds",)
    return [{k: v for k, v in entry.items() if (k in names if names else k not in timed)} for entry in kept]


def weights(model):
    return {name: tensor.clone() for name, tensor in model.head.state_dict().items()}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
