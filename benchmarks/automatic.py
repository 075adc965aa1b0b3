"""Compares automatic drafts with the best single draft of each cell, from the record of a `specheads bench` run.

    specheads bench --batch 1,4,8,16 --num-prompts 32 --repeats 1 --reference plain -d plain -d lookup -d eagle3 \\
        -d 'eagle3 auto' --out runs/cells
    python benchmarks/automatic.py runs/cells

A cell is a head, a batch size and a temperature, over the prompts of all sets. Its best single decoder is the fastest
of `plain`, `lookup` and the head with its default tree, all compiled or none, chosen in hindsight on the same prompts.
95 % intervals resample prompt batches. Writes automatic.md beside the record.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from specheads.bench import environment, report
from specheads.bench.figures.intervals import Work, ratio_interval, speed
from specheads.bench.figures.samples import work_of

Cell = tuple[str, int, float]  # the head, batch size, temperature


def works(record: dict[str, Any]) -> dict[tuple[int, float], dict[str, Work]]:
    """(batch size, temperature) → decoder → tokens and seconds of every prompt batch, set after set."""
    groups: dict[tuple[int, float], dict[str, list[dict[str, Any]]]] = {}
    for one in record["rounds"]:
        sets = groups.setdefault((one["batch"], one["temperature"]), {})
        sets.setdefault(one["prompts"], []).append(one)
    return {
        key: {
            name: [work for rounds in sets.values() for work in work_of(rounds, name).values()]
            for name in next(iter(sets.values()))[0]["decoders"]
        }
        for key, sets in groups.items()
    }


def compare(record: dict[str, Any]) -> dict[Cell, tuple[str, float, tuple[float, float] | None]]:
    """Cell → its best single decoder, the speed of automatic drafts over it, and that ratio's interval.

    ValueError if the record lacks an automatic decoder or one that it is compared with."""
    found = {}
    for (batch, temperature), by_name in works(record).items():
        for name in by_name:
            head, auto, end = name.partition(" auto")
            if not auto:
                continue
            singles = ["plain" + end, "lookup" + end, head + end]
            if missing := [single for single in singles if single not in by_name]:
                raise ValueError(f"{name!r} is compared with {', '.join(singles)}; the record lacks {missing}")
            best = max(singles, key=lambda single: speed(by_name[single]))
            ratio = speed(by_name[name]) / speed(by_name[best])
            found[head + end, batch, temperature] = best, ratio, ratio_interval(by_name[name], by_name[best])
    if not found:
        raise ValueError("the record has no automatic decoder, such as 'eagle3 auto'")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the --out folder of specheads bench")
    options = parser.parse_args()
    record = json.loads((options.folder / "bench.json").read_text("utf8"))
    cells = compare(record)
    rows = []
    for (head, batch, temperature), (best, ratio, interval) in sorted(cells.items()):
        within = "–" if interval is None else f"{interval[0]:.2f}–{interval[1]:.2f}"
        rows.append((head, str(batch), f"{temperature:g}", best, f"{ratio:.2f}×", within))
    table = report.markdown(("head", "batch", "T", "best single", "automatic over it", "95 %"), rows)
    mean = geometric_mean([ratio for _, ratio, _ in cells.values()])
    path = options.folder / "automatic.md"
    where, overall = environment.line(record["environment"]), f"Geometric mean over {len(cells)} cells: {mean:.2f}×."
    title = "# Automatic drafts and the best single draft of each cell"
    path.write_text(f"{title}\n\n`{record['command']}`\n\n{where}\n\n{table}\n\n{overall}\n", encoding="utf8")
    print(f"{table}\n{overall}\nwritten: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
