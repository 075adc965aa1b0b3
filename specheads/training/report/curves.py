"""The curves of a training run: loss, accepted length with its 95 % interval, and accuracy by depth over the steps.

Training batches are thin lines without points, since there are many; evaluations are points, joined by a line.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from specheads import pictures
from specheads.models.files import CURVES

Points = list[tuple[float, float, float | None]]  # step, value, standard error
Z = 1.959964  # half-width of a 95 % interval of the standard normal distribution
_FEW = 40  # points that are drawn as points
_UNITS = {
    "loss": "loss",
    "accepted length": "tokens a step",
    "accuracy by depth": "first drafts that are the base's own",
}
_KINDS = ("training", "held out", "held out, its tree", "held out, sampled")
_NAMES = {
    r"loss": ("loss", "training"),
    r"eval_loss": ("loss", "held out"),
    r"accepted_length": ("accepted length", "training"),
    r"eval_accepted_length": ("accepted length", "held out"),
    r"eval_accepted_length_tree": ("accepted length", "held out, its tree"),
    r"eval_accepted_length_sampled": ("accepted length", "held out, sampled"),
    r"eval_accuracy_depth_(\d+)": ("accuracy by depth", "depth {}, held out"),
    r"accuracy_depth_(\d+)": ("accuracy by depth", "depth {}"),
}


def series(history: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Points]]:
    """The Trainer's log_history as {panel: {curve: points}}, without panels of which nothing was logged."""
    panels: dict[str, dict[str, dict[int, tuple[float, float | None]]]] = {name: {} for name in _UNITS}
    for entry in history:
        for key, value in entry.items():
            for pattern, (panel, label) in _NAMES.items():
                if (match := re.fullmatch(pattern, key)) and math.isfinite(value):
                    curve = panels[panel].setdefault(label.format(*match.groups()), {})
                    curve[int(entry["step"])] = (float(value), entry.get(f"{key}_error"))
    return {
        panel: {name: [(step, *values) for step, values in sorted(points.items())] for name, points in curves.items()}
        for panel, curves in panels.items()
        if curves
    }


def draw(folder: Path, history: Sequence[Mapping[str, Any]]) -> Path | None:
    """Draw curves.png in `folder`; None if matplotlib is not installed, or nothing was logged."""
    if not series(history) or importlib.util.find_spec("matplotlib") is None:
        return None
    return pictures.save(folder / CURVES, partial(figure, history))


def figure(history: Sequence[Mapping[str, Any]], look: pictures.Look, *, across: int = 3) -> Any:
    """A panel for each of the series, `across` in a line, all over the same steps."""
    drawn = series(history)
    across = min(across, len(drawn))
    whole, panels = pictures.panels(-(-len(drawn) // across), across, 5.4, 3.4)
    last = max(point[0] for curves in drawn.values() for points in curves.values() for point in points)
    for panel in panels.flat[len(drawn) :]:
        panel.set_axis_off()
    for panel, (title, curves) in zip(panels.flat, drawn.items(), strict=False):
        depths = sorted({int(match[1]) for name in curves if (match := re.match(r"depth (\d+)", name))})
        for name, points in curves.items():
            held_out, depth = "held out" in name, re.match(r"depth (\d+)", name)
            color = look.color(_KINDS.index(name)) if depth is None else look.shade(int(depth[1]) - 1, depths[-1])
            label = name if depth is None else depth[0]
            if f"{name}, held out" in curves:  # a depth is named once
                label = "_"
            panel.plot(
                [step for step, _, _ in points], [value for _, value, _ in points], label=label, color=color,
                linewidth=1.4 if held_out else 0.9, alpha=1.0 if held_out else 0.55,
                marker="o" if held_out or len(points) <= _FEW else None, markersize=4 if held_out else 2.5,
            )  # fmt: skip
            if held_out and (known := [(a, b, Z * e) for a, b, e in points if e is not None]):
                at, value, half = zip(*known, strict=True)
                panel.errorbar(at, value, yerr=half, fmt="none", ecolor=color, elinewidth=1, capsize=2)
        panel.set(xlim=(0, 1.02 * last), xlabel="step", title=title, ylabel=_UNITS[title])
        if depths:
            note = "points: held out; thin lines: training batches" if any("held" in name for name in curves) else ""
            panel.set_title(f"{title}\n", pad=2)
            panel.text(0, 1.02, note, transform=panel.transAxes, fontsize=pictures.SMALL, color=look.soft)
            panel.yaxis.set_major_formatter("{x:.0%}")
        pictures.label_ends(panel, [line for line in panel.get_lines() if not line.get_label().startswith("_")])
    return whole
