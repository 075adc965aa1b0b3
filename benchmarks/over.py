"""Compares all decoders of a `specheads bench` run with one other than its reference, from its record.

    python benchmarks/over.py runs/bench openvino:5:runs/published

Speed by prompt set, batch size and temperature, with 95 % intervals by resampling that run's prompt batches, which all
decoders ran in turn. Prints a table; measures nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from specheads.bench import report
from specheads.bench.figures.intervals import ratio_interval, speed
from specheads.bench.figures.samples import work_of

Cell = tuple[str, int, float]  # the prompt set, batch size, temperature


def ratios(record: dict[str, Any], reference: str) -> dict[str, dict[Cell, tuple[float, tuple[float, float] | None]]]:
    """Decoder → cell → its speed over that of `reference`, and that ratio's interval. Cells where either was left out
    are missing; where either dropped out midway, only rounds with both count.

    ValueError if the run had no such decoder.
    """
    names = list(dict.fromkeys(name for one in record["rounds"] for name in one["decoders"]))
    if reference not in names:
        raise ValueError(f"the run has no decoder {reference!r}; it has {', '.join(names)}")
    cells: dict[Cell, list[dict[str, Any]]] = {}
    for one in record["rounds"]:
        cells.setdefault((one["prompts"], one["batch"], one["temperature"]), []).append(one)
    found: dict[str, dict[Cell, tuple[float, tuple[float, float] | None]]] = {name: {} for name in names}
    for cell, rounds in cells.items():
        for name in names:
            both = [one for one in rounds if {name, reference} <= one["decoders"].keys()]
            own, other = (list(work_of(both, decoder).values()) for decoder in (name, reference))
            if both:
                found[name][cell] = speed(own) / speed(other), ratio_interval(own, other)
    return found


def _cell(ratio: float, ends: tuple[float, float] | None) -> str:
    return f"{ratio:.2f}×" + (f" ({ends[0]:.2f}–{ends[1]:.2f})" if ends else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the --out folder of specheads bench")
    parser.add_argument("reference", help="a decoder of that run, as its table spells it")
    options = parser.parse_args()
    try:
        found = ratios(json.loads((options.folder / "bench.json").read_text("utf8")), options.reference)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    cells = found[options.reference]
    columns = [f"{prompts}, batch {batch}, T = {temperature:g}" for prompts, batch, temperature in cells]
    rows = []
    for name, by_cell in found.items():
        rows.append((name, *(_cell(*by_cell[cell]) if cell in by_cell else "–" for cell in cells)))
    print(report.markdown((f"over {options.reference}", *columns), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
