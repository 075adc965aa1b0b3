"""The curves of a training run as curves.png: loss, accepted length, and accuracy by depth over the steps.

Lines are named at their ends, in their colours: a legend would cover data, and must be looked up.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specheads.models.files import CURVES

Points = list[tuple[int, float]]
_SIZE = 7.5  # points
_GAP = 1.3 * _SIZE  # between two names


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
    return {panel: {name: sorted(points.items()) for name, points in lines.items()} for panel, lines in panels.items()}


def draw(folder: Path, history: Sequence[Mapping[str, Any]]) -> Path | None:
    """Draw curves.png in `folder`; None if matplotlib is not installed, or nothing was logged."""
    panels = {name: lines for name, lines in series(history).items() if lines}
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


def label_ends(panel: Any, lines: Sequence[Any]) -> None:
    """Write each matplotlib line's label to the right of the panel, as near to the height of the line's right end as
    possible without overlaps, and connect the two. Call it after everything is plotted: it fixes the limits.
    """
    panel.set_xlim(panel.get_xlim())
    panel.set_ylim(panel.get_ylim())
    ends = []
    for line in lines:
        if points := [(float(x), float(y)) for x, y in zip(*line.get_data(), strict=True) if x == x and y == y]:
            x, y = max(points, key=lambda point: point[0])
            level = panel.transAxes.inverted().transform(panel.transData.transform((x, y)))[1]
            ends.append((float(level), x, y, line))
    ends.sort(key=lambda end: end[0])
    height = panel.get_position().height * panel.figure.get_figheight() * 72  # points, before names take their room
    for (_, x, y, line), level in zip(ends, spread([end[0] for end in ends], _GAP / height), strict=True):
        panel.annotate(
            line.get_label(), (x, y), (1.03, level), textcoords="axes fraction", va="center", fontsize=_SIZE,
            color=line.get_color(), annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": line.get_color(), "linewidth": 0.5, "alpha": 0.5,
                        "shrinkA": 0, "shrinkB": 2},
        )  # fmt: skip


def spread(levels: Sequence[float], gap: float) -> list[float]:
    """Ascending levels, moved as little as needed to be `gap` apart: those too close are spread around their mean, and
    stay between 0 and 1 if there is room."""
    groups: list[list[float]] = []
    for level in levels:
        groups.append([level])
        while len(groups) > 1 and _bottom(groups[-1], gap) - _top(groups[-2], gap) < gap:
            groups[-2:] = [groups[-2] + groups[-1]]
    return [_bottom(group, gap) + i * gap for group in groups for i in range(len(group))]


def _bottom(group: Sequence[float], gap: float) -> float:
    height = gap * (len(group) - 1)
    return max(0.0, min(sum(group) / len(group) - height / 2, 1.0 - height))


def _top(group: Sequence[float], gap: float) -> float:
    return _bottom(group, gap) + gap * (len(group) - 1)
