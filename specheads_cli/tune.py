"""specheads tune."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specheads_cli.app import Base, Device, DType, Json, app, emit, refuse_file, refuse_folder


@app.command()
def tune(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="Head checkpoints or plain models, each tuned in turn.")
    ],
    batch: Annotated[
        int, typer.Option(min=1, help="Rows per batch; the file keeps other sizes measured by the same versions.")
    ] = 1,
    nodes: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Nodes per row to time (repeatable; must include 1; default: 1 … 64, compiled 1, 6, 16 and 32)."
        ),
    ] = None,
    lengths: Annotated[
        list[int] | None, typer.Option("--length", min=1, help="Tokens of context (repeatable; default: 128 and 1024).")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which all measurements take turns.")] = 3,
    steps: Annotated[
        int,
        typer.Option(min=1, help="Steps timed per round; the result is the fastest round's median."),
    ] = 5,
    compile: Annotated[
        bool, typer.Option("--compile", help="Time compiled steps, for compile=True; compiling them takes minutes.")
    ] = False,
    search: Annotated[
        Path | None,
        typer.Option(
            metavar="RECORD",
            help="Also list which head and tree would be fastest on recorded texts, and save how often the head's "
            "drafts were right. Written first, from held-out prompts, if it is missing.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="File to write (default: one per model and machine in HF_HOME/specheads/costs)."),
    ] = None,
    dtype: DType = "auto",
    device: Device = "auto",
    base: Base = None,
    as_json: Json = False,
) -> None:
    """Measure what a decoding step costs on this machine.

    The costs are for `--draft auto` and draft="auto". It times verification over nodes and context length, drafting
    over levels, and the rest of the loop, and writes one small file that generate() finds by base, head, device, dtype,
    batch size and whether steps are compiled. generate() never measures by itself. Let nothing else run meanwhile.

    \b
    Examples:
      specheads tune out/head
      specheads tune out/head --compile
      specheads tune out/head --batch 8 --dtype bfloat16
      specheads tune out/eagle3 out/medusa --search texts.json
      specheads tune out/head --output costs.json
    """
    from specheads.bench.tune import TuneConfig
    from specheads.cli.commands import tune as command
    from specheads.decoding.planner.by_cost import costs_dir
    from specheads.models.named import Models

    if output is not None and len(models) > 1:
        raise ValueError(f"--output is one file, and {len(models)} models are tuned; give one model, or leave it out")
    for flag, path in (("--output", output), ("--search", search)):
        if path is not None:
            refuse_folder(path, flag)
    if output is None:
        refuse_file(costs_dir(), "HF_HOME")
    config = TuneConfig(
        batch, tuple(nodes or ()), tuple(lengths or TuneConfig.lengths), rounds=rounds, steps=steps, compile=compile
    )
    results = []
    for name in models:
        loaded = Models.load(name, base=base, dtype=dtype, device=device)
        known = None if search is None else command.record_at(search, loaded)
        results.append({"model": name, **command.measure(loaded, config, output=output, known=known)})
    if as_json:
        emit({"results": results})
    else:
        command.show(results)
