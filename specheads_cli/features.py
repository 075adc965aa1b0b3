"""specheads features."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from specheads_cli.app import Json, app, emit
from specheads_cli.complete import complete_recipe
from specheads_cli.shipped import find_recipe


@app.command()
def features(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="YAML file, or the name of a shipped one (see `specheads recipes`).",
            autocompletion=complete_recipe("train"),
        ),
    ],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Over the recipe's.")] = None,
    output: Annotated[Path, typer.Option(help="Folder to fill, or to resume.")] = Path("features"),
    taps: Annotated[
        str | None, typer.Option(help="Layers to save, as 2,16,29 (default: those the recipe's head reads).")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float16, float32, float8_e4m3fn; auto: what the base runs in.")
    ] = "auto",
    teacher_probs: Annotated[
        str,
        typer.Option(
            "--teacher-probs",
            "--law",
            help="What is saved of the base's probabilities: hidden (its last state), a number of likeliest tokens "
            "(and the rest as one), or none. --law is the old name.",
        ),
    ] = "hidden",
    batch_size: Annotated[int, typer.Option(help="Rows of a pass.")] = 8,
    shard_mb: Annotated[float, typer.Option(help="Megabytes of a file, roughly.")] = 512,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before the disk is filled.")] = False,
    as_json: Json = False,
) -> None:
    """Save what a recipe's base sees of its data, for training without it: specheads train RECIPE features=DIR.

    A stopped run resumes. For several GPUs: accelerate launch train/features.py RECIPE.

    \b
    Examples:
      specheads features eagle3 --output features/llama data.train=own.jsonl
      specheads features eagle3 --output features/small --dtype float8_e4m3fn --teacher-probs 64 --yes
    """
    file = find_recipe(recipe, "train")
    from specheads.cli.commands import features as command
    from specheads.training.distributed.launch import LaunchError

    try:
        saved = command.run(
            file, overrides or [], output, taps=taps, yes=yes, dtype=dtype, teacher_probs=teacher_probs,
            batch_size=batch_size, shard_mb=shard_mb,
        )  # fmt: skip
    except LaunchError as error:
        raise ValueError(str(error)) from error
    if as_json:
        emit({**asdict(saved), "folder": str(saved.folder)})
    else:
        print(command.summary(saved))
