"""specheads sweep."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from specheads.cli.app import emit
from specheads.cli.complete import complete_recipe
from specheads.cli.errors import refuse_file, refuse_folder
from specheads.cli.options.typed import Base, Device, DType, Json
from specheads.cli.shipped import find_recipe


def sweep(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="[RECIPE]",
            help="YAML file, or the name of a shipped recipe; options override it.",
            autocompletion=complete_recipe("sweep"),
        ),
    ] = None,
    head: Annotated[
        list[str] | None,
        typer.Option(
            "--head",
            "--draft",
            help="Head checkpoint, auto (with the first of them), model:PATH, lookup, ngram or maxgram; repeatable.",
        ),
    ] = None,
    accept: Annotated[
        list[str] | None,
        typer.Option(help="Acceptance rule, as in generate; commas make several: fuzzy:js,tv:0.1,0.2. Repeatable."),
    ] = None,
    thresholds: Annotated[
        str | None, typer.Option(help="Thresholds for each lossy rule, instead of its own: 0.02,0.1.")
    ] = None,
    gamma: Annotated[str | None, typer.Option(help="Lengths of drafted chains: 3,5,7.")] = None,
    tree: Annotated[list[str] | None, typer.Option(help="Draft tree, as in generate; repeatable.")] = None,
    top_k: Annotated[
        str | None, typer.Option(help="Sample from this many of the most likely tokens: 1,50; 1 is greedy.")
    ] = None,
    temperature: Annotated[str | None, typer.Option(help="Sampling temperatures: 0,1; 0 is greedy.")] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="signatures or syntax (shipped), mmlu, sampled_mmlu, gsm8k, csqa, humaneval, or prompts (no answers)."
        ),
    ] = None,
    data: Annotated[list[str] | None, typer.Option(help="Files with the task's rows (default: the hub).")] = None,
    num_prompts: Annotated[int | None, typer.Option(min=1, help="Number of questions.")] = None,
    speed_prompts: Annotated[
        int | None, typer.Option(min=1, help="Number of questions that speed is measured on.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Questions judged together.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens per answer (default: the task's).")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Repeats of the speed measurement; each prompt counts with its median.")
    ] = None,
    clock: Annotated[str | None, typer.Option(help="wall, or cpu if others use the machine too.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Sampling seed.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Format prompts with the chat template.")] = False,
    run_code: Annotated[bool, typer.Option("--run-code", help="Let humaneval run what the model wrote.")] = False,
    k_matrix: Annotated[
        list[str] | None, typer.Option(help="K-matrix of a cascade:DRAFTER+DRAFTER…: [[5,8],[0,8]]; repeatable.")
    ] = None,
    leniency: Annotated[float | None, typer.Option(min=1.0, help="Leniency between the drafters of a cascade.")] = None,
    notation: Annotated[str | None, typer.Option(help="Notation of k-matrices: incremental or paper.")] = None,
    cost: Annotated[
        str | None, typer.Option(help="Cost of a pass, for SWI: measured, model_parameters, previous_work.")
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="Review drafts against the target's text in this file, which is recorded first if missing."),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Number of processes; on CUDA each has its own device.")] = 1,
    out: Annotated[Path, typer.Option(help="Results folder; an interrupted sweep resumes from it.")] = Path(
        "runs/sweep"
    ),
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Draw pictures; needs specheads[plots].")] = True,
    dtype: DType = "auto",
    device: Device = "auto",
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Measure drafters × rules × trees × temperatures.

    It sets speed and accepted length against accuracy and divergence. Each finished setting is saved in
    OUT/results.jsonl, and the same command resumes from there. Each rule takes turns with the exact one, prompt by
    prompt, and its speed is a ratio to it. OUT gets sweep.json, sweep.csv, sweep.md and sweep.png.

    \b
    Examples:
      specheads sweep sweep_rules --head out/head --out runs/rules
      specheads sweep --head out/head --accept fuzzy:js --thresholds 0.02,0.05,0.1,0.2,0.4
      specheads sweep --draft model:small --base large --gamma 5,10,20 --top-k 1,50 --task prompts
      specheads sweep --base large --draft cascade:model:small+maxgram --k-matrix [[5,8],[0,8]] --record large.json
      specheads sweep --head out/head --task gsm8k --data test.jsonl --chat --accept fuzzy:js,tv:0.1,0.3 --workers 2
    """
    from specheads.bench.sweep.grid import parse_numbers, read_sweep

    refuse_file(out, "--out")
    given = {
        "drafters": head, "accept": accept, "thresholds": parse_numbers(thresholds, "thresholds", float),
        "gamma": parse_numbers(gamma, "gamma", int), "trees": tree, "top_k": parse_numbers(top_k, "top_k", int),
        "temperature": parse_numbers(temperature, "temperature", float), "task": task, "data": data,
        "num_prompts": num_prompts, "speed_prompts": speed_prompts, "batch_size": batch_size,
        "max_new_tokens": max_new_tokens, "repeats": repeats, "clock": clock, "seed": seed, "base": base,
        "k_matrices": k_matrix, "leniency": leniency, "notation": notation, "cost": cost,
        "chat": chat or None, "run_code": run_code or None,
    }  # fmt: skip
    asked = read_sweep(None if recipe is None else find_recipe(recipe, "sweep"), given)
    if record is not None and workers > 1:
        raise ValueError("--record reviews in this process; leave --workers at 1")
    if record is not None:
        refuse_folder(record, "--record")
    from specheads.cli.commands import sweep as command

    words = shlex.join(["specheads", *sys.argv[1:]])
    found = command.sweep(
        asked, out, dtype=dtype, device=device, workers=workers, plots=plots, command=words, recorded=record
    )
    if as_json:
        emit(found)
    else:
        command.show(found)
