"""Train a draft head from a recipe.

    python train/heads.py recipes/eagle3.yaml base=checkpoints/base data.train=rows.jsonl training.output_dir=runs/e3
    accelerate launch --config_file recipes/accelerate/ddp.yaml train/heads.py recipes/medusa.yaml base=my/model
    torchrun --nproc_per_node 2 train/heads.py recipes/eagle.yaml training.use_cpu=true launch.processes=2

    python train/heads.py recipes/eagle3.yaml --dry-run launch.processes=8 launch.distributed=fsdp2

Any option of the recipe can be given as key=value, with dots for sections and values as in YAML:
    head.steps=3  training.learning_rate=1e-4  'data.train=[a.jsonl, b.jsonl]'  training.resume_from_checkpoint=auto
To continue from a trained head: head=null init_from=runs/eagle3

A run ends by decoding held-out prompts and comparing the accepted length with training's estimate for the same text; it
exits with 3 if they differ by more than parity.tolerance (parity.prompts=0 skips this check). Ctrl-C prints where the
run stopped and how to resume it, and exits with 130.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from specheads.cli.errors import listen
from specheads.cli.options.training import TrainOptions
from specheads.cli.script import RecipeParser, run_script


def train(arguments: Sequence[str] | None) -> int:
    parser = RecipeParser(__doc__)
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher adds it
    parser.add_argument("--dry-run", action="store_true", help="print an estimate of what the run will take, and stop")
    words = parser.parse_intermixed_args(arguments)
    options = TrainOptions(recipe=words.recipe, overrides=words.overrides, dry_run=words.dry_run)
    from specheads.cli.commands.train import run

    return run(options, "train/heads.py")


def main(arguments: Sequence[str] | None = None) -> int:
    return run_script("train/heads.py", lambda: train(arguments), ("dry-run",))


if __name__ == "__main__":
    listen("train/heads.py")
    sys.exit(main())
