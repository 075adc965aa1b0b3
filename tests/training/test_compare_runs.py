"""Runs beside one another: what is drawn is what was logged, by tokens and CPU time, with intervals that hold."""

import json
import time

import pytest
import torch

from specheads.losses.metrics import AcceptanceMeter, TrainingMeter
from specheads.training.report import compare
from tests.support.command_line import run
from tests.support.trainers import logged, rows, trainer_of

HISTORY = [
    {"step": 2, "loss": 1.0, "accepted_length": 1.2, "tokens_seen": 100, "cpu_seconds": 60.0},
    {"step": 3, "eval_accepted_length": 1.5, "eval_accepted_length_error": 0.1},
    {"step": 4, "loss": 1.0, "accepted_length": 1.4, "tokens_seen": 300, "cpu_seconds": 180.0},
    {"step": 4, "eval_accepted_length": 2.0, "eval_accepted_length_error": 0.2},
]


def folder_of(tmp_path, name, history):
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / name / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    return tmp_path / name


def test_the_error_is_that_of_independent_batches_whatever_is_alike_within_one():
    """Over 200 meters of 12 batches of 30 equal positions each, the 95 % interval (z = 1.96) covers the true length in
    all but some: 12 batches give 91 to 95 %, so fewer than 165 of 200 has a chance below 1e-6. Intervals that took the
    positions for independent would cover 30 %."""
    generator, covered, chance = torch.Generator().manual_seed(0), 0, 0.5
    for _ in range(200):
        meter = AcceptanceMeter()
        for hit in (torch.rand(12, generator=generator) < chance).tolist():
            meter.add(torch.full((30, 1), 0 if hit else 1))
        found = meter.compute()
        covered += abs(found["accepted_length"] - (1 + chance)) <= 1.96 * found["accepted_length_error"]
    assert 165 <= covered < 200


def test_the_error_of_a_ratio_is_that_of_its_formula_and_adds_up_over_meters():
    batches = [torch.tensor([[0, 0], [0, 5]]), torch.tensor([[3, 0]]), torch.tensor([[0, 0], [1, 1], [0, 0]])]
    accepted, sizes = torch.tensor([3.0, 0.0, 4.0]), torch.tensor([2.0, 1.0, 3.0])
    rest = accepted - accepted.sum() / sizes.sum() * sizes
    expected = float((rest.square().sum() * 3 / 2).sqrt() / sizes.sum())
    whole, first, second = AcceptanceMeter(), TrainingMeter(), TrainingMeter()
    for i, ranks in enumerate(batches):
        whole.add(ranks)
        (first if i else second).add(ranks, {}, 1, torch.tensor(1))
    assert whole.compute()["accepted_length_error"] == pytest.approx(expected)
    assert TrainingMeter.combined([first.state(), second.state()])["accepted_length_error"] == pytest.approx(expected)
    assert "accepted_length_error" not in TrainingMeter.combined([second.state()])  # one batch says nothing of it


def test_what_an_older_version_had_counted_since_the_last_log_is_left_out():
    before, now = (
        {"counts": [3] * 6, "chances": [], "batches": [1.0] * 4, "tokens": [5], "term ce": [10.0]},
        TrainingMeter(),
    )
    assert TrainingMeter.combined([before]) == {"ce": 2.0}
    now.add(torch.tensor([[0, 1]]), {"ce": torch.tensor(0.0)}, 1, torch.tensor(5))
    assert TrainingMeter.combined([before, now.state()])["accepted_length"] == 2


def test_a_run_logs_the_tokens_it_has_seen_and_its_cpu_time_and_resumes_both(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 3, "logging_steps": 2, "max_steps": 6}
    whole = trainer_of(tmp_path / "whole", data=rows(12), **saving)
    began = time.process_time()
    whole.train()
    spent = time.process_time() - began
    entries = [entry for entry in whole.state.log_history if "loss" in entry]
    labels = sum(label != -100 for row in rows(12) for label in row["labels"])  # 6 steps of 2 rows: each once
    assert entries[-1]["tokens_seen"] == labels and entries[0]["tokens_seen"] < entries[1]["tokens_seen"] < labels
    seconds = [entry["cpu_seconds"] for entry in entries]
    assert 0 < seconds[0] < seconds[1] < seconds[2] <= spent
    resumed = trainer_of(tmp_path / "resumed", data=rows(12), **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert logged(resumed, "tokens_seen") == logged(whole, "tokens_seen")
    again = [entry["cpu_seconds"] for entry in resumed.state.log_history if "loss" in entry]
    assert again[0] == seconds[0] < again[1] < again[2]


def test_points_are_held_out_lengths_at_the_tokens_and_time_of_their_steps(tmp_path):
    curve = compare.read_curve(folder_of(tmp_path, "a", HISTORY))
    assert curve.held_out and [point.step for point in curve.points] == [3, 4]
    middle, last = curve.points
    assert (middle.tokens, middle.cpu_seconds, middle.length) == (200, 120, 1.5)
    assert (last.tokens, last.cpu_seconds, last.length) == (300, 180, 2.0)
    assert (middle.low, middle.high) == pytest.approx((1.5 - 0.196, 1.5 + 0.196), abs=1e-4)
    assert (last.low, last.high) == pytest.approx((2.0 - 0.392, 2.0 + 0.392), abs=1e-4)
    # The last evaluation of a run whose steps are no multiple of logging_steps is past its last log.
    final = {"step": 7, "eval_accepted_length": 2.1}
    after = compare.read_curve(folder_of(tmp_path, "c", [*HISTORY, final])).points[-1]
    assert (after.tokens, after.cpu_seconds, after.length) == (600, 360, 2.1)
    training = compare.read_curve(folder_of(tmp_path, "b", HISTORY[:1]))
    assert not training.held_out and training.points[0].tokens == 100 and training.points[0].low is None


def test_the_picture_has_a_named_line_and_a_band_for_each_run(tmp_path, monkeypatch, capsys):
    figure_module = pytest.importorskip("matplotlib.figure")
    drawn, save = [], figure_module.Figure.savefig
    monkeypatch.setattr(
        figure_module.Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k))
    )
    folders = [folder_of(tmp_path, f"{name}/eagle3", HISTORY) for name in ("one", "two")]
    code, out, _ = run(capsys, "curves", *folders, "--out", tmp_path / "all" / "c.png")
    assert code == 0 and "1.61–2.39" in out and "3:00" in out
    assert (tmp_path / "all" / "c.png").read_bytes().startswith(b"\x89PNG")
    by_tokens, by_time = drawn[0].axes
    for panel, x in ((by_tokens, [200, 300]), (by_time, [2, 3])):
        assert [line.get_label() for line in panel.get_lines()] == ["one/eagle3", "two/eagle3"]
        assert [text.get_text() for text in panel.texts] == ["one/eagle3", "two/eagle3"]  # beside the lines
        assert panel.get_legend() is None
        for line in panel.get_lines():
            assert (list(line.get_xdata()), list(line.get_ydata())) == (x, [1.5, 2.0])
        low, high = (f(panel.collections[0].get_paths()[0].vertices[:, 1]) for f in (min, max))
        assert (low, high) == pytest.approx((1.5 - 0.196, 2.392), abs=1e-3)
    code, out, _ = run(capsys, "curves", folders[0], "--out", tmp_path / "c.png", "--json")
    assert code == 0 and json.loads(out)["runs"][0]["points"][1]["tokens"] == 300


@pytest.mark.parametrize(
    ("history", "said"),
    [
        (None, "no such folder"),
        ([{"step": 3, "train_loss": 2.0}], "training.logging_steps"),
        ([{"step": 3, "eval_loss": 2.0, "eval_accepted_length": 1.5}], "training.logging_steps"),
        ([{"step": 1, "loss": 2.0, "accepted_length": 1.0}], "records no token counts"),
        ([{"step": 1, "loss": 2.0, "tokens_seen": 3, "cpu_seconds": 1.0}], "has no accepted_length"),
        ([{"loss": 2.0, "tokens_seen": 3}], "is no record of a training run"),
    ],
)
def test_a_folder_without_such_a_run_is_one_line(history, said, tmp_path, capsys):
    folder = tmp_path / "none" if history is None else folder_of(tmp_path, "a", history)
    code, out, err = run(capsys, "curves", folder, "--out", tmp_path / "c.png")
    assert code == 2 and not out and said in err and err.count("\n") == 1 and not (tmp_path / "c.png").exists()
