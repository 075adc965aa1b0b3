"""Charts as SVG text, for a page: lines over steps, and bars with intervals. Colours are the page's, c0 to c6.

A chart is 480 units wide and scales with the page, down to a phone's. Every value is also in a table of the page, or in
a title, which a browser shows under the pointer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]
Interval = tuple[float, float | None, float | None]  # a value, and the ends of its interval
COLOURS = 7  # then they repeat
_WIDTH, _HEIGHT = 480, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 12, 34  # margins, in units
_BAR = 22  # units a bar, 15 of them filled


def lines(curves: Mapping[str, Points], x_label: str) -> str:
    """A line for each curve, name → (x, y) points in order of x, and a legend. "" without a point."""
    finite = {name: [p for p in points if all(map(math.isfinite, p))] for name, points in curves.items()}
    curves = {name: points for name, points in finite.items() if points}
    if not curves:
        return ""
    every = [point for points in curves.values() for point in points]
    x_ticks, y_ticks = ticks(*_range(x for x, _ in every)), ticks(*_range(y for _, y in every))
    (x_low, x_high), (y_low, y_high) = (x_ticks[0], x_ticks[-1]), (y_ticks[0], y_ticks[-1])

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + (x - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - (y - y_low) / (y_high - y_low) * (_HEIGHT - _TOP - _BOTTOM),
        )

    parts = []
    for tick in y_ticks:
        _, y = at(x_low, tick)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in x_ticks:
        x, _ = at(tick, y_low)
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{tick:,g}</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 3}" text-anchor="end">{escape(x_label)}</text>')
    for i, (name, points) in enumerate(curves.items()):
        placed = [at(x, y) for x, y in points]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)
        parts.append(f'<path class="line s{i % COLOURS}" d="M{path}"><title>{escape(name)}</title></path>')
        if len(points) <= 40:
            for (x, y), (value_x, value_y) in zip(placed, points, strict=True):
                title = f"<title>{escape(name)}, {value_x:,g}: {value_y:.4g}</title>"
                parts.append(f'<circle class="f{i % COLOURS}" cx="{x:.1f}" cy="{y:.1f}" r="3">{title}</circle>')
    return _svg(_HEIGHT, parts) + _legend(curves)


def bars(values: Mapping[str, Interval], *, line: float | None = None, most: float | None = None) -> str:
    """A bar for each name → (value, low, high), with its value beside it; low and high may be None. line: a value that
    is marked across all bars, such as 1 for "as fast"; most: the end of the axis, for charts that are to be compared
    (default: the largest value here). "" without a bar."""
    if not values:
        return ""
    label_width, end = 150, _WIDTH - 50
    most = most or max(largest(values), line or 0.0) or 1.0
    height = _BAR * len(values) + 8

    def at(value: float) -> float:
        return label_width + value / most * (end - label_width)

    parts = []
    for i, (name, (value, low, high)) in enumerate(values.items()):
        y = 4 + i * _BAR
        shown = name if len(name) <= 22 else name[:21] + "…"
        parts.append(f'<text x="{label_width - 8}" y="{y + 14}" text-anchor="end">{escape(shown)}'
                     f"<title>{escape(name)}</title></text>")  # fmt: skip
        width = at(value) - label_width
        parts.append(f'<rect class="f{i % COLOURS}" x="{label_width}" y="{y + 3}" width="{width:.1f}" height="15"/>')
        if low is not None and high is not None:
            parts.append(f'<path class="range" d="M{at(low):.1f} {y + 10}H{at(high):.1f}"/>')
        right = at(value if high is None else max(value, high))
        parts.append(f'<text x="{right + 6:.1f}" y="{y + 14}">{value:.2f}</text>')
    if line is not None:
        parts.append(f'<path class="mark" d="M{at(line):.1f} 0V{height}"/>')
    return _svg(height, parts)


def largest(values: Mapping[str, Interval]) -> float:
    """The largest value or upper end."""
    return max((value if high is None else max(value, high) for value, _, high in values.values()), default=0.0)


def heat(rows: Mapping[str, Sequence[float]], column: str) -> str:
    """Shares from 0 to 1 as a table whose cells are the darker the larger the share is; columns are `column` 1, 2 …"""
    longest = max((len(shares) for shares in rows.values()), default=0)
    if not longest:
        return ""
    head = "".join(f"<th>{escape(column)} {i + 1}</th>" for i in range(longest))
    body = []
    for name, shares in rows.items():
        cells = "".join(f'<td style="--share:{share:.2f}" class="heat">{share:.0%}</td>' for share in shares)
        body.append(f"<tr><th>{escape(name)}</th>{cells}{'<td>–</td>' * (longest - len(shares))}</tr>")
    return f'<div class="wide"><table><tr><th></th>{head}</tr>{"".join(body)}</table></div>'


def ticks(low: float, high: float) -> list[float]:
    """Some four to seven round numbers from at most `low` to at least `high`, which is larger."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.floor(low / step)
    count = math.ceil(high / step) - first
    return [round((first + i) * step, 10) for i in range(count + 1)]


def _range(values: Iterable[float]) -> tuple[float, float]:
    found = list(values)
    low, high = min(found), max(found)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _legend(names: Mapping[str, object]) -> str:
    keys = (f'<span><i class="b{i % COLOURS}"></i>{escape(name)}</span>' for i, name in enumerate(names))
    return f'<p class="legend">{"".join(keys)}</p>'


def _svg(height: int, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">{"".join(parts)}</svg>'
