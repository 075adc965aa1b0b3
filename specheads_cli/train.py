"""specheads demo, train, curves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specheads_cli.app import Json, NewTokens, Overrides, Recipe, app, emit, refuse_file
from specheads_cli.recipe_options import RecipeCommand
from specheads_cli.shipped import find_recipe


@app.command()
def demo(
    minutes: Annotated[float, typer.Option(min=0.01, help="Minutes of live training.")] = 2.0,
    num_prompts: Annotated[int, typer.Option(min=1, help="Number of prompts, from held-out files.")] = 6,
    max_new_tokens: NewTokens = 96,
    seed: Annotated[int, typer.Option(min=0, help="Training seed.")] = 0,
    checkpoints: Annotated[Path | None, typer.Option(help="Folder of base/ and the heads (default: shipped).")] = None,
    output: Annotated[Path, typer.Option(help="Folder for the trained head.")] = Path("runs/demo"),
    as_json: Json = False,
) -> None:
    """Train a head in minutes, and race it.

    The head is saved, restored, and raced against transformers' generate() and the shipped heads. If no base came with
    the package, a tiny one is trained first, in a minute or two.

    \b
    Examples:
      specheads demo
      specheads demo --minutes 5 --num-prompts 12
      specheads demo --json > figures.json
    """
    from specheads.cli.demo import story
    from specheads.terminal import make_console

    refuse_file(output, "--output")
    options = story.DemoOptions(
        minutes=minutes, num_prompts=num_prompts, max_new_tokens=max_new_tokens, seed=seed, checkpoints=checkpoints,
        output=output,
    )  # fmt: skip
    figures = story.run(options, make_console(stderr=as_json))  # with --json all else goes to stderr
    if as_json:
        emit(figures)
    if figures["differing"]:
        raise typer.Exit(1)


@app.command(cls=RecipeCommand)
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Estimate the memory, steps and time of the run, print them and exit.")
    ] = False,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Number of processes for --dry-run (default: the recipe's, or 1).")
    ] = None,
    distributed: Annotated[
        str | None,
        typer.Option(
            help="Parallelism for --dry-run: no, ddp, fsdp2, zero1, zero2, zero3 (default: the recipe's, or ddp for "
            "several).",
        ),
    ] = None,
    show_mask: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Print N random rows to train on, with what is learnt marked, and exit.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a draft head from a recipe.

    It runs in this process or, under `accelerate launch`, in one process per GPU.

    \b
    Examples:
      specheads train eagle3 base=my/model
      specheads train medusa base=Qwen/Qwen3-0.6B data.train=my.jsonl training.output_dir=out
      specheads train eagle3 --dry-run --processes 8 --distributed fsdp2
      specheads train eagle3 base=my/model data.train=chats.jsonl --show-mask 100
      accelerate launch -m specheads_cli train my.yaml
    """
    file = find_recipe(recipe, "train")
    for override in overrides or []:
        if "=" not in override:
            raise ValueError(f"{override!r} is not KEY=VALUE, such as training.max_steps=100")
    if show_mask is not None:
        from specheads.cli.commands import show_mask as mask

        mask.show(file, overrides or [], show_mask)
        return
    from specheads.cli.commands import train as command

    if dry_run:
        command.show_estimate(file, overrides or [], processes, distributed, as_json)
        return
    command.refuse_without_dry_run(processes=processes, distributed=distributed)
    if code := command.run(file, overrides or [], "specheads", as_json):
        raise typer.Exit(code)


@app.command()
def curves(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of training runs.")],
    out: Annotated[Path, typer.Option(help="Picture to write.")] = Path("curves.png"),
    as_json: Json = False,
) -> None:
    """Draw the accepted length of training runs in one figure.

    It is drawn by supervised tokens seen and by CPU time. Bands are 95 % intervals over the batches that were counted:
    of the held-out rows where a run was evaluated, else of the training batches. Runs are named at the ends of their
    lines.

    \b
    Examples:
      specheads curves runs/eagle3 runs/medusa --out compare.png
      specheads curves runs/* --json > figures.json
    """
    from specheads.cli.commands import curves as command

    found = command.compare_runs(runs, out)
    if as_json:
        emit({"picture": str(out), "runs": found})
    else:
        command.show(found)
        print(f"drawn: {out}")
