"""A sweep's rows as JSON, CSV and Markdown, all from the same values. Plots are drawn in `plots`."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specheads.bench import environment
from specheads.bench.report import markdown
from specheads.bench.sweep.measure import Row
from specheads.files import write_whole

NAME = "sweep"


def with_plain(rows: Sequence[Row]) -> list[Row]:
    """The rows with `speed_up_over_plain` added. A lossy rule is not raced against plain decoding: its value is its own
    ratio times its reference's, None if the reference is not among the rows."""
    known = {_setting_key(row): row for row in rows}
    made = []
    for row in rows:
        over: float | None = row["speed_up"]
        if over is not None and not row["lossless"]:
            exact = known.get(_setting_key(row, "exact"))
            over = over * exact["speed_up"] if exact else None
        made.append({**row, "speed_up_over_plain": over})
    return made


def _setting_key(row: Row, accept: str | None = None) -> tuple[Any, ...]:
    """A key that identifies a row's setting. accept: as if it had this rule instead."""
    rule = row["accept"] if accept is None else accept
    return row["drafter"], rule, row["tree"], row["temperature"], row["top_k"], row.get("k_matrix")


def fastest_lossy(rows: Sequence[Row], share: float = 0.98) -> list[dict[str, Any]]:
    """For each drafter, tree, temperature and top-k: the fastest lossy rule with at least `share` of the exact rule's
    accuracy (None if none has), and whether it is faster than the exact rule."""
    made = []
    for exact in rows:
        if exact["accept"] != "exact" or not exact["accuracy"]:
            continue
        rivals = [r for r in rows if _setting_key(r, "exact") == _setting_key(exact)]
        kept = [r for r in rivals if not r["lossless"] and r["accuracy"] >= share * exact["accuracy"]]
        best = max(kept, key=lambda r: r["speed_up"], default=None)
        made.append({
            "drafter": exact["drafter"], "tree": exact["tree"], "temperature": exact["temperature"],
            "top_k": exact["top_k"], "share": share, "accept": best["accept"] if best else None,
            "accuracy": best["accuracy"] if best else None, "exact_accuracy": exact["accuracy"],
            "speed_up_over_exact": best["speed_up"] if best else None,
            "faster": bool(best and best["speed_up"] > 1),
        })  # fmt: skip
    return made


def table(rows: Sequence[Row]) -> str:
    """All rows as Markdown."""
    return markdown(*cells(rows))


def cells(rows: Sequence[Row]) -> tuple[tuple[str, ...], list[list[str]]]:
    """The table's columns and lines, without columns that have no value in any row."""
    rows = with_plain(rows)
    columns: dict[str, Any] = {
        "drafter": lambda r: r["drafter"],
        "rule": lambda r: r["accept"],
        "tree": lambda r: r["tree"],
        "k-matrix": lambda r: r.get("k_matrix"),
        "T": lambda r: f"{r['temperature']:g}" if any(s["temperature"] for s in rows) else None,
        "k": lambda r: r["top_k"] or None,
        "lossless": lambda r: "yes" if r["lossless"] else "no",
        "accuracy": lambda r: _shown(r["accuracy"], "{:.1%}"),
        "× exact": lambda r: None if r["lossless"] else _shown(r["speed_up"], "{:.2f}"),
        "× no drafts": lambda r: _shown(r["speed_up_over_plain"], "{:.2f}"),
        "95 %": lambda r: "–".join(f"{v:.2f}" for v in r.get("speed_up_interval") or ()) or None,
        "tokens/s": lambda r: _shown(r["tokens_per_second"], "{:.1f}"),
        "accepted length": lambda r: _shown(r["accepted_length"], "{:.2f}"),
        "reviews": lambda r: _counts(r),
        "SWI": lambda r: _shown(r.get("swi"), "{:.2f}"),
        "mean KL": lambda r: _shown(r["mean_kl"], "{:.4f}"),
        "surprisal excess": lambda r: _shown(r["surprisal_excess"], "{:+.4f}") if r["temperature"] else None,
    }
    made = {name: [value(row) for row in rows] for name, value in columns.items()}
    names = tuple(name for name, column in made.items() if any(cell is not None for cell in column))
    return names, [["–" if made[name][i] is None else str(made[name][i]) for name in names] for i in range(len(rows))]


def gamma_by_k(rows: Sequence[Row]) -> tuple[tuple[str, ...], list[list[str]]] | None:
    """Columns and lines of a table of γ (chain length) by top-k, as in the notebook: accepted drafts as a share of all
    tokens, and seconds of the speed prompts. None unless there are several γ or several k."""
    chains = [r for r in rows if r["accept"] == "exact" and str(r["tree"]).startswith("chain:")]
    samplings = list(dict.fromkeys((r["temperature"], r["top_k"]) for r in chains))
    trees = list(dict.fromkeys((r["drafter"], r.get("k_matrix"), r["tree"]) for r in chains))
    if len(samplings) < 2 and len({tree for *_, tree in trees}) < 2:
        return None
    known = {_setting_key(row): row for row in chains}
    columns = ["drafter", "γ"]
    for temperature, k in samplings:
        name = "k=1" if not temperature else f"k={k or 'all'}" + (f", T={temperature:g}" if temperature != 1 else "")
        columns += [f"{name}: kept / tokens", "seconds", "× no drafts"]
    lines = []
    for drafter, k_matrix, tree in trees:
        line = [" ".join(filter(None, (drafter, k_matrix))), tree.removeprefix("chain:")]
        for sampling in samplings:
            row = known.get((drafter, "exact", tree, *sampling, k_matrix))
            if row is None:
                line += ["–"] * 3
            else:
                line += [f"{row['accepted']} / {row['tokens']}", _shown(row["seconds"], "{:.2f}") or "–"]
                line += [_shown(row["speed_up"], "{:.2f}") or "–"]
        lines.append(line)
    return tuple(columns), lines


def as_csv(rows: Sequence[Row]) -> str:
    """The rows as CSV; lists are joined by spaces."""
    rows = with_plain(rows)
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in row.items()})
    return file.getvalue()


def as_markdown(rows: Sequence[Row], record: dict[str, Any], pictures: Sequence[str] = ()) -> str:
    text = ["# A sweep\n"]
    if record.get("command"):
        text.append(f"`{record['command']}`\n")
    text.append(f"{environment.line(record['environment'])}.\n")
    text.append(
        f"{rows[0]['prompts']} prompts of `{record['task']}`, {record['max_new_tokens']} new tokens. Speed is at batch "
        f"1 on {record['speed_prompts']} of them, {record['clock']} clock, median of {record['repeats']}; a lossy rule "
        "takes turns with the exact one, and what is exact with no drafts. × no drafts of a lossy rule is its ratio "
        "times the exact rule's.\n"
    )
    text += [f"![{name}]({name})\n" for name in pictures]
    text.append(table(rows))
    if by_gamma := gamma_by_k(rows):
        text += ["## Accepted drafts and time by γ and k\n", markdown(*by_gamma)]
    for found in fastest_lossy(rows):
        where = " ".join(str(found[name]) for name in ("drafter", "tree") if found[name])
        where += f" T={found['temperature']:g}" if found["temperature"] else ""
        if found["accept"] is None:
            said = "no lossy rule does"
        else:
            said = (
                f"the fastest is `{found['accept']}`: accuracy {found['accuracy']:.1%}, "
                f"{found['speed_up_over_exact']:.2f} times the exact rule's speed"
            )
        text.append(
            f"Of {where}, keeping {found['share']:.0%} of the exact rule's accuracy "
            f"({found['exact_accuracy']:.1%}): {said}.\n"
        )
    return "\n".join(text)


def write(folder: Path, rows: Sequence[Row], record: dict[str, Any], *, plots: bool = True) -> list[Path]:
    """Write sweep.json, sweep.csv, sweep.md and, if `plots`, PNG plots into `folder`.

    ImportError if `plots` and matplotlib is not installed."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures: list[Path] = []
    if plots:
        from specheads.bench.sweep.plots import draw

        pictures = draw(folder, with_plain(rows))
    texts = {
        "json": json.dumps({**record, "kept": fastest_lossy(rows), "rows": with_plain(rows)}, indent=1) + "\n",
        "csv": as_csv(rows),
        "md": as_markdown(rows, record, [path.name for path in pictures]),
    }
    made = []
    for suffix, text in texts.items():
        made.append(folder / f"{NAME}.{suffix}")
        write_whole(made[-1].resolve(), text)  # resolved, so that a symbolic link is not replaced
    return made + pictures


def _counts(row: Row) -> str | None:
    """The numbers of reviews by the target and by each draft of a cascade, as text."""
    return None if row.get("draft_reviews") is None else " / ".join(map(str, [row["reviews"], *row["draft_reviews"]]))


def _shown(value: float | None, form: str) -> str | None:
    return None if value is None else form.format(value)
