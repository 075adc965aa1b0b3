"""How every picture looks: colours for light and dark pages, names at the ends of lines, names beside points; PNG, SVG.

A picture is a function of a `Look` that returns a matplotlib Figure. Neighbouring colours differ in lightness, too, so
that readers who confuse hues can tell them apart; the first ones are Okabe and Ito's.
"""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SMALL = 8.0  # points; of names and values
_GAP = 1.35 * SMALL  # from one name to the next


@dataclass(frozen=True)
class Look:
    """page: background; ink: text and marks; soft: axes, and data that is not singled out; rule: the grid. colors: of
    things to tell apart; shades: of things in an order."""

    page: str
    ink: str
    soft: str
    rule: str
    colors: tuple[str, ...]
    shades: tuple[str, ...]

    def color(self, i: int) -> str:
        return self.colors[i % len(self.colors)]

    def shade(self, i: int, count: int) -> str:
        """The colour of the i-th of `count` things in an order."""
        return self.shades[round(i * (len(self.shades) - 1) / max(1, count - 1))]

    def every(self) -> tuple[str, ...]:
        return (self.page, self.ink, self.soft, self.rule, *self.colors, *self.shades)

    def settings(self) -> Any:
        """matplotlib's settings."""
        soft = ("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
        return {
            **dict.fromkeys(soft, self.soft), **dict.fromkeys(("text.color", "axes.titlecolor"), self.ink),
            **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), self.page),
            "axes.grid": True, "axes.axisbelow": True, "grid.color": self.rule, "grid.linewidth": 0.8,
            "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left", "axes.titlesize": 10.5,
            "axes.titleweight": "bold", "font.size": 9.5, "axes.labelsize": 9.5, "font.family": "sans-serif",
            "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"], "svg.fonttype": "none", "svg.hashsalt": "specheads",
        }  # fmt: skip


LIGHT = Look(
    "#ffffff", "#1d2328", "#5c6770", "#dde2e6",
    ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#9a7b00", "#3a9bd9", "#6b6b6b", "#8e1a86"),
    ("#0d0887", "#3c049b", "#6100a7", "#8405a7", "#a21d9a", "#bd3786", "#d35171", "#e56a5d"),
)  # fmt: skip
DARK = Look(
    "#15191c", "#e4e8eb", "#a3adb5", "#343b41",
    ("#56b4e9", "#e88a4a", "#3fc79a", "#e0a3c5", "#e6c229", "#8ecbf0", "#b5b5b5", "#d06ad0"),
    ("#f3f027", "#fcd025", "#fdb22f", "#f9973f", "#ef7e50", "#e26660", "#d35171", "#c13b82"),
)  # fmt: skip
Draw = Callable[[Look], Any]


def require_matplotlib(otherwise: str = "") -> None:
    """ImportError, with what to do, if matplotlib is not installed. otherwise: what else can be done."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(f"pictures need matplotlib: pip install 'specheads[plots]'{otherwise}")


def save(path: Path, draw: Draw, look: Look = LIGHT) -> Path:
    """Write the picture; the suffix is .png, or .svg for one that is light or dark as its reader's screen is.

    ValueError for another suffix, ImportError without matplotlib."""
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"{path}: pictures are .png or .svg")
    content = svg(draw).encode() if path.suffix == ".svg" else _drawn(draw, look, "png")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def save_all(folder: Path, pictures: Mapping[str, Draw]) -> list[Path]:
    """Write NAME.png, NAME-dark.png and NAME.svg of each."""
    forms = (("{}.png", LIGHT), ("{}-dark.png", DARK), ("{}.svg", LIGHT))
    return [save(folder / name.format(stem), draw, look) for stem, draw in pictures.items() for name, look in forms]


def svg(draw: Draw) -> str:
    """The picture as SVG, light or dark as its reader's screen is; it asks for no font and no other file."""
    text = _drawn(draw, LIGHT, "svg").decode()
    dark = "".join(
        f'[style*="{name}: {light}"]{{{name}:{color}!important}}'
        for light, color in zip(LIGHT.every(), DARK.every(), strict=True)
        for name in ("fill", "stroke")
        if f"{name}: {light}" in text
    )
    return re.sub(r"<metadata>.*?</metadata>", f"<style>@media(prefers-color-scheme:dark){{{dark}}}</style>", text,
                  flags=re.DOTALL)  # fmt: skip


def inline_svg(draw: Draw) -> str:
    """The picture as an element of an HTML page, as wide as the page lets it."""
    text = svg(draw)
    text = text[text.index("<svg") :]
    text = re.sub(r'<svg[^>]*?viewBox="([^"]+)"[^>]*>', r'<svg viewBox="\1" role="img">', text, count=1)
    return re.sub(r' id="([^"]+)"', lambda match: match[0] if f"#{match[1]}" in text else "", text).strip()


def _drawn(draw: Draw, look: Look, form: str) -> bytes:
    require_matplotlib()
    import matplotlib

    file = io.BytesIO()
    with matplotlib.rc_context(look.settings()):
        draw(look).savefig(file, format=form, dpi=144, metadata={"Date": None} if form == "svg" else None)
    return file.getvalue()


def panels(down: int, across: int, width: float, height: float, **options: Any) -> tuple[Any, Any]:
    """A figure of panels of this size, in inches, and the array (down, across) of them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * across, height * down), layout="constrained")
    return figure, figure.subplots(down, across, squeeze=False, **options)


def line_chart(curves: Mapping[str, Sequence[tuple[float, float]]], x_label: str, y_label: str, look: Look) -> Any:
    """A panel with a line through each curve's points (x, y), named at its end."""
    figure, axes = panels(1, 1, 5.4, 3.4)
    panel = axes[0, 0]
    for i, (name, points) in enumerate(curves.items()):
        panel.plot(*zip(*points, strict=True), label=name, color=look.color(i), linewidth=1.4, marker="o", markersize=4)
    panel.set(xlabel=x_label, ylabel=y_label)
    label_ends(panel, panel.get_lines())
    return figure


def label_ends(panel: Any, lines: Sequence[Any]) -> None:
    """Write each matplotlib line's label to the right of the panel, as near to the height of the line's right end as
    possible without overlaps; what connects the two is outside the panel, where it cannot be taken for data. Call it
    after everything is plotted: it fixes the limits."""
    panel.set_xlim(panel.get_xlim())
    panel.set_ylim(panel.get_ylim())
    ends = []
    for line in lines:
        if points := [(float(x), float(y)) for x, y in zip(*line.get_data(), strict=True) if x == x and y == y]:
            end = panel.transData.transform(max(points, key=lambda point: point[0]))
            ends.append((float(panel.transAxes.inverted().transform(end)[1]), line))
    ends.sort(key=lambda end: end[0])
    height = panel.get_position().height * panel.figure.get_figheight() * 72  # points, before names take their room
    for (end, line), level in zip(ends, spread([end[0] for end in ends], _GAP / height), strict=True):
        panel.annotate(
            line.get_label(), (1.005, end), (1.05, level), xycoords="axes fraction", textcoords="axes fraction",
            va="center", fontsize=SMALL, color=line.get_color(), annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": line.get_color(), "linewidth": 0.7, "shrinkA": 0, "shrinkB": 0},
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


def label_front(panel: Any, points: Sequence[tuple[float, float, str, str]], *, left: bool) -> None:
    """Write (x, y, text, colour) beside each point of a Pareto front, where no data can be: above it, to the left if
    less of x is better, else to the right. A text moves up until it covers no other. Call it after everything is
    plotted: it fixes the limits, with room for the texts."""
    box = panel.get_position()
    width, height = (72 * box.width * panel.figure.get_figwidth(), 72 * box.height * panel.figure.get_figheight())
    longest = max((len(text) for _, _, text, _ in points), default=0) * 0.6 * SMALL / width
    (x0, x1), (y0, y1) = panel.get_xlim(), panel.get_ylim()
    ticks = [tick for tick in panel.get_xticks() if x0 <= tick <= x1]
    x0, x1 = (x0 - (x1 - x0) * longest, x1) if left else (x0, x1 + (x1 - x0) * longest)
    sign = -1 if left else 1
    taken: list[tuple[float, float, float, float]] = []  # left, right, bottom, top of a text, in points
    for x, y, text, color in sorted(points, key=lambda point: point[1]):  # the lower, the nearer to free room
        at_x, at_y = (x - x0) / (x1 - x0) * width + 5 * sign, (y - y0) / (y1 - y0) * height + 4
        start, level = at_x - (len(text) * 0.6 * SMALL if left else 0), at_y
        end = start + len(text) * 0.6 * SMALL
        for a, b, low, high in sorted(taken, key=lambda other: other[2]):
            if a < end and start < b and low < level + _GAP and level < high:
                level = high
        taken.append((start, end, level, level + _GAP))
        panel.annotate(
            text, (x, y), (5 * sign, 4 + level - at_y), textcoords="offset points", fontsize=SMALL, color=color,
            ha="right" if left else "left", va="bottom",
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 3},
        )  # fmt: skip
    highest = max((high for *_, high in taken), default=0.0)
    panel.set(xlim=(x0, x1), ylim=(y0, max(y1, y0 + (y1 - y0) * highest / height)))
    panel.set_xticks(ticks)
