"""Every kind of head, trained under ZeRO by as many processes as start this: arguments ZEROn FOLDER."""

import json
import sys
from pathlib import Path
from unittest import mock

from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from specheads.heads import parallel
from specheads.models.convert import convert
from tests.support.tiny_models import tiny_llama
from tests.support.trainers import rows, trainer_of

# Nothing is drawn at random, so that a run of two processes is that of one.
LORA = {"r": 2, "lora_dropout": 0.0, "target_modules": ["q_proj", "down_proj"]}
HEADS = {
    "medusa": ("medusa", {"num_heads": 2}),
    "medusa2": ("medusa", {"num_heads": 2, "lora": LORA}),
    "hydra": ("hydra", {"num_heads": 2, "prefix_layer": True}),
    "eagle": ("eagle", {"metric_steps": 2, "noise": 0.0}),
    "eagle3": ("eagle3", {"steps": 2, "dpace": 0.5}),
    "mtp": ("mtp", {"steps": 2}),
    "parallel": ("parallel", {"block_size": 2, "markov_rank": 4, "confidence": True, "draft_vocab_size": 60}),
}
ZERO = {
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
    "zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True, "stage3_param_persistence_threshold": 0},
}  # fmt: skip


def trained(name, folder, processes, **options):
    kind, head = HEADS[name]
    unset_hf_deepspeed_config()  # an earlier trainer's, under which transformers would build this base in shards
    # Blocks of a row take one to three passes, so that processes differ in how many their rows ask for.
    with mock.patch.dict(parallel.SLOTS_AT_ONCE, cpu=8):
        settings = {
            "max_steps": 3, "per_device_train_batch_size": 2 // processes, "gradient_accumulation_steps": 2,
            "learning_rate": 1e-3, "lr_scheduler_type": "constant",
        }  # fmt: skip
        model = convert(tiny_llama(num_hidden_layers=3), kind, **head)
        trainer = trainer_of(folder, model, data=rows(11), evaluation=rows(5, seed=1), **settings, **options)
        trainer.train()
        trainer.evaluate()
        trainer.save_model(str(folder))
    return trainer


if __name__ == "__main__":
    stage, folder = int(sys.argv[1].removeprefix("zero")), Path(sys.argv[2])
    zero = {**ZERO, "zero_optimization": {**ZERO["zero_optimization"], "stage": stage}}
    for name in sys.argv[3:] or HEADS:
        run = trained(name, folder / name, 2, deepspeed=zero)
        if run.is_world_process_zero():
            (folder / f"{name}.json").write_text(json.dumps(run.state.log_history))
    run.accelerator.wait_for_everyone()
    run.accelerator.end_training()
