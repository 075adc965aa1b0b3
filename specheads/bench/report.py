"""A race's results as plain values, as a Markdown table and as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specheads.bench.figures.samples import figures, rounds_of
from specheads.bench.runner import Race
from specheads.files import write_whole


def summary(result: Race, reference: str) -> dict[str, dict[str, Any]]:
    """Decoder → whether it is the reference, its figures(), tokens_per_second_of_each_repeat, and whether its texts
    equal the reference's in all repeats (`identical`), or where they differ (`differs_at`)."""
    rounds = rounds_of(result, reference)
    rows: dict[str, dict[str, Any]] = {}
    for name in result.runs:
        differing = result.differing(name, reference)
        rows[name] = {
            "reference": name == reference,
            **figures(rounds, name, reference),
            "tokens_per_second_of_each_repeat": result.speeds(name),
            "identical": not differing,
            "differs_at": [{"batch": i, "row": row, "token": at} for i, row, at in differing],
        }
    return rows


def format_interval(row: dict[str, Any]) -> str:
    """The interval of a speed-up as text; the reference has none."""
    interval = None if row["reference"] else row["speed_up_interval"]
    return "–" if interval is None else f"{interval[0]:.2f}–{interval[1]:.2f}"


def format_figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def markdown(columns: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [columns, tuple("---:" if i else "---" for i in range(len(columns))), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def write(folder: Path, name: str, text: str, record: dict[str, Any]) -> list[Path]:
    """Write name.md and name.json into `folder`, which is created."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.md", folder / f"{name}.json"]
    # resolved, so that a symbolic link is not replaced by a file
    write_whole(paths[0].resolve(), text)
    write_whole(paths[1].resolve(), json.dumps(record, indent=2) + "\n")
    return paths
