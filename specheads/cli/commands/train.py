"""`specheads train` and train/heads.py: a run from its recipe to the exit code, or its estimate; `specheads curves`."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from specheads import pictures, terminal
from specheads.cli.app import output
from specheads.cli.commands import show_mask
from specheads.cli.errors import refuse_file
from specheads.cli.hanging import print_hanging
from specheads.cli.options.training import CurvesOptions, TrainOptions
from specheads.cli.shipped import find_recipe
from specheads.terminal import clock_time
from specheads.training.distributed.launch import wait_for_all
from specheads.training.errors import TrainingError, TrainingStopped
from specheads.training.estimate import estimate
from specheads.training.parity import ParityError
from specheads.training.recipe.recipe import read_recipe
from specheads.training.report import compare
from specheads.training.run import prepare


def run(options: TrainOptions, program: str = "specheads") -> int:
    """program: the name of the program in errors."""
    recipe, overrides = find_recipe(options.recipe, "train"), options.overrides or []
    if options.show_mask is not None:
        show_mask.show(recipe, overrides, options.show_mask)
        return 0
    if options.dry_run:
        show_estimate(recipe, overrides, options.as_json)
        return 0
    return train(recipe, overrides, program, options.as_json)


def show_estimate(recipe: Path, overrides: Sequence[str], as_json: bool = False) -> None:
    """Print an estimate of what the run will take, with the recipe's launch section; no weights are loaded."""
    expected = estimate(read_recipe(recipe, overrides))
    if as_json:
        print(_json(expected.to_dict()))
        return
    for line in expected.lines():
        print_hanging(line, 0)


def train(recipe: Path, overrides: Sequence[str], program: str, as_json: bool = False) -> int:
    """Train, and print the result. Errors of the run itself are one line on stderr, after the name of the program.

    The exit code: 0; 1 if training could not continue, or something failed after the head was saved; 3 if decoding and
    training disagree; 128 + the signal if the run was stopped. Raises ValueError, OSError or ImportError for bad input.
    """
    try:
        wanted = read_recipe(recipe, overrides)
        refuse_file(Path(wanted.training["output_dir"]), "training.output_dir")
        prepared = prepare(wanted)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print(f"{program}: stopped before the first step; nothing was saved", file=sys.stderr)
        return 130
    # The Trainer's logs go to stderr with the progress, so that stdout contains only the result.
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        try:
            metrics = prepared.train()
        except TrainingStopped as stopped:
            if str(stopped):  # only on the main process
                print(f"{program}: {stopped}", file=sys.stderr)
            return stopped.exit_code
        except ParityError as error:  # raised in every process
            if prepared.trainer.is_world_process_zero():
                print(f"{program}: {error}", file=sys.stderr)
            wait_for_all(prepared.trainer.accelerator)  # a launcher stops the others as soon as one has failed
            return 3
        except TrainingError as error:  # perhaps only in this process
            print(f"{program}: {error}", file=sys.stderr)
            return 1
    if prepared.trainer.is_world_process_zero():
        print(_json(metrics) if as_json else prepared.summary(metrics))
    wait_for_all(prepared.trainer.accelerator)
    prepared.trainer.accelerator.end_training()
    return 1 if prepared.failed else 0


def _json(record: dict[str, Any]) -> str:
    return json.dumps(record, indent=2, ensure_ascii=False)


def draw_curves(options: CurvesOptions) -> None:
    """Draw the accepted length of the runs, and print where each ended."""
    curves = [compare.read_curve(folder) for folder in options.runs]
    pictures.save(options.out, partial(compare.figure, curves))
    record = {"picture": str(options.out), "runs": [curve.to_dict() for curve in curves]}
    output(record, show_curves, options.as_json)


def show_curves(record: dict[str, Any]) -> None:
    rows = []
    for curve in record["runs"]:
        last = curve["points"][-1]
        interval = "–" if last["low"] is None else f"{last['low']:.2f}–{last['high']:.2f}"
        counted = "held-out rows" if curve["held_out"] else "training batches"
        length, tokens = f"{last['length']:.2f}", f"{last['tokens']:,.0f}"
        rows.append([curve["run"], counted, tokens, clock_time(last["cpu_seconds"]), length, interval])
    columns = ("run", "counted on", "tokens seen", "CPU time", "accepted length", "95 % interval")
    terminal.print_table(terminal.make_console(), terminal.table("At the end of each run", columns, rows))
    print(f"drawn: {record['picture']}")
