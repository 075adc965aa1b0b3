"""The plot of `specheads bench`: each decoder's speed-up over the reference, with its interval, one panel per cell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specheads.bench.compare.cell import Cell


def draw(path: Path, record: dict[str, Any]) -> Path:
    """Draw the plot, with one row of panels per prompt set. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = record["rows"]
    sets = list(dict.fromkeys(row["prompts"] for row in rows))
    columns = list(dict.fromkeys((row["batch"], row["temperature"]) for row in rows))
    names = list(dict.fromkeys(row["decoder"] for row in rows))
    height = 0.28 * len(names) + 0.9
    figure, panels = pyplot.subplots(
        len(sets), len(columns), figsize=(2.6 + 3.2 * len(columns), height * len(sets)), squeeze=False, sharey=True,
        layout="constrained",
    )  # fmt: skip
    for i, prompts in enumerate(sets):
        for j, (batch, temperature) in enumerate(columns):
            panel = panels[i][j]
            cell = Cell(prompts, batch, temperature)
            for row in rows:
                if (row["prompts"], row["batch"], row["temperature"]) != (prompts, batch, temperature):
                    continue
                level, value = names.index(row["decoder"]), row["speed_up"]
                low, high = row["speed_up_interval"] or (value, value)
                panel.barh(level, value, color="tab:grey" if row["decoder"] == record["reference"] else "tab:blue")
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
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path
