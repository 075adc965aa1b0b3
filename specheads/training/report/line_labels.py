"""Names at the ends of lines, in their colours, instead of a legend that covers data and must be looked up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_SIZE = 7.5  # points
_GAP = 1.3 * _SIZE  # between two names


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
