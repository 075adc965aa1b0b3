"""The rows and tables of `specheads bench`, as plain values, for the terminal and as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specheads.bench import cost, environment
from specheads.bench.compare.decoder_spec import Cell, by_cell
from specheads.bench.compare.decoder_texts import exact_twin
from specheads.bench.compare.plots import pictures_of
from specheads.bench.figures.intervals import ratio_interval, speed
from specheads.bench.figures.samples import GRAM, Round, figures, work_of
from specheads.bench.report import format_figure, format_interval, markdown
from specheads.decoding.acceptance import rule_named
from specheads.decoding.results import POSITIONS
from specheads.files import write_whole
from specheads.pictures import save

NAME = "bench"
Row = dict[str, Any]

COLUMNS = (
    "decoder", "tokens/s", "× reference", "95 %", "accepted length", "same text", "accuracy", "nats", "× exact",
    "reviews", "SWI", "step, ms", "× floor", "verify, × floor", "prefill", "draft", "verify", "accept", "step", "other",
)  # fmt: skip
NARROW = 11  # columns for a terminal
LEGEND = {  # by a column that the line explains
    "× reference": "× reference: its tokens/s over the reference's in the same rounds; 95 %: of that ratio, by "
    "resampling the prompt batches.",
    "accepted length": "accepted length: tokens a step and row, the base's own included. same text: texts equal to the "
    "reference's, of all; sampled texts are not compared.",
    "nats": "accuracy: right answers. nats: a token, between the base and the text (docs/sweeps.md); 0 for a lossless "
    "rule. × exact: tokens/s over the same drafts under the exact rule.",
    "reviews": "reviews: passes of the base / of each draft of a cascade that reviews. SWI: speed over plain decoding "
    "by their costs (standardised walltime improvement).",
    "on repeated": "what was accepted: accepted length by the output position at which the step began, and by "
    "category; share of steps that accepted a draft at each depth; × reference on new and repeated text. repeated "
    f"text: the last {GRAM} tokens occurred before in the same text; a step counts with its first token.",
    "× floor": "× floor: seconds of a step, and of its verification, over the least that reading the weights once "
    "takes here. prefill … other: shares of the time; step: of whole compiled steps; compiled, accepting is part of "
    "verify.",
}


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    lines: list[list[str]]


def rows_of(
    rounds: Sequence[Round], reference: str, floor_seconds: float, *,
    costs: Mapping[str, Sequence[float]] | None = None, replayed: bool = False,
) -> list[Row]:  # fmt: skip
    """A row for each cell and decoder, in the order in which they were measured. costs: of a pass of the base and of
    each draft, by decoder; replayed: without the base's passes, so that speeds mean nothing and are left out."""
    rows = []
    for cell, measured in by_cell(rounds).items():
        for name in dict.fromkeys(name for round_ in measured for name in round_["decoders"]):
            served = [round_ for round_ in measured if name in round_["decoders"]]
            row = figures(served, name, reference)
            exact, swi = exact_twin(name), None
            if row["reviews"] and name in (costs or {}):
                swi = cost.walltime_improvement(row["gained"], row["reviews"], (costs or {})[name])
            rows.append({
                **vars(cell), "decoder": name, "reference": name == reference, "lossless": is_lossless(name), **row,
                "swi": swi,
                "over_exact": None if exact == name else over(served, name, exact),
                "step_over_floor": _over(row["step_seconds"], floor_seconds),
                "verify_over_floor": _over(row["verify_seconds"], floor_seconds),
            })  # fmt: skip
            if replayed:
                rows[-1] |= dict.fromkeys((
                    "tokens_per_second", "speed_up", "speed_up_interval", "by_text", "shares", "step_seconds",
                    "verify_seconds", "over_exact", "step_over_floor", "verify_over_floor",
                ))  # fmt: skip
    return rows


def is_lossless(name: str) -> bool:
    rule = next((word for word in name.split(" ") if word.startswith("accept=")), "accept=exact")
    return rule_named(rule.removeprefix("accept=")).lossless


def over(rounds: Sequence[Round], name: str, other: str) -> list[float] | None:
    """The speed over another decoder's in the same rounds, and the ends of its interval if it has one; None if that did
    not run."""
    both = [round_ for round_ in rounds if other in round_["decoders"]]
    if not both:
        return None
    work, beside = work_of(both, name), work_of(both, other)
    pairs = [*work.values()], [beside[index] for index in work]
    return [speed(pairs[0]) / speed(pairs[1]), *(ratio_interval(*pairs) or ())]


def tables(rows: Sequence[Row], *, wide: bool = True) -> Iterator[Table]:
    """The speeds of each cell; then, for the smallest batch of each prompt set and temperature, what was accepted.

    wide: False for the first columns of the speeds alone, which fit a terminal of 80 columns."""
    shown = len(COLUMNS) if wide else NARROW
    for cell, cell_rows in by_cell(rows).items():
        yield Table(f"{cell}: speed", *_without_empty(COLUMNS[:shown], [speed_cells(row)[:shown] for row in cell_rows]))
    if not wide:
        return
    for cell, cell_rows in by_cell(rows).items():
        drafted = [row for row in cell_rows if (row["accepted_by_depth"] or [0])[0] > 0]
        if cell.batch == min(row["batch"] for row in rows) and drafted:
            yield accepted_table(cell, drafted)


def speed_cells(row: Row) -> list[str]:
    """One line of the table with COLUMNS."""
    shares, step = row["shares"], row["step_seconds"]
    parts = [f"{share:.0%}" if (share := (shares or {}).get(part)) else "–" for part in COLUMNS[-6:]]
    accuracy, nats, exact, reviews = (row.get(name) for name in ("accuracy", "nats", "over_exact", "reviews"))
    return [
        row["decoder"],
        "–" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:.1f}",
        "–" if row["speed_up"] is None else f"{row['speed_up']:.2f}×",
        format_interval(row),
        format_figure(row["accepted_length"]),
        "–" if row["same_text"] is None else f"{row['same_text']} of {row['texts']}",
        "–" if accuracy is None else f"{accuracy:.1%}",
        "–" if nats is None else f"{nats:.4f}",
        "–" if exact is None else f"{exact[0]:.2f}×" + (f" ({exact[1]:.2f}–{exact[2]:.2f})" if exact[1:] else ""),
        "–" if reviews is None else " / ".join(map(str, reviews)),
        format_figure(row.get("swi")),
        "–" if step is None else f"{1e3 * step:.2f}",
        format_figure(row["step_over_floor"]),
        format_figure(row["verify_over_floor"] or None),
        *parts,
    ]


def accepted_table(cell: Cell, rows: Sequence[Row]) -> Table:
    """Speed-up on new and on repeated text, accepted length by output position and by category, and the share
    of steps that accepted each depth."""
    categories = list(dict.fromkeys(name for row in rows for name in row["accepted_by_category"] or ()))
    starts = sorted({start for row in rows for start in row["accepted_by_position"] or ()}, key=int)
    deepest = max(len(row["accepted_by_depth"]) for row in rows)
    kinds = ("unrepeated", "repeated")
    columns = (
        "decoder",
        "× on new text",
        "on repeated",
        *(position_range(start) for start in starts),
        *categories,
        *(f"depth {d + 1}" for d in range(deepest)),
    )
    lines = []
    for row in rows:
        by_category, by_depth = row["accepted_by_category"] or {}, row["accepted_by_depth"]
        lines.append([
            row["decoder"],
            *(format_figure(((row["by_text"] or {}).get(kind) or {}).get("speed_up")) for kind in kinds),
            *(format_figure((row["accepted_by_position"] or {}).get(start)) for start in starts),
            *(format_figure(by_category.get(name)) for name in categories),
            *(f"{by_depth[d]:.0%}" if d < len(by_depth) else "–" for d in range(deepest)),
        ])  # fmt: skip
    return Table(f"{cell}: what was accepted", *_without_empty(columns, lines))


def position_range(start: str) -> str:
    """The range of output positions that begins at `start`, such as `64–127`."""
    after = [position for position in POSITIONS if position > int(start)]
    return f"{start}–{after[0] - 1}" if after else f"{start} on"


def notes(record: dict[str, Any]) -> list[str]:
    """Notes below the tables: the least time a pass can take, the prompts, what a lossy rule may gain, and what is
    missing."""
    floor = record["floor"]
    lines = [
        f"floor: {1e3 * floor['seconds']:.2f} ms a pass ({floor['weight_bytes'] / 1e6:.1f} MB of weights read at "
        f"{floor['bandwidth'] / 1e9:.1f} GB/s); reference: {record['reference']}."
    ]
    if record["queue"] is not None:
        lines.append(
            f"a round is {record['queue']} prompts: decoders with refill give a finished row the next one, the others "
            "go batch by batch."
        )
    for name, known in record["prompt_sets"].items():
        lines.append(f"{name}: {known['prompts']} prompts" + (f", {known['note']}" if known["note"] else "") + ".")
    lines += fastest_lossy(record["rows"])
    for name, cells in record["left_out"].items():
        for reason in dict.fromkeys(cells.values()):
            missing = [cell for cell, why in cells.items() if why == reason]
            where = f"{missing[0]} and {len(missing) - 1} more" if len(missing) > 1 else missing[0]
            lines.append(f"left out: {name} in {where}: {reason}")
    if not record["complete"]:
        lines.append(f"stopped after {len(record['rounds'])} rounds: the same command resumes")
    return lines


def fastest_lossy(rows: Sequence[Row], share: float = 0.98) -> Iterator[str]:
    """For each cell and drafter with right answers under the exact rule: the fastest lossy rule with at least `share`
    of its accuracy."""
    for cell, cell_rows in by_cell(rows).items():
        for exact in cell_rows:
            rules = [row for row in cell_rows if not row["lossless"] and exact_twin(row["decoder"]) == exact["decoder"]]
            if not rules or not exact["accuracy"]:
                continue
            kept = [row for row in rules if row["over_exact"] and row["accuracy"] >= share * exact["accuracy"]]
            best = max(kept, key=lambda row: row["over_exact"][0], default=None)
            what = "no lossy rule" if best is None else f"{best['decoder']}, {best['over_exact'][0]:.2f}× its speed,"
            yield f"{cell}: {what} keeps {share:.0%} of the accuracy of {exact['decoder']}."


def as_markdown(record: dict[str, Any], pictures: Sequence[str] = ()) -> str:
    every = [*tables(record["rows"])]
    text = [
        "# Decoding speed\n", f"`{record['command']}`\n",
        f"{environment.line(record['environment'])}"
        + "".join(f", {name} {version}" for name, version in record["peers"].items()) + ".\n",
        f"{new_tokens(record)}, {record['dtype']}; of {record['repeats']} interleaved repeats each "
        "prompt batch counts with its median."
        + (" Decoders took turns at each step.\n" if record["turns"] == "steps" else "\n"),
        *(f"- {line}" for line in notes(record)), "",
        *(f"- {line}" for line in legend(every)), "",
    ]  # fmt: skip
    text += [f"![{name}]({name})\n" for name in pictures]
    for table in every:
        text += [f"## {table.title}\n", markdown(table.columns, table.lines)]
    return "\n".join(text)


def new_tokens(record: dict[str, Any]) -> str:
    """A phrase such as `96 new tokens` or `32 to 256 new tokens`."""
    least = f"{record['lowest_limit']} to " if record["lowest_limit"] is not None else ""
    return f"{least}{record['max_new_tokens']} new tokens"


def as_json(record: dict[str, Any]) -> str:
    """The record as JSON with one line per round, since indenting would give each of its many numbers a line."""
    rounds = ",\n  ".join(json.dumps(round_, allow_nan=False) for round_ in record["rounds"])
    rest = json.dumps({name: value for name, value in record.items() if name != "rounds"}, indent=1, allow_nan=False)
    return rest.removesuffix("\n}") + f',\n "rounds": [\n  {rounds}\n ]\n}}\n'


def write(folder: Path, record: dict[str, Any], *, plots: bool = True) -> list[Path]:
    """Write bench.json, bench.md and, if `plots`, the pictures. ImportError if they need matplotlib and it is not
    installed."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [save(folder / f"{name}.png", draw) for name, draw in pictures_of(record).items()] if plots else []
    paths = [folder / f"{NAME}.json", folder / f"{NAME}.md"]
    # resolved, so that a symbolic link is not replaced by a file
    write_whole(paths[0].resolve(), as_json(record))
    write_whole(paths[1].resolve(), as_markdown(record, [path.name for path in drawn]))
    return paths + drawn


def legend(shown: Sequence[Table]) -> list[str]:
    """A line on each column of these tables that needs one."""
    columns = {name for table in shown for name in table.columns}
    return [line for column, line in LEGEND.items() if column in columns]


def _without_empty(columns: tuple[str, ...], lines: list[list[str]]) -> tuple[tuple[str, ...], list[list[str]]]:
    """The table without columns that have no value in any line."""
    kept = [i for i in range(len(columns)) if any(line[i] != "–" for line in lines)]
    return tuple(columns[i] for i in kept), [[line[i] for i in kept] for line in lines]


def _over(seconds: float | None, floor: float) -> float | None:
    return None if seconds is None else seconds / floor
