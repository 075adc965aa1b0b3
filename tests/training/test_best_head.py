"""A run that keeps its best checkpoint: its curve stays what was measured at each step, its figures are the best's,
and one that stopped early does not train on when its command is repeated."""

import json

import pytest

from specheads.training.recipe.arguments import SpecTrainingArguments
from specheads.training.report.compare import read_curve
from specheads.training.report.curves import series
from specheads.training.run import prepare
from tests.support.fake_hub import catch_uploads
from tests.support.saved_features import recipe

pytestmark = pytest.mark.usefixtures("cache_in_tmp")


def run_of(output, folder, early_stopping=None, **training):
    """Its best head is the one of the highest loss, which falls."""
    best = {
        "save_strategy": "steps", "save_steps": 1, "eval_steps": 1, "max_steps": 3, "resume_from_checkpoint": "auto",
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True,
    }  # fmt: skip
    options = recipe(folder, output, features=folder / "saved", **{**best, **training})
    object.__setattr__(options, "early_stopping", early_stopping)
    return prepare(options)


@pytest.mark.parametrize(
    ("name", "greater"),
    [
        ("loss", False), ("token_loss", False), ("eval_loss_depth_2", False), ("feature", False), ("base", False),
        ("confidence", False), ("accepted_length_error", False), ("accepted_length", True),
        ("eval_accepted_length_tree", True), ("accuracy_depth_1", True), ("acceptance_depth_2", True),
    ],
)  # fmt: skip
def test_the_best_head_has_the_lowest_loss_and_the_highest_of_other_figures(name, greater, tmp_path):
    assert SpecTrainingArguments(tmp_path, use_cpu=True, metric_for_best_model=name).greater_is_better is greater
    given = SpecTrainingArguments(tmp_path, use_cpu=True, metric_for_best_model=name, greater_is_better=not greater)
    assert given.greater_is_better is not greater


def evaluations(output):
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return [entry for entry in history if "eval_loss" in entry]


def test_the_curve_keeps_each_step_and_the_restored_head_has_the_figures_of_its_own(folder, tmp_path, monkeypatch):
    run, counted = run_of(tmp_path, folder), []
    evaluate = run.trainer.evaluate
    monkeypatch.setattr(run.trainer, "evaluate", lambda *a, **k: (counted.append(1), evaluate(*a, **k))[1])
    metrics = run.train()
    found = evaluations(tmp_path)
    best = max(found, key=lambda entry: entry["eval_loss"])
    assert [entry["step"] for entry in found] == [1, 2, 3] and best["step"] < 3
    assert len(counted) == 3  # that of the head in memory is known
    assert metrics["head_step"] == best["step"] and metrics["eval_loss"] == best["eval_loss"]
    assert json.loads((tmp_path / "results.json").read_text()) == metrics
    drawn = series(run.trainer.state.log_history)["loss"]["held out"]
    assert drawn == [(entry["step"], entry["eval_loss"], None) for entry in found]
    lengths = [point.length for point in read_curve(tmp_path).points]
    assert lengths == [entry["eval_accepted_length"] for entry in found]
    card = (tmp_path / "README.md").read_text("utf8")
    assert card.count("\n| 3 |") == 1 and f"of step {best['step']} of 3" in card
    assert f"the head of step {best['step']}, the best" in run.summary(metrics)


def test_a_finished_run_that_is_repeated_measures_its_head_again_and_logs_it_once(folder, tmp_path):
    first = run_of(tmp_path, folder).train()
    before = evaluations(tmp_path)
    again = run_of(tmp_path, folder).train()
    assert evaluations(tmp_path) == before
    assert {name: again[name] for name in ("eval_loss", "head_step")} == {
        name: first[name] for name in ("eval_loss", "head_step")
    }


def test_a_run_that_stopped_early_takes_no_step_when_its_command_is_repeated(folder, tmp_path):
    stopping = {"max_steps": 8, "early_stopping": 1}
    first = run_of(tmp_path, folder, **stopping)
    metrics = first.train()
    steps, before = first.trainer.state.global_step, evaluations(tmp_path)
    assert steps < 8
    again = run_of(tmp_path, folder, **stopping)
    assert again.train()["eval_loss"] == metrics["eval_loss"]
    assert again.trainer.state.global_step == steps and evaluations(tmp_path) == before
    assert again.trainer.state.stateful_callbacks["EarlyStoppingCallback"]
    patient = run_of(tmp_path, folder, max_steps=8, early_stopping=2)
    patient.train()
    assert patient.trainer.state.global_step > steps


def test_a_run_that_resumes_keeps_the_evaluations_it_had_waited_for(folder, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    waiting = {"early_stopping": 2}
    first = run_of(whole, folder, max_steps=8, **waiting)
    first.train()
    stop = first.trainer.state.global_step
    assert 2 < stop < 8
    run_of(cut, folder, max_steps=stop - 1, **waiting).train()
    resumed = run_of(cut, folder, max_steps=8, **waiting)
    resumed.train()
    assert resumed.trainer.state.global_step == stop


def test_early_stopping_can_be_asked_for_when_a_run_resumes(folder, tmp_path):
    run_of(tmp_path, folder, max_steps=2).train()
    resumed = run_of(tmp_path, folder, max_steps=8, early_stopping=1)
    resumed.train()
    assert resumed.trainer.state.global_step == 3


def test_a_run_uploads_its_head_once_with_the_figures_of_its_end(folder, tmp_path, monkeypatch):
    uploaded = []
    catch_uploads(monkeypatch, lambda folder: uploaded.append((folder / "README.md").read_text("utf8")))
    metrics = run_of(tmp_path, folder, push_to_hub=True, hub_strategy="end").train()
    [card] = uploaded
    assert f"**{metrics['eval_accepted_length']:.2f}**" in card and "someone/e3" in card
    assert "head is that of step 1 of 3" in card and "library_name: specheads" in card
