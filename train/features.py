"""Save the base's features for a recipe's data, to train heads on them without the base.

    python train/features.py recipes/eagle3.yaml --output features/llama data.train=own.jsonl
    accelerate launch --config_file recipes/accelerate/ddp.yaml train/features.py recipes/eagle3.yaml --output F --yes
    accelerate launch --config_file recipes/accelerate/ddp.yaml train/heads.py recipes/eagle3.yaml features=F

Each process writes its own files. A stopped run resumes if it is started again with the same options. Options of the
recipe are given as key=value, as for train/heads.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from specheads.cli.errors import listen
from specheads.cli.options.training import FeaturesOptions
from specheads.cli.script import RecipeParser, run_script
from specheads.cli.shipped import find_recipe

FLAGS = ("output", "taps", "dtype", "teacher_probs", "batch_size", "shard_mb", "yes")


def save(arguments: Sequence[str] | None) -> None:
    from accelerate import PartialState

    from specheads.cli.commands import features
    from specheads.training.distributed.launch import wait_for_all
    from specheads.training.features.plan import DTYPES, SaveOptions

    parser = RecipeParser(__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder to fill, or to resume")
    parser.add_argument("--taps", help="layers to save, such as 2,16,29 (default: those that the recipe's head reads)")
    parser.add_argument("--dtype", default=SaveOptions.dtype, help=f"{', '.join(DTYPES)}; auto: the base's")
    parser.add_argument(
        "--teacher-probs", default=SaveOptions.teacher_probs,
        help="what to save of the base's distribution: hidden (the last state), a number of likeliest tokens, or none",
    )  # fmt: skip
    parser.add_argument("--batch_size", type=int, default=SaveOptions.batch_size, help="rows in a forward pass")
    parser.add_argument("--shard_mb", type=float, default=SaveOptions.shard_mb, help="approximate megabytes per file")
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation of the disk space")
    options = vars(parser.parse_intermixed_args(arguments))
    saved = features.save(find_recipe(options["recipe"], "train"), FeaturesOptions(**options))
    if PartialState().is_main_process:
        print(features.summary(saved))
    wait_for_all(PartialState())
    PartialState().destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> int:
    return run_script("train/features.py", lambda: save(arguments), FLAGS)


if __name__ == "__main__":
    listen("train/features.py")
    sys.exit(main())
