"""The curves of a sweep as PNG: speed and accepted length against accuracy and against distance from the target."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from specheads.accept.named import THRESHOLDS, rule_named
from specheads.sweep.grid import PLAIN
from specheads.sweep.measure import Row

AXES = {
    "accuracy": "accuracy (share of right answers)",
    "surprisal_excess": "nats a token from the target (at T = 0 mean KL)",
    "over_exact": "speed over the exact rule", "accepted_length": "accepted length (tokens a step)",
}  # fmt: skip
MARKERS = "osv^D<>pP*Xhd"


def draw(folder: Path, rows: Sequence[Row]) -> list[Path]:
    """sweep.png: four panels, a curve a rule and drafter, its points in the order of the threshold."""
    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    across = ["surprisal_excess", *(["accuracy"] if any(row["accuracy"] is not None for row in rows) else [])]
    figure, panels = pyplot.subplots(
        2, len(across), figsize=(6.4 * len(across), 9.6), squeeze=False, layout="constrained"
    )
    curves = families(rows)
    colors = [*pyplot.get_cmap("tab20")(range(20)), *pyplot.get_cmap("tab20b")(range(20))]
    for i, up in enumerate(("over_exact", "accepted_length")):
        for j, along in enumerate(across):
            panel = panels[i][j]
            for number, (name, points) in enumerate(curves.items()):
                shown = [p for p in points if p[along] is not None and p[up] is not None]
                exact = all(p["lossless"] for p in points)
                panel.plot(
                    [p[along] for p in shown], [p[up] for p in shown], label=name if not i and not j else None,
                    color="black" if exact else colors[number % len(colors)], linestyle="none" if exact else "-",
                    marker=MARKERS[number % len(MARKERS)], markersize=8 if exact else 5, linewidth=1, alpha=0.85,
                )  # fmt: skip
            if along == "surprisal_excess":
                panel.set_xscale("symlog", linthresh=1e-3)
            panel.set_xlabel(AXES[along])
            panel.set_ylabel(AXES[up])
            panel.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    path = folder / "sweep.png"
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return [path]


def require_matplotlib() -> None:
    """ImportError, with what to do, where it is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("pictures need matplotlib: pip install 'specheads[sweep]', or go without by --no-plots")


def families(rows: Sequence[Row]) -> dict[str, list[dict[str, Any]]]:
    """The rows as curves: those that differ in the threshold alone, in its order. Plain decoding is in none."""
    many = len({(r["drafter"], r["tree"], r["temperature"], r["top_k"]) for r in rows if r["drafter"] != PLAIN}) > 1
    made: dict[str, list[tuple[float, dict[str, Any]]]] = {}
    for row in rows:
        if row["drafter"] == PLAIN:
            continue
        rule, kind = rule_named(row["accept"]), row["accept"].partition(":")[0]
        name, threshold = kind, 0.0
        if kind in THRESHOLDS:
            threshold = getattr(rule, THRESHOLDS[kind])
            fields = dataclasses.fields(cast(Any, rule))
            plain = {f.name for f in fields if getattr(rule, f.name) == f.default} | {THRESHOLDS[kind]}
            others = [str(value) for field, value in vars(rule).items() if field not in plain]
            name = " ".join([kind, *(["js"] if kind == "fuzzy" and vars(rule)["divergence"] == "js" else []), *others])
        if many:
            law = f"T={row['temperature']:g}" if row["temperature"] else ""
            name = " ".join(part for part in (row["drafter"], row["tree"], law, name) if part)
        point = {**row, "over_exact": 1.0 if row["lossless"] else row["speed_up"]}
        made.setdefault(name, []).append((threshold, point))
    return {name: [point for _, point in sorted(points, key=lambda p: p[0])] for name, points in made.items()}
