"""`specheads curves`: compares the accepted length of training runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specheads import terminal
from specheads.terminal import clock_time
from specheads.training.report import compare


def compare_runs(folders: Sequence[Path], output: Path) -> list[dict[str, Any]]:
    """Plot the runs into the file `output`, and return their curves as plain values."""
    curves = [compare.read_curve(folder) for folder in folders]
    compare.draw(curves, output)
    return [curve.to_dict() for curve in curves]


def show(curves: Sequence[dict[str, Any]]) -> None:
    """Print where each run ended."""
    rows = []
    for curve in curves:
        last = curve["points"][-1]
        interval = "–" if last["low"] is None else f"{last['low']:.2f}–{last['high']:.2f}"
        counted = "held-out rows" if curve["held_out"] else "training batches"
        length, tokens = f"{last['length']:.2f}", f"{last['tokens']:,.0f}"
        rows.append([curve["run"], counted, tokens, clock_time(last["cpu_seconds"]), length, interval])
    columns = ("run", "counted on", "tokens seen", "CPU time", "accepted length", "95 % interval")
    terminal.print_table(terminal.make_console(), terminal.table("At the end of each run", columns, rows))
