"""`specheads features` and train/features.py: save a recipe's base features, after the user has agreed to the size."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specheads.training.features.extract import Saved, save_features
from specheads.training.features.plan import SaveOptions, size_text
from specheads.training.features.shards import FeatureError
from specheads.training.recipe.recipe import read_recipe


def run(
    recipe: Path, overrides: Sequence[str], output: Path, *, taps: str | None = None, yes: bool = False, **options: Any
) -> Saved:
    """Save the features. taps: as on the command line, '2,16,29'. options: other `SaveOptions`. yes: do not ask."""
    try:
        layers = None if taps is None else tuple(int(tap) for tap in taps.split(","))
    except ValueError as error:
        raise ValueError(f"--taps {taps!r}: expected layer numbers such as 2,16,29") from error
    chosen = SaveOptions(output, layers, **options)
    return save_features(read_recipe(recipe, overrides), chosen, announce if yes else confirm)


def announce(plan: str) -> bool:
    print(f"saving {plan}", file=sys.stderr)
    return True


def confirm(plan: str) -> bool:
    if not sys.stdin.isatty():
        raise FeatureError(f"{plan}: give --yes, since nobody can be asked here")
    print(f"This takes {plan}.\nContinue? [y/N] ", end="", file=sys.stderr, flush=True)
    try:
        return sys.stdin.readline().strip().lower() in ("y", "yes")
    except KeyboardInterrupt:
        print(file=sys.stderr)  # what is said of it begins a line
        raise


def summary(saved: Saved) -> str:
    return (
        f"saved {saved.folder}: {saved.tokens:,} tokens of {saved.rows:,} rows, {size_text(saved.bytes)} in "
        f"{saved.files} files, {saved.made} of them written by this process"
    )
