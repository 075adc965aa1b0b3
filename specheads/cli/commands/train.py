"""`specheads train` and train/heads.py: a run from its recipe to the exit code, and the estimate of what it takes."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specheads.training.distributed.launch import LaunchConfig, wait_for_all
from specheads.training.errors import TrainingError, TrainingStopped
from specheads.training.estimate import estimate
from specheads.training.parity import ParityError
from specheads.training.recipe.recipe import read_recipe
from specheads.training.run import prepare
from specheads_cli.app import refuse_file


def show_estimate(
    recipe: Path, overrides: Sequence[str], processes: int | None, distributed: str | None, as_json: bool = False
) -> None:
    """Print an estimate of what the run will take; no weights are loaded. None for processes and distributed: as in the
    recipe."""
    wanted = read_recipe(recipe, overrides)
    launch = LaunchConfig(processes, distributed)
    found = estimate(wanted, launch.processes, launch.distributed)
    print(_json(found.to_dict()) if as_json else "\n".join(found.lines()))


def refuse_without_dry_run(**given: Any) -> None:
    """ValueError if --processes or --distributed is given without --dry-run. given: by option name."""
    if named := [f"--{name} {value}" for name, value in given.items() if value is not None]:
        raise ValueError(
            f"{', '.join(named)} would have no effect without --dry-run; to train in several processes, start "
            "the command with `accelerate launch`, which says how many and on which devices"
        )


def run(recipe: Path, overrides: Sequence[str], program: str, as_json: bool = False) -> int:
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
