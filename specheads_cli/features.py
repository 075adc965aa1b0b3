"""specheads features."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from specheads_cli.app import Json, Overrides, Recipe, app, emit
from specheads_cli.recipe_options import RecipeCommand
from specheads_cli.shipped import find_recipe


@app.command(cls=RecipeCommand)
def features(
    recipe: Recipe,
    overrides: Overrides = None,
    output: Annotated[Path, typer.Option(help="Folder for the features; one left by a stopped run is resumed.")] = Path(
        "features"
    ),
    taps: Annotated[
        str | None, typer.Option(help="Layers to save: 2,16,29 (default: those the recipe's head reads).")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float16, float32, float8_e4m3fn; auto: the dtype of the base.")
    ] = "auto",
    teacher_probs: Annotated[
        str,
        typer.Option(
            "--teacher-probs",
            help="What is saved of the base's probabilities: hidden (its last state), a number of likeliest tokens "
            "(and the rest as one), or none. --law is the old name.",
        ),
    ] = "hidden",
    batch_size: Annotated[int, typer.Option(help="Rows per forward pass.")] = 8,
    shard_mb: Annotated[float, typer.Option(help="Approximate size of a file in megabytes.")] = 512,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation before writing.")] = False,
    as_json: Json = False,
) -> None:
    """Save what a base computes on a recipe's data.

    `specheads train RECIPE features=DIR` then trains on it, without the base. A stopped run resumes where it was. On
    several GPUs: accelerate launch train/features.py RECIPE.

    \b
    Examples:
      specheads features eagle3 --output features/llama data.train=my.jsonl
      specheads features eagle3 --output features/small --dtype float8_e4m3fn --teacher-probs 64 --yes
    """
    file = find_recipe(recipe, "train")
    from specheads.cli.commands import features as command

    saved = command.run(
        file, overrides or [], output, taps=taps, yes=yes, dtype=dtype, teacher_probs=teacher_probs,
        batch_size=batch_size, shard_mb=shard_mb,
    )  # fmt: skip
    if as_json:
        emit({**asdict(saved), "folder": str(saved.folder)})
    else:
        print(command.summary(saved))
