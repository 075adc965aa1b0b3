"""A race as plain values, as a Markdown table and as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specheads.bench.runner import Race

COLUMNS = ("decoder", "tokens/s", "speed-up", "accepted length", "same text")


def summary(result: Race, reference: str) -> dict[str, dict[str, Any]]:
    """Decoder → tokens_per_second, speed_up over `reference`, accepted_length (None if unknown), accepted_by_depth,
    identical, differs_at, and parts: repeated and unrepeated text separately."""
    made: dict[str, dict[str, Any]] = {}
    known = {name: result.parts(name) for name in result.runs}
    for name in result.runs:
        differing = result.differing(name, reference)
        parts = {}
        for kind, part in known[name].items():
            other = known[reference].get(kind)
            parts[kind] = {
                "share": part.share,
                "tokens_per_second": part.tokens_per_second,
                "speed_up": part.tokens_per_second / other.tokens_per_second if other else None,
                "accepted_length": part.accepted_length,
            }
        made[name] = {
            "tokens_per_second": result.tokens_per_second(name),
            "tokens_per_second_of_each_repeat": result.speeds(name),
            "speed_up": result.speed_up(name, reference),
            "accepted_length": result.accepted_length(name),
            "accepted_by_depth": result.accepted_by_depth(name),
            "identical": not differing,
            "differs_at": [{"batch": i, "row": row, "token": at} for i, row, at in differing],
            "parts": parts,
        }
    return made


def cells(name: str, row: dict[str, Any]) -> list[str]:
    """One decoder's line of the table, in the order of COLUMNS."""
    length = row["accepted_length"]
    return [
        name,
        f"{row['tokens_per_second']:.1f}",
        f"{row['speed_up']:.2f}×",
        "–" if length is None else f"{length:.2f}",
        "yes" if row["identical"] else f"no ({len(row['differs_at'])})",
    ]


def part_cells(name: str, row: dict[str, Any]) -> list[str]:
    """One decoder's line of the table for new and repeated text, in the order of PART_COLUMNS."""
    made = [name]
    for kind in ("unrepeated", "repeated"):
        part = row["parts"].get(kind)
        if part is None:
            made += ["–"] * 3
            continue
        ratio = "–" if part["speed_up"] is None else f"{part['speed_up']:.2f}×"
        made += [f"{part['tokens_per_second']:.1f}", ratio, f"{part['accepted_length']:.2f}"]
    return made


PART_COLUMNS = ("decoder", "new: tok/s", "speed-up", "accepted", "repeated: tok/s", "speed-up", "accepted")


def markdown(columns: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [columns, tuple("---:" if i else "---" for i in range(len(columns))), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def write(folder: Path, name: str, text: str, record: dict[str, Any]) -> list[Path]:
    """Write name.md and name.json into `folder`, which is created."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.md", folder / f"{name}.json"]
    paths[0].write_text(text, "utf8")
    paths[1].write_text(json.dumps(record, indent=2) + "\n", "utf8")
    return paths
