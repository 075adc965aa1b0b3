"""The curves of a training run as curves.png: loss, accepted length, and accuracy by depth over the steps."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specheads.models.run_files import CURVES
from specheads.training.report.line_labels import label_ends

Points = list[tuple[int, float]]


def series(history: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Points]]:
    """The Trainer's log_history as {panel: {curve: [(step, value), …]}}."""
    panels: dict[str, dict[str, dict[int, float]]] = {"loss": {}, "accepted length": {}, "accuracy by depth": {}}
    names = {
        r"loss": ("loss", "training"),
        r"eval_loss": ("loss", "held out"),
        r"accepted_length": ("accepted length", "training"),
        r"eval_accepted_length": ("accepted length", "held out"),
        r"eval_accepted_length_tree": ("accepted length", "held out, its tree"),
        r"eval_accepted_length_sampled": ("accepted length", "held out, sampled"),
        r"eval_accuracy_depth_(\d+)": ("accuracy by depth", "depth {}, held out"),
        r"accuracy_depth_(\d+)": ("accuracy by depth", "depth {}"),
    }
    for entry in history:
        for key, value in entry.items():
            for pattern, (panel, label) in names.items():
                if match := re.fullmatch(pattern, key):
                    curve = panels[panel].setdefault(label.format(*match.groups()), {})
                    curve[int(entry["step"])] = float(value)
    return {panel: {name: sorted(points.items()) for name, points in found.items()} for panel, found in panels.items()}


def draw(folder: Path, history: Sequence[Mapping[str, Any]]) -> Path | None:
    """Draw curves.png in `folder`; None if matplotlib is not installed, or nothing was logged."""
    panels = {name: found for name, found in series(history).items() if found}
    if not panels or importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * len(panels), 4.2), layout="constrained")
    for panel, (title, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        depths = [name.split(",")[0] for name in curves]
        shades = {depth: i for i, depth in enumerate(sorted(set(depths), key=lambda name: (len(name), name)))}
        for name, points in curves.items():
            held_out = "held out" in name
            color = colormaps["viridis"](shades[name.split(",")[0]] / len(shades)) if "depth" in name else None
            panel.plot(
                *zip(*points, strict=True), label=name, color=color, linewidth=1.6 if held_out else 0.9,
                marker="o" if held_out else None, markersize=3, alpha=1.0 if held_out else 0.6,
            )  # fmt: skip
        panel.set_title(title)
        panel.set_xlabel("step")
        panel.grid(alpha=0.3)
        label_ends(panel, panel.get_lines())
    path = folder / CURVES
    figure.savefig(path, dpi=110)
    return path
