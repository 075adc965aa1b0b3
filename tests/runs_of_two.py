"""The runs that test_resume_world.py compares, by as many processes as start this: python runs_of_two.py FOLDER."""

import json
import sys
from pathlib import Path

import torch
from trainers import model_of, rows, trainer_of

STEPS, SAVED = 6, 3
KINDS = ("medusa", "eagle3", "eagle", "parallel")
DRAWING = {  # heads that learn of what is drawn at random: noise, or a few of a row's starts
    "medusa": {}, "eagle3": {"draft_vocab_size": None, "anchors": 4}, "eagle": {"noise": 0.2},
    "parallel": {"draft_vocab_size": None, "anchors": 3},
}  # fmt: skip


def run(folder, kind, processes, checkpoint=None, **options):
    """4 rows a step, of 7: the last step of an epoch has 3, and checkpoint-3 is in the middle of the second epoch and
    between two logs."""
    settings = {
        "max_steps": STEPS, "save_strategy": "steps", "save_steps": SAVED, "logging_steps": 2, "seed": 5,
        "per_device_train_batch_size": 2 // processes, "gradient_accumulation_steps": 2,
    }  # fmt: skip
    model = model_of(kind, seed=9 if checkpoint else 0, **DRAWING[kind])
    trainer = trainer_of(folder, model, data=rows(7), **{**settings, **options})
    torch.manual_seed(123)
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for kind in KINDS:
        run(folder / f"{kind}-by-two", kind, 2)
        resumed = run(
            folder / f"{kind}-resumed-by-two", kind, 2, str(folder / f"{kind}-by-one" / f"checkpoint-{SAVED}")
        )
        if resumed.is_world_process_zero():
            (folder / f"{kind}.json").write_text(json.dumps(resumed.state.log_history))
            resumed.save_model(str(folder / f"{kind}-resumed-by-two"))
    resumed.accelerator.wait_for_everyone()
    resumed.accelerator.end_training()
