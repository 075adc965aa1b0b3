"""specheads tune."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specheads_cli.app import Base, Device, DType, Json, app, emit


@app.command()
def tune(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="Head checkpoints or plain models, each tuned in turn.")
    ],
    batch: Annotated[int, typer.Option(min=1, help="Rows of a batch; other sizes in the file stay as they are.")] = 1,
    nodes: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Nodes per row to time (repeatable, 1 among them; default: 1 … 64)."),
    ] = None,
    lengths: Annotated[
        list[int] | None, typer.Option("--length", min=1, help="Tokens of context (repeatable; default: 128 and 1024).")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which all measurements take turns.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Steps timed in each round; figures are medians.")] = 5,
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
    """Measure what a decoding step costs on this machine, for `--drafter auto` and draft="auto".

    It times verification over nodes and context length, drafting over levels, and the rest of the loop, and writes one
    small file that generate() finds by base, head, device, dtype and batch size. generate() never measures by itself.
    Let nothing else run meanwhile.

    \b
    Examples:
      specheads tune checkpoints/eagle3
      specheads tune out/head --batch 8 --dtype bfloat16
      specheads tune checkpoints/eagle3 checkpoints/medusa --search texts.json
      specheads tune out/head --output costs.json
    """
    from specheads.bench.tune import TuneConfig
    from specheads.cli.commands import tune as command
    from specheads.models.named import Models

    if output is not None and len(models) > 1:
        raise ValueError(f"--output is one file, and {len(models)} models are tuned; give one model, or leave it out")
    defaults = TuneConfig()
    config = TuneConfig(
        batch, tuple(nodes or defaults.nodes), tuple(lengths or defaults.lengths), rounds=rounds, steps=steps
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
