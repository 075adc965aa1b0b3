"""`specheads sweep`: measures every setting, saves each when done, and shows a table and the paths of the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specheads import terminal
from specheads.bench import environment
from specheads.bench.sweep import report
from specheads.bench.sweep.grid import Sweep
from specheads.bench.sweep.plots import require_matplotlib
from specheads.bench.sweep.run import run, run_recorded
from specheads.bench.sweep.tasks import LENGTHS

_TEXT = ("drafter", "rule", "tree", "k-matrix")
_LEGEND = {
    "× exact": "speed over the exact rule's with the same drafts",
    "× no drafts": "speed over plain decoding",
    "95 %": "interval of the measured one of the two ratios, by resampling the prompts",
    "accepted length": "tokens a step, including the target's own",
    "reviews": "passes of the target / of each draft of a cascade that reviews",
    "SWI": "speed over plain decoding by counted passes and their costs (standardised walltime improvement)",
    "mean KL": "nats a token between the target and the text",
    "surprisal excess": "nats a token by which the target finds the text less likely than its own",
}


def sweep(
    asked: Sweep, out: Path, *, dtype: str, device: str, workers: int, plots: bool, command: str,
    recorded: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Run the sweep → the record of sweep.json, with the files written. Progress goes to stderr."""
    plots = plots and recorded is None  # a replay has no speed or accuracy to plot
    if plots:
        require_matplotlib()  # before hours of measuring, not after them
    where = environment.environment()
    with terminal.progress(terminal.make_console(stderr=True), "sweeping") as tell:
        if recorded is not None:
            rows = run_recorded(asked, out, recorded, dtype=dtype, device=device, tell=tell)
        else:
            rows = run(asked, out, dtype=dtype, device=device, workers=workers, tell=tell)
    record = {
        "command": command, "environment": where, "workers": workers, "task": asked.task, "repeats": asked.repeats,
        "speed_prompts": min(asked.speed_prompts, rows[0]["prompts"]), "clock": asked.clock, "seed": asked.seed,
        "max_new_tokens": asked.max_new_tokens or LENGTHS[asked.task],
    }  # fmt: skip
    files = report.write(out, rows, record, plots=plots)
    kept, shown = report.fastest_lossy(rows), report.with_plain(rows)
    return {**record, "kept": kept, "rows": shown, "files": [str(file) for file in files]}


def show(record: dict[str, Any]) -> None:
    """Print the table and the paths of the files on stdout."""
    columns, lines = report.cells(record["rows"])
    title = f"{record['task']}: speed is the median of {record['repeats']}, {record['clock']} clock"
    left = sum(name in _TEXT for name in columns)
    print(terminal.as_text(terminal.table(title, columns, lines, left=left)))
    for name, meaning in _LEGEND.items():
        if name in columns:
            print(f"{name}: {meaning}")
    if by_gamma := report.gamma_by_k(record["rows"]):
        print("\n" + terminal.as_text(terminal.table("Accepted drafts and time by γ and k", *by_gamma)))
    print("written: " + ", ".join(record["files"]))
