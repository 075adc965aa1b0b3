"""The runs that test_resume_world.py compares, by as many processes as call this."""

import json

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from transformers import TrainerCallback

from tests.support.trainers import model_of, rows, trainer_of

STEPS, SAVED = 6, 3
KINDS = ("medusa", "eagle3", "eagle", "parallel")
DRAWING = {  # heads that learn of what is drawn at random: noise, or a few of a row's starts
    "medusa": {}, "eagle3": {"draft_vocab_size": None, "anchors": 4}, "eagle": {"noise": 0.2},
    "parallel": {"draft_vocab_size": None, "anchors": 3},
}  # fmt: skip


class Reductions(TrainerCallback):
    """In which step each sum of gradients over the processes was made."""

    def __init__(self):
        self.steps, self.trainer = [], None

    def on_train_begin(self, args, state, control, **kwargs):
        def counted(_, bucket):
            self.steps.append(state.global_step)
            return allreduce_hook(None, bucket)

        self.trainer.model_wrapped.register_comm_hook(None, counted)


def run(folder, kind, processes, checkpoint=None, callback=None, **options):
    """4 rows a step, of 7: the last step of an epoch has 3, and checkpoint-3 is in the middle of the second epoch and
    between two logs. 5 rows to evaluate on: the last batch of two processes is filled up."""
    settings = {
        "max_steps": STEPS, "save_strategy": "steps", "save_steps": SAVED, "logging_steps": 2, "seed": 5,
        "per_device_train_batch_size": 2 // processes, "gradient_accumulation_steps": 2,
        "per_device_eval_batch_size": 2,
    }  # fmt: skip
    model = model_of(kind, seed=9 if checkpoint else 0, **DRAWING[kind])
    trainer = trainer_of(folder, model, data=rows(7), evaluation=rows(5, 1), **{**settings, **options})
    if callback is not None:
        callback.trainer = trainer
        trainer.add_callback(callback)
    torch.manual_seed(123)
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


def run_by_two(folder, kinds):
    """In each of two processes: whole runs, and runs that resume those of one process."""
    for kind in kinds:
        reductions = Reductions()
        run(folder / f"{kind}-by-two", kind, 2, callback=reductions)
        (folder / f"{kind}-reductions.json").write_text(json.dumps(reductions.steps))
        resumed = run(
            folder / f"{kind}-resumed-by-two", kind, 2, str(folder / f"{kind}-by-one" / f"checkpoint-{SAVED}")
        )
        resumed.evaluate()
        if resumed.is_world_process_zero():
            (folder / f"{kind}.json").write_text(json.dumps(resumed.state.log_history))
            resumed.save_model(str(folder / f"{kind}-resumed-by-two"))
    resumed.accelerator.wait_for_everyone()
    resumed.accelerator.end_training()
