"""A sweep's curves as PNG: speed and accepted length against accuracy and distance from the target or, if every rule is
lossless, against the tree drafted."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from specheads.bench.sweep.grid import PLAIN
from specheads.bench.sweep.measure import Row
from specheads.decoding.acceptance import rule_named
from specheads.training.report.line_labels import label_ends

AXES = {
    "accuracy": "accuracy (share of right answers)",
    "surprisal_excess": "nats a token from the target (at T = 0 mean KL)",
    "over_exact": "speed over the exact rule", "accepted_length": "accepted length (tokens a step)",
    "speed_up": "speed over no drafts",
}  # fmt: skip
MOST_ENDS = 12  # with more lines than this, a legend replaces labels at the lines' ends
MARKERS = "osv^D<>pP*Xhd"


def draw(folder: Path, rows: Sequence[Row]) -> list[Path]:
    """Draw sweep.png: a curve for each rule and drafter, its points ordered by threshold; without a lossy rule, a curve
    for each drafter, with a point for each tree."""
    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = by_tree(rows) if all(row["lossless"] for row in rows) else by_threshold(rows)
    path = folder / "sweep.png"
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return [path]


def by_threshold(rows: Sequence[Row]) -> Any:
    """Two or four panels: speed and accepted length against distance from the target and, if known, accuracy."""
    from matplotlib import pyplot

    across = ["surprisal_excess", *(["accuracy"] if any(row["accuracy"] is not None for row in rows) else [])]
    figure, panels = pyplot.subplots(
        2, len(across), figsize=(8.0 * len(across), 9.6), squeeze=False, layout="constrained"
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
                    [p[along] for p in shown], [p[up] for p in shown], label=name,
                    color="black" if exact else colors[number % len(colors)], linestyle="none" if exact else "-",
                    marker=MARKERS[number % len(MARKERS)], markersize=8 if exact else 5, linewidth=1, alpha=0.85,
                )  # fmt: skip
            if along == "surprisal_excess":
                panel.set_xscale("symlog", linthresh=1e-3)
            panel.set_xlabel(AXES[along])
            panel.set_ylabel(AXES[up])
            panel.grid(alpha=0.3)
            if len(curves) <= MOST_ENDS:
                label_ends(panel, panel.get_lines())
    if len(curves) > MOST_ENDS:
        draw_legend_below(figure, panels[0][0].get_lines())
    return figure


def by_tree(rows: Sequence[Row]) -> Any:
    """Two panels: speed and accepted length against chain length, or by tree."""
    from matplotlib import pyplot

    drafted = [row for row in rows if row["drafter"] != PLAIN]
    trees = list(dict.fromkeys(row["tree"] or "its own" for row in drafted))
    chains = all(tree.startswith("chain:") for tree in trees)
    x_of = {tree: int(tree.partition(":")[2]) if chains else i for i, tree in enumerate(trees)}
    curves: dict[str, list[Row]] = {}
    for row in drafted:
        rule = "" if row["accept"] == "exact" else row["accept"]
        name = " ".join(part for part in (row["drafter"], row["k_matrix"], rule, sampling_of(row)) if part)
        curves.setdefault(name, []).append(row)
    figure, panels = pyplot.subplots(2, 1, figsize=(8.0, 9.6), layout="constrained")
    for panel, up in zip(panels, ("speed_up", "accepted_length"), strict=True):
        for number, (name, points) in enumerate(curves.items()):
            shown = sorted((x_of[p["tree"] or "its own"], p[up]) for p in points if p[up] is not None)
            x, y = [x for x, _ in shown], [y for _, y in shown]
            panel.plot(x, y, marker=MARKERS[number % len(MARKERS)], label=name)
        panel.set_xticks(list(x_of.values()), None if chains else trees)
        panel.set_xlabel("γ: tokens of a chain" if chains else "tree")
        panel.set_ylabel(AXES[up])
        panel.grid(alpha=0.3)
    panels[0].axhline(1, color="grey", linewidth=1, linestyle="--")
    for panel in panels:
        label_ends(panel, panel.get_lines()[: len(curves)])
    return figure


def sampling_of(row: Row) -> str:
    """A label such as `T=1 k=50`; empty for greedy decoding, without k if it samples among all tokens."""
    parts = [f"T={row['temperature']:g}"] if row["temperature"] else []
    return " ".join([*parts, *([f"k={row['top_k']}"] if row["top_k"] else [])])


def draw_legend_below(figure: Any, lines: Sequence[Any]) -> None:
    """Draw a legend below all panels, in as many columns as fit, if there are too many lines to label at their ends."""
    longest = 0.09 * max(len(line.get_label()) for line in lines) + 0.6  # inches
    columns = max(1, int(figure.get_figwidth() / longest))
    figure.legend(handles=lines, loc="outside lower center", ncols=columns, fontsize=8)


def require_matplotlib() -> None:
    """ImportError, with what to do, if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("pictures need matplotlib: pip install 'specheads[sweep]', or leave them out with --no-plots")


def families(rows: Sequence[Row]) -> dict[str, list[dict[str, Any]]]:
    """The rows as curves: each has rows that differ only in the threshold, in its order, without plain decoding.
    over_exact: a lossy rule's own ratio; for another lossless rule, its speed-up over no drafts divided by that of the
    exact rule."""

    def drafts(row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in ("drafter", "k_matrix", "tree", "temperature", "top_k"))

    many = len({drafts(row) for row in rows if row["drafter"] != PLAIN}) > 1
    exact = {drafts(row): row["speed_up"] for row in rows if row["accept"] == "exact"}
    made: dict[str, list[tuple[float, dict[str, Any]]]] = {}
    for row in rows:
        if row["drafter"] == PLAIN:
            continue
        rule, kind = rule_named(row["accept"]), row["accept"].partition(":")[0]
        name, threshold = kind, 0.0
        if field := rule.threshold_field:
            threshold = getattr(rule, field)
            fields = dataclasses.fields(cast(Any, rule))
            plain = {f.name for f in fields if getattr(rule, f.name) == f.default} | {field}
            others = [str(value) for field, value in vars(rule).items() if field not in plain]
            name = " ".join([kind, *(["js"] if kind == "fuzzy" and vars(rule)["divergence"] == "js" else []), *others])
        if many:
            parts = (row["drafter"], row["k_matrix"], row["tree"], sampling_of(row), name)
            name = " ".join(part for part in parts if part)
        over, other = row["speed_up"], exact.get(drafts(row))
        if row["lossless"]:
            over = over / other if over and other else None
        point = {**row, "over_exact": over}
        made.setdefault(name, []).append((threshold, point))
    return {name: [point for _, point in sorted(points, key=lambda p: p[0])] for name, points in made.items()}
