"""The pictures of `specheads bench`: speed-ups, one panel a cell; and what lossy rules trade, one panel a cell, too."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specheads.bench.compare.decoder_spec import by_cell
from specheads.decoding.acceptance import RULES

AXES = {"accuracy": "accuracy (share of right answers)", "nats": "nats a token from the base (at T = 0 mean KL)"}

MARKERS = "osv^D<>pX"  # with matplotlib's ten colours: ninety curves that differ


def require_matplotlib() -> None:
    """ImportError, with what to do, if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("pictures need matplotlib: pip install 'specheads[plots]', or leave them out with --no-plots")


def draw(folder: Path, record: dict[str, Any]) -> list[Path]:
    """Draw bench.png and, if a rule is lossy, trade_off.png. Needs matplotlib."""
    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pictures = {"bench.png": speed_ups}
    if any(row["nats"] is not None and row["over_exact"] for row in record["rows"]):
        pictures["trade_off.png"] = trade_offs
    for name, picture in pictures.items():
        figure = picture(record)
        figure.savefig(folder / name, dpi=110)
        pyplot.close(figure)
    return [folder / name for name in pictures]


def speed_ups(record: dict[str, Any]) -> Any:
    """Each decoder's speed-up over the reference, with its interval."""
    from matplotlib import pyplot

    cells = by_cell(record["rows"])
    names = list(dict.fromkeys(row["decoder"] for row in record["rows"]))
    across = max(1, len(cells) // len({cell.prompts for cell in cells}))
    down = -(-len(cells) // across)
    figure, panels = pyplot.subplots(
        down, across, figsize=(2.6 + 3.2 * across, (0.28 * len(names) + 0.9) * down), squeeze=False, sharey=True,
        layout="constrained",
    )  # fmt: skip
    for panel, (cell, rows) in zip(panels.flat, cells.items(), strict=False):
        for row in rows:
            level, value = names.index(row["decoder"]), row["speed_up"] or 0.0
            low, high = row["speed_up_interval"] or (value, value)
            panel.barh(level, value, color="tab:grey" if row["reference"] else "tab:blue")
            panel.errorbar(
                value, level, xerr=[[max(0.0, value - low)], [max(0.0, high - value)]], color="black", capsize=2,
                linewidth=1,
            )  # fmt: skip
        panel.axvline(1, color="black", linewidth=0.8, linestyle="--")
        panel.set_yticks(range(len(names)), names, fontsize=8)
        panel.set_title(str(cell), fontsize=9)
        panel.grid(axis="x", alpha=0.3)
    panels[0][0].invert_yaxis()
    figure.supxlabel(f"speed over {record['reference']}, with 95 % intervals", fontsize=9)
    return figure


def trade_offs(record: dict[str, Any]) -> Any:
    """Speed over the exact rule against distance from the base and, where answers are known, accuracy: a curve for each
    rule, its points ordered by threshold."""
    from matplotlib import pyplot

    cells = by_cell(record["rows"])
    along = [name for name in ("nats", "accuracy") if any(row[name] is not None for row in record["rows"])]
    figure, panels = pyplot.subplots(
        len(cells), len(along), figsize=(7.0 * len(along), 4.8 * len(cells)), squeeze=False, layout="constrained"
    )
    for line, (cell, rows) in zip(panels, cells.items(), strict=True):
        for panel, name in zip(line, along, strict=True):
            for number, (label, points) in enumerate(curves(rows).items()):
                shown = [p for p in points if p[name] is not None]
                panel.plot(
                    [p[name] for p in shown],
                    [p["over_exact"][0] for p in shown],
                    marker=MARKERS[number % 9],
                    label=label,
                )
            panel.axhline(1, color="black", linewidth=0.8, linestyle="--")
            panel.set_xlabel(AXES[name])
            panel.set_ylabel("speed over the exact rule")
            panel.set_title(str(cell), fontsize=9)
            panel.grid(alpha=0.3)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize=7)
    return figure


def curves(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of lossy rules, by decoder without the rule's threshold, in the order of the threshold."""
    points: dict[str, list[tuple[float, dict[str, Any]]]] = {}
    for row in rows:
        words = row["decoder"].split(" ")
        rule = next((word.removeprefix("accept=") for word in words if word.startswith("accept=")), None)
        if rule is None or not row["over_exact"]:
            continue
        kind, options = RULES.parse(rule)
        field = RULES[kind].threshold_field
        threshold = options.pop(field, None) if field else None
        label = " ".join([*(word for word in words if not word.startswith("accept=")), kind, *options.values()])
        points.setdefault(label, []).append((float(threshold or 0.0), row))
    return {label: [row for _, row in sorted(ordered, key=lambda p: p[0])] for label, ordered in points.items()}
