"""Several runs in one figure: accepted length with its 95 % interval, over tokens seen and over CPU time."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specheads import pictures
from specheads.hub import did_you_mean
from specheads.models.files import STATE
from specheads.options import listing
from specheads.training.report.curves import Z

AXES = {"tokens": "supervised tokens seen", "cpu_seconds": "CPU minutes (all processes, with evaluations)"}


@dataclass(frozen=True)
class Point:
    """Accepted length after so many supervised tokens and CPU seconds; low, high: its 95 % interval, None if too few
    batches were counted."""

    step: int
    tokens: float
    cpu_seconds: float
    length: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class LearningCurve:
    """One run's curve. held_out: are its points evaluations, not training batches?"""

    run: str
    held_out: bool
    points: list[Point]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_curve(folder: Path) -> LearningCurve:
    """The curve of a run's folder: of its evaluations if it has any, else of its training batches.

    ValueError if it has no trainer_state.json, or one that records no accepted length or tokens.
    """
    file = folder / STATE
    if not file.is_file():
        raise ValueError(_no_run(folder))
    try:
        state = json.loads(file.read_text("utf8"))
        history = state["log_history"]
        logs = [(0, 0.0, 0.0)]
        logs += [(e["step"], e["tokens_seen"], e["cpu_seconds"]) for e in history if "tokens_seen" in e]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no record of a training run ({error})") from error
    if not any("loss" in entry for entry in history):  # tokens are counted in these logs
        raise ValueError(
            f"{file} holds no log of its {state.get('global_step')} steps: logging_steps is "
            f"{state.get('logging_steps')}; train again with a lower training.logging_steps"
        )
    if len(logs) == 1:
        raise ValueError(f"{file} records no token counts: give the folder of a run of a SpecTrainer")
    held_out = any("eval_accepted_length" in entry for entry in history)
    name = "eval_accepted_length" if held_out else "accepted_length"
    by_step = {entry["step"]: entry for entry in history if name in entry and entry["step"] > 0}
    if not by_step:
        raise ValueError(f"{file} has no {name}: no answer had two tokens to learn")
    points = [_point(step, by_step[step], name, logs) for step in sorted(by_step)]
    return LearningCurve(str(folder), held_out, points)


def _no_run(folder: Path) -> str:
    """Why this is no folder of a run, and which are near."""
    if not folder.exists():
        return f"no such folder: {folder}{did_you_mean(str(folder))}"
    inside = sorted(str(state.parent) for state in folder.glob(f"*/{STATE}")) if folder.is_dir() else []
    hint = f"did you mean {listing(inside)}?" if inside else "give the training.output_dir of a run"
    return f"{folder} is no training run: it has no {STATE}; {hint}"


def _point(step: int, entry: Mapping[str, Any], name: str, logs: Sequence[tuple[int, float, float]]) -> Point:
    """logs: steps with their tokens and CPU seconds, which are interpolated and extrapolated linearly over steps."""
    after = min(bisect_left([log[0] for log in logs], step), len(logs) - 1)
    (first, *before), (last, *then) = logs[max(0, after - 1)], logs[after]
    share = (step - first) / (last - first) if last > first else 1.0
    tokens, seconds = (a + share * (b - a) for a, b in zip(before, then, strict=True))
    length, error = entry[name], entry.get(f"{name}_error")
    low, high = (None, None) if error is None else (max(1.0, length - Z * error), length + Z * error)
    return Point(step, tokens, seconds, length, low, high)


def figure(curves: Sequence[LearningCurve], look: pictures.Look) -> Any:
    """A panel for each of AXES, with a line for each run, named at its end, and a band, its interval."""
    whole, panels = pictures.panels(1, len(AXES), 6.6, 4.2, sharey=True)
    names = distinct_names([curve.run for curve in curves])
    for panel, (axis, title) in zip(panels.flat, AXES.items(), strict=True):
        for i, (curve, name) in enumerate(zip(curves, names, strict=True)):
            x = [getattr(point, axis) / (60 if axis == "cpu_seconds" else 1) for point in curve.points]
            label = name if curve.held_out else f"{name} (training batches)"
            style, marker = "-" if curve.held_out else "--", "os^D"[i // len(look.colors) % 4]
            lengths = [point.length for point in curve.points]
            panel.plot(x, lengths, style, label=label, color=look.color(i), linewidth=1.4, marker=marker, markersize=4)
            known = [(at, p.low, p.high) for at, p in zip(x, curve.points, strict=True) if p.low is not None]
            if known:
                panel.fill_between(*zip(*known, strict=True), color=look.color(i), alpha=0.18, linewidth=0)
        panel.set_xlim(left=0)
        panel.set(xlabel=title, ylabel="" if axis == "cpu_seconds" else "tokens a step")
        pictures.label_ends(panel, panel.get_lines())
    panels.flat[0].set_title("accepted length, with 95 % intervals over batches")
    return whole


def distinct_names(folders: Sequence[str]) -> list[str]:
    """Each folder by its last parts, as few as make all names distinct."""
    parts = [Path(folder).resolve().parts for folder in folders]
    longest = max(map(len, parts))
    count = next((n for n in range(1, longest) if len({part[-n:] for part in parts}) == len(set(parts))), longest)
    return ["/".join(part[-count:]) for part in parts]
