"""A sweep's tables and pictures say what its rows do."""

import csv
import io
import json

import pytest

from specheads.bench.sweep import measure as measuring
from specheads.bench.sweep import report
from specheads.bench.sweep.grid import Setting


def row_of(setting, **values):
    base = {
        **measuring.setting_columns(setting), "lossless": setting.lossless, "reference": None, "prompts": 10,
        "tokens": 90, "reviews": 30, "drafted": 60, "accepted": 40, "accepted_length": 3.0, "acceptance_rate": 0.5,
        "correct": 5, "accuracy": 0.5, "mean_kl": 0.0, "surprisal_excess": 0.0, "outside": 0, "draft_reviews": None,
        "swi": None, "seconds": 1.0, "tokens_per_second": 90.0, "speed_up": 1.0, "speed_up_of_each_repeat": [1.0],
    }  # fmt: skip
    return {**base, **values}


MADE = [
    row_of(Setting("none")),
    row_of(Setting("head", tree="chain:3"), speed_up=2.0),
    row_of(Setting("head", "fuzzy:js:0.1", "chain:3"), speed_up=1.25, accuracy=0.495, mean_kl=0.01),
    row_of(Setting("head", "fuzzy:js:0.3", "chain:3"), speed_up=1.5, accuracy=0.4, mean_kl=0.2),
    row_of(Setting("head", "typical", "chain:3"), speed_up=0.9, accuracy=0.6, mean_kl=0.02),
]  # fmt: skip
RECORD = {
    "command": "specheads sweep", "task": "gsm8k", "max_new_tokens": 10, "speed_prompts": 2, "clock": "wall",
    "repeats": 1,
}  # fmt: skip


def test_json_csv_and_markdown_say_the_same_and_pictures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    from specheads.bench.environment import environment

    files = report.write(tmp_path, MADE, {**RECORD, "environment": environment()})
    held = json.loads((tmp_path / "sweep.json").read_text("utf8"))["rows"]
    lines = list(csv.DictReader(io.StringIO((tmp_path / "sweep.csv").read_text("utf8"))))
    markdown = (tmp_path / "sweep.md").read_text("utf8")
    cells = [line.strip("| ").split(" | ") for line in markdown.splitlines() if line.startswith("| ")]
    table = [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]
    assert len(held) == len(lines) == len(table) == len(MADE)
    for row, line, shown in zip(held, lines, table, strict=True):
        assert line["accept"] == (row["accept"] or "") and float(line["speed_up"]) == row["speed_up"]
        assert shown["rule"] == (row["accept"] or "–") and shown["accuracy"] == f"{row['accuracy']:.1%}"
        assert shown["mean KL"] == f"{row['mean_kl']:.4f}" and float(shown["accepted length"]) == row["accepted_length"]
        assert shown["× exact"] == ("–" if row["lossless"] else f"{row['speed_up']:.2f}")
        assert float(shown["× no drafts"]) == pytest.approx(row["speed_up_over_plain"], abs=0.006)
    assert [row["speed_up_over_plain"] for row in held] == [1.0, 2.0, 2.5, 3.0, 1.8]
    png = next(file for file in files if file.suffix == ".png").read_bytes()
    assert png.startswith(b"\x89PNG") and len(png) > 20_000 and "![sweep.png](sweep.png)" in markdown


def test_a_sweep_of_lossless_rules_is_drawn_against_what_is_drafted(tmp_path):
    pytest.importorskip("matplotlib")
    from specheads.bench.sweep import plots

    chains = [
        row_of(Setting("head", tree=f"chain:{n}", temperature=t, top_k=k), speed_up=n / 2 + t, accepted_length=1.0 + n)
        for n in (7, 3, 10) for t, k in ((0.0, 0), (1.0, 50))
    ]  # fmt: skip
    speed, length = plots.by_tree([MADE[0], *chains]).axes
    for panel, values in ((speed, {"head": (1.5, 3.5, 5), "head T=1 k=50": (2.5, 4.5, 6)}), (length, None)):
        drawn = [line for line in panel.get_lines() if len(line.get_xdata()) == 3]
        assert [list(line.get_xdata()) for line in drawn] == [[3, 7, 10]] * 2 and "γ" in panel.get_xlabel()
        if values:
            assert {line.get_label(): tuple(line.get_ydata()) for line in drawn} == values
        else:
            assert [list(line.get_ydata()) for line in drawn] == [[4, 8, 11]] * 2
    trees = [row_of(Setting("head", "block", tree)) for tree in ("chain:3", None, "dynamic:16,4,4")]
    (panel, _) = plots.by_tree(trees).axes
    assert [tick.get_text() for tick in panel.get_xticklabels()] == ["chain:3", "its own", "dynamic:16,4,4"]
    assert [text.get_text() for text in panel.texts] == ["head block"] and not panel.figure.legends
    (file,) = plots.draw(tmp_path, [MADE[0], *chains])
    assert file.read_bytes().startswith(b"\x89PNG")


def test_each_top_k_and_k_matrix_has_a_curve_of_its_own_by_its_name():
    plots = pytest.importorskip("specheads.bench.sweep.plots")
    rows = [
        row_of(Setting(drafter, f"fuzzy:tv:{threshold}", "chain:3", 1.0, k, matrix))
        for drafter, matrix in (("m", ""), ("cascade:m+maxgram", "[[1]]"), ("cascade:m+maxgram", "[[2]]"))
        for k in (20, 50) for threshold in (0.1, 0.2)
    ]  # fmt: skip
    curves = plots.families(rows)
    assert {name: len(points) for name, points in curves.items()} == {
        f"{drafter} chain:3 T=1 k={k} fuzzy tv": 2
        for drafter in ("m", "cascade:m+maxgram [[1]]", "cascade:m+maxgram [[2]]") for k in (20, 50)
    }  # fmt: skip
    assert all(len({(p["top_k"], p["k_matrix"]) for p in points}) == 1 for points in curves.values())


def test_the_fastest_rule_that_keeps_accuracy_is_named_or_that_there_is_none():
    (found,) = report.fastest_lossy(MADE)
    assert found["accept"] == "fuzzy:js:0.1" and found["faster"] and found["speed_up_over_exact"] == 1.25
    (found,) = report.fastest_lossy(MADE[:2] + MADE[3:4])
    assert found["accept"] is None and not found["faster"]
    (found,) = report.fastest_lossy(MADE[:2] + MADE[4:])
    assert found["accept"] == "typical" and not found["faster"]


def test_gamma_by_k_has_a_line_a_gamma_and_kept_tokens_and_seconds_of_each_k():
    assert report.gamma_by_k(MADE) is None
    rows = [
        row_of(Setting("m", "exact", f"chain:{n}", t, k), accepted=n * 10, tokens=n * 12, seconds=n + k / 100)
        for n in (3, 5) for t, k in ((0.0, 0), (1.0, 50))
    ]  # fmt: skip
    lines = report.markdown(*report.gamma_by_k(rows)).splitlines()
    assert lines[0].count("kept / tokens") == 2 and "k=1:" in lines[0] and "k=50:" in lines[0]
    cascades = [{**row, "drafter": "cascade:m+maxgram", "k_matrix": k} for k in ("[[1]]", "[[2]]") for row in rows]
    _, table = report.gamma_by_k(cascades)
    assert [line[0] for line in table] == ["cascade:m+maxgram [[1]]"] * 2 + ["cascade:m+maxgram [[2]]"] * 2
    assert table[0][1:4] == ["3", "30 / 36", "3.00"] and not any("–" in line for line in table)
    assert lines[2] == "| m | 3 | 30 / 36 | 3.00 | 1.00 | 30 / 36 | 3.50 | 1.00 |" and lines[3].startswith(
        "| m | 5 | 50 / 60"
    )


def test_lossless_rules_are_drawn_at_their_measured_speed_over_the_exact_rule():
    plots = pytest.importorskip("specheads.bench.sweep.plots")
    block = row_of(Setting("head", "block", "chain:3"), speed_up=2.5)
    alone = row_of(Setting("head", "block", "chain:5"), speed_up=2.5)
    curves = plots.families([*MADE, block, alone])
    assert [p["over_exact"] for name in curves for p in curves[name]] == [1.0, 1.25, 1.5, 0.9, 1.25, None]
