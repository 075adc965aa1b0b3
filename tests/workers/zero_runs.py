"""One of the runs that test_deepspeed.py compares, under ZeRO: arguments STAGE OUTPUT [CHECKPOINT]."""

import json
import os
import sys
from pathlib import Path

from tests.workers.heads_by_two import ZERO
from tests.workers.runs_of_two import run

OPTIONS = {"weight_decay": 0.3, "head_lr_groups": {"fc": 0.1}}  # so that parameter groups differ

if __name__ == "__main__":
    zero = {**ZERO, "zero_optimization": {**ZERO["zero_optimization"], "stage": int(sys.argv[1].removeprefix("zero"))}}
    output, processes = Path(sys.argv[2]), int(os.environ["WORLD_SIZE"])
    trainer = run(output, "eagle3", processes, *sys.argv[3:], deepspeed=zero, **OPTIONS)
    if trainer.is_world_process_zero():
        (output / "log.json").write_text(json.dumps(trainer.state.log_history))
    trainer.save_model(str(output))
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
