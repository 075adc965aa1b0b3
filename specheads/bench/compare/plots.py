"""The pictures of `specheads bench`: speed-ups, one panel a cell; and what lossy rules trade, one panel a cell, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from specheads import pictures
from specheads.bench.compare.decoder_spec import Cell, by_cell
from specheads.bench.compare.decoder_texts import exact_twin

NODES_SHOWN = 40  # of a tree
AXES = {"nats": "nats a token from the base (at T = 0 mean KL)", "accuracy": "accuracy (share of right answers)"}


def pictures_of(record: dict[str, Any], *, across: int = 4) -> dict[str, pictures.Draw]:
    """The pictures of a record by name: bench and, if a rule is lossy, trade_off. across: panels in a line, at most."""
    drawn: dict[str, pictures.Draw] = {"bench": partial(speed_ups, record, across=across)}
    if any(row["nats"] is not None and row["over_exact"] for row in record["rows"]):
        drawn["trade_off"] = partial(trade_offs, record, across=across)
    return drawn


def speed_ups(record: dict[str, Any], look: pictures.Look, *, across: int = 4) -> Any:
    """Each decoder's speed-up over the reference, with its interval: a bar in the colour of its engine, over the same
    axis in all panels; T = 0 before sampled text. across: panels in a line, at most."""
    cells = by_cell(record["rows"])
    sets = [*dict.fromkeys(cell.prompts for cell in cells)]
    order = sorted(cells, key=lambda cell: (sets.index(cell.prompts), cell.temperature, cell.top_k, cell.batch))
    across = min(across, len(order), _in_line(order))
    names = list(dict.fromkeys(row["decoder"] for row in record["rows"]))
    engine_of = {name: record.get("engines", {}).get(name, "specheads") for name in names}
    engines = sorted({*engine_of.values()}, key=lambda engine: (engine != "specheads", engine))
    colors = dict(zip(engines, look.colors, strict=False))
    colors["transformers"] = look.soft
    widest = 0.075 * max(map(len, names))  # inches
    whole, panels = pictures.panels(
        -(-len(order) // across), across, 2.9 + widest / across, 0.24 * len(names) + 0.85, sharex=True, sharey=True
    )
    end = max([1.0, *((row["speed_up_interval"] or [row["speed_up"]])[-1] or 0.0 for row in record["rows"])])
    for panel in panels.flat[len(order) :]:
        panel.set_axis_off()
    for panel, cell in zip(panels.flat, order, strict=False):
        for row in cells[cell]:
            level, value = names.index(row["decoder"]), row["speed_up"]
            if value is None:
                continue
            low, high = row["speed_up_interval"] or (value, value)
            panel.barh(level, value, height=0.72, color=colors[engine_of[row["decoder"]]])
            if high > low:
                panel.errorbar(value, level, xerr=[[max(0.0, value - low)], [max(0.0, high - value)]], ecolor=look.ink,
                               capsize=2, elinewidth=1)  # fmt: skip
            panel.annotate(
                f"{value:.2f}×", (max(value, high), level), (4, 0), textcoords="offset points", va="center",
                fontsize=pictures.SMALL, bbox={"facecolor": look.page, "edgecolor": "none", "pad": 1},
            )  # fmt: skip
        panel.axvline(1, color=look.ink, linewidth=0.8, linestyle=(0, (4, 3)))
        panel.set(xlim=(0, 1.16 * end), ylim=(len(names) - 0.45, -0.55))
        panel.set_title(str(cell), fontsize=9)
        panel.set_yticks(range(len(names)), names)
        panel.tick_params(axis="y", length=0)
        panel.grid(visible=False, axis="y")
    whole.supxlabel(f"speed over {record['reference']}, × (bars: 95 % intervals)", fontsize=9.5, color=look.soft)
    if len(engines) > 1:
        from matplotlib.patches import Patch

        keys = [Patch(color=colors[engine], label=engine) for engine in engines]
        whole.legend(handles=keys, loc="outside upper right", ncols=len(keys), frameon=False, fontsize=pictures.SMALL)
    return whole


def _in_line(order: Sequence[Cell]) -> int:
    """How many panels belong side by side: those that differ in the batch only, else in the temperature, else all."""
    first = order[0]
    alike = [cell for cell in order if (cell.prompts, cell.temperature) == (first.prompts, first.temperature)]
    return max(len(alike), 1) if len(alike) > 1 else max(2, sum(cell.prompts == first.prompts for cell in order))


def time_splits(rows: Sequence[dict[str, Any]], look: pictures.Look) -> Any:
    """Where the time of a cell's decoders went: a bar each, of the shares of the loop's parts, for those that know."""
    known = [row for row in rows if row["shares"]]
    parts = [part for part in known[0]["shares"] if any(row["shares"].get(part, 0.0) >= 0.005 for row in known)]
    whole, panels = pictures.panels(1, 1, 5.4, 0.3 * len(known) + 0.9)
    panel = panels[0, 0]
    for level, row in enumerate(known):
        start = 0.0
        for i, part in enumerate(parts):
            share = row["shares"].get(part, 0.0)
            panel.barh(level, share, left=start, height=0.7, color=look.color(i), label=None if level else part)
            if share >= 0.07:
                panel.text(start + share / 2, level, f"{share:.0%}", ha="center", va="center", color=look.page,
                           fontsize=pictures.SMALL)  # fmt: skip
            start += share
    panel.set(xlim=(0, 1), ylim=(len(known) - 0.45, -0.55))
    panel.set_yticks(range(len(known)), [row["decoder"] for row in known])
    panel.tick_params(axis="y", length=0)
    panel.grid(visible=False)
    panel.xaxis.set_major_formatter("{x:.0%}")
    whole.legend(loc="outside upper center", ncols=len(parts), frameon=False, fontsize=pictures.SMALL)
    return whole


def tree_heat(nodes: Mapping[str, float], look: pictures.Look) -> Any:
    """The nodes of a tree, by depth from left to right and by rank among siblings downwards, each the stronger coloured
    the more steps accepted it. nodes: ranks on the path to a node, such as 0.2 → share of steps; the largest are drawn.
    """
    largest = sorted(nodes, key=lambda name: (-nodes[name], name.count(".")))[:NODES_SHOWN]
    paths = sorted(tuple(map(int, name.split("."))) for name in largest)
    lines: dict[tuple[int, ...], int] = {(): 0}  # a node's first child is on its line
    parents: set[tuple[int, ...]] = set()
    for path in paths:
        parent = path[:-1]
        lines[path] = max(lines.values()) + 1 if parent in parents else lines[parent]
        parents.add(parent)
    deepest, lowest = max(map(len, paths)), max(lines.values())
    whole, panels = pictures.panels(1, 1, max(5.4, 0.75 * deepest + 0.9), 0.29 * (lowest + 1) + 0.6)
    panel = panels[0, 0]
    for path, line in lines.items():
        if path:
            above = len(path) - 1, lines[path[:-1]]
            panel.plot(
                [above[0], above[0], len(path)], [above[1], line, line], color=look.soft, linewidth=0.8, zorder=1
            )
        share = nodes[".".join(map(str, path))] if path else 1.0
        name = f"{share:.0%}" if share >= 0.005 else "<1%"
        hides = {"facecolor": look.page, "edgecolor": look.soft, "linewidth": 0.8}
        tints = {"facecolor": look.color(0), "edgecolor": "none", "alpha": 0.6 * share}
        for color, box in (("none", hides), (look.ink, tints)):
            panel.text(len(path), line, name, ha="center", va="center", fontsize=pictures.SMALL, color=color,
                       bbox={"boxstyle": "round,pad=0.3", **box})  # fmt: skip
    panel.set(xlim=(-0.5, deepest + 0.5), ylim=(lowest + 0.6, -0.6), xlabel="depth, the root being the last token")
    panel.set_xticks(range(deepest + 1))
    panel.set_yticks([])
    panel.grid(visible=False)
    panel.spines["left"].set_visible(False)
    return whole


def trade_offs(record: dict[str, Any], look: pictures.Look, *, across: int = 2) -> Any:
    """Speed over the exact rule against distance from the base and, where answers are known, accuracy. The Pareto front
    is in colour, with its rules, thresholds and intervals; all else is grey."""
    cells = by_cell(record["rows"])
    along = [name for name in AXES if any(row[name] is not None for row in record["rows"])]
    across = min(across, len(along))
    whole, panels = pictures.panels(len(cells) * len(along) // across, across, 6.4, 4.6)
    for i, (cell, rows) in enumerate(cells.items()):
        numbers: dict[str, int] = {}  # of a cell's rules: each has one colour
        for panel, name in zip(panels.flat[i * len(along) :], along, strict=False):
            points = points_of(rows, name)
            kept = front(points, least=name == "nats")
            panel.axhline(1, color=look.ink, linewidth=0.8, linestyle=(0, (4, 3)))
            panel.plot([p[0] for p in points], [p[1][0] for p in points], "o", color=look.soft, markersize=3, alpha=0.5)
            panel.plot([p[0] for p in kept], [p[1][0] for p in kept], color=look.color(0), linewidth=0.9)
            texts = []
            for x, speed, text in kept:
                color = look.color(numbers.setdefault(text, len(numbers)))
                panel.plot(x, speed[0], "o", color=color, markersize=6)
                if speed[1:]:
                    panel.vlines(x, *speed[1:], color=color, linewidth=1.2)
                texts.append((x, max(speed), text, color))
            panel.set(xlabel=AXES[name], title=str(cell), ylabel="speed over the exact rule, ×")
            pictures.label_front(panel, texts, left=name == "nats")
            if name == "accuracy":
                panel.xaxis.set_major_formatter("{x:.0%}")
    note = "in colour: no other rule is at least as good in both; dashed: the exact rule; vertical: 95 % intervals"
    whole.supxlabel(note, fontsize=pictures.SMALL, color=look.soft)
    return whole


Point = tuple[float, Sequence[float], str]  # x; speed over the exact rule, and the ends of its interval; the rule


def points_of(rows: Sequence[dict[str, Any]], name: str) -> list[Point]:
    """The rules of a cell's rows by this figure. Words that all decoders share are left out."""
    ruled = [(row, row["decoder"].split(" ")) for row in rows if row["over_exact"] and row[name] is not None]
    common = set[str]().union(*(words for _, words in ruled)).intersection(*(words for _, words in ruled))
    points: list[Point] = [
        (row[name], row["over_exact"], " ".join(word.removeprefix("accept=") for word in words if word not in common))
        for row, words in ruled
    ]
    drafted = {exact_twin(row["decoder"]) for row, _ in ruled}
    exact = [row[name] for row in rows if row["decoder"] in drafted and row[name] is not None]
    return [*points, *((x, (1.0,), "exact") for x in dict.fromkeys(exact))]


def front(points: Sequence[Point], *, least: bool) -> list[Point]:
    """The Pareto front: the points that no other is as good as in both. The best x comes first; least: it is the least.
    Of equal points the first is kept."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda point: (point[0] if least else -point[0], -point[1][0])):
        if not kept or point[1][0] > kept[-1][1][0]:
            kept.append(point)
    return kept
