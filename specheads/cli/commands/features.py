"""`specheads features` and train/features.py: save a recipe's base features, after the user has agreed to the size."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from specheads.cli.app import emit
from specheads.cli.options.training import FeaturesOptions
from specheads.cli.shipped import find_recipe
from specheads.training.features.extract import Saved, save_features
from specheads.training.features.plan import SaveOptions, size_text
from specheads.training.features.shards import FeatureError
from specheads.training.recipe.recipe import read_recipe


def run(options: FeaturesOptions) -> None:
    saved = save(find_recipe(options.recipe, "train"), options)
    if options.as_json:
        emit({**asdict(saved), "folder": str(saved.folder)})
    else:
        print(summary(saved))


def save(recipe: Path, options: FeaturesOptions) -> Saved:
    """Save the features; ask before, unless --yes is given."""
    taps = options.taps
    try:
        layers = None if taps is None else tuple(int(tap) for tap in taps.split(","))
    except ValueError as error:
        raise ValueError(f"--taps {taps!r}: expected layer numbers such as 2,16,29") from error
    chosen = SaveOptions(
        options.output, layers, options.dtype, options.teacher_probs, options.batch_size, options.shard_mb
    )
    return save_features(read_recipe(recipe, options.overrides or []), chosen, announce if options.yes else confirm)


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
