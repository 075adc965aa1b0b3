"""`specheads train --show-mask N`: random rows to train on, with what is learnt marked, so that a person can look."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from specheads.data.images import tokenizer_of
from specheads.data.rows import IGNORED
from specheads.terminal import has_colors, make_console, printable
from specheads.training.recipe.loading import load_rows
from specheads.training.recipe.recipe import RecipeError, read_recipe

LEARNT = "bold green"


def show(recipe: Path, overrides: Sequence[str], count: int) -> None:
    """Print `count` random rows to train on. Rows that are dropped are counted by a warning. RecipeError for a recipe
    that trains on saved features."""
    wanted = read_recipe(recipe, overrides)
    if wanted.features or wanted.data is None:
        raise RecipeError(f"features={wanted.features!r}: saved features have no text to show; leave them out")
    rows, _, processing = load_rows(replace(wanted, data=replace(wanted.data, packing=False)))
    console, tokenizer = make_console(), tokenizer_of(processing)
    chosen = sorted(random.Random(wanted.data.seed).sample(range(len(rows)), min(count, len(rows))))
    for index in chosen:
        print_row(console, index + 1, rows[index], tokenizer)
    console.print(f"{len(chosen):,} of {len(rows):,} rows to train on; what is learnt is {_how(console)}")


def print_row(console: Console, number: int, row: dict[str, Any], tokenizer: Any) -> None:
    learnt = sum(label != IGNORED for label in row["labels"])
    console.rule(f"row {number:,}: {learnt:,} of {len(row['labels']):,} tokens are learnt", style="dim")
    line = Text()
    for text, is_learnt in runs(row, tokenizer):
        shown = printable(text)
        if not is_learnt:
            line.append(shown, "dim")
        else:
            line.append(shown if has_colors(console) else f"⟦{shown}⟧", LEARNT)
    console.print(line, soft_wrap=True)


def runs(row: dict[str, Any], tokenizer: Any) -> Iterator[tuple[str, bool]]:
    """The text of each run of tokens that are all learnt or all not, and which."""
    for is_learnt, group in groupby(zip(row["input_ids"], row["labels"], strict=True), lambda pair: pair[1] != IGNORED):
        yield tokenizer.decode([token for token, _ in group], skip_special_tokens=False), is_learnt


def _how(console: Console) -> str:
    return "green" if has_colors(console) else "in ⟦ ⟧"
