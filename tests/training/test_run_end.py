"""What follows training: whatever fails there, the head and its results are saved, and the other parts are done."""

import json
import shutil
from dataclasses import replace

import pytest

from specheads.training import build
from specheads.training import run as training
from specheads.training.errors import TrainingStopped
from specheads.training.parity import ParityConfig
from specheads.training.report import card as run_card
from specheads.training.report import curves
from specheads.training.run import prepare
from tests.support.fake_hub import catch_uploads
from tests.support.resumable_runs import options
from tests.support.saved_features import recipe
from train import heads

pytestmark = pytest.mark.usefixtures("cache_in_tmp")


def results(output):
    return json.loads((output / "results.json").read_text("utf8"))


@pytest.mark.parametrize("best", [False, True])
def test_a_resumed_run_may_delete_the_checkpoint_it_began_from(best, folder, tmp_path):
    limited = {"eval_steps": 2, "save_total_limit": 2, "load_best_model_at_end": best}
    prepare(options(tmp_path, folder, **{**limited, "max_steps": 4})).train()
    first = results(tmp_path)
    run = prepare(options(tmp_path, folder, **{**limited, "max_steps": 8, "metric_for_best_model": "loss"}))
    metrics = run.train()
    assert not (tmp_path / "checkpoint-4").exists() and run.failed == []
    assert results(tmp_path) == metrics and metrics["eval_loss"] != first["eval_loss"]


def test_a_run_whose_best_checkpoint_is_gone_saves_the_last_head(folder, tmp_path):
    best = {"eval_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    run = prepare(options(tmp_path, folder, **best))
    load = run.trainer._load_best_model

    def deleted_before():
        shutil.rmtree(run.trainer.state.best_model_checkpoint)
        load()

    run.trainer._load_best_model = deleted_before
    metrics = run.train()
    assert run.trainer.restored_step is None and "head_step" not in metrics
    assert (tmp_path / "model.safetensors").is_file() and results(tmp_path) == metrics


@pytest.mark.parametrize("saved", [False, True])
def test_evaluations_have_at_most_a_share_of_the_rows_trained_on(saved, folder, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(build, "MIN_ROWS", 2)
    wanted = recipe(folder, tmp_path, features=folder / "saved" if saved else None, eval_strategy="no")
    whole = prepare(replace(wanted, evaluation_share=None)).trainer.eval_dataset
    assert len(whole) == 5 and "held-out rows" not in caplog.text
    trainer = prepare(wanted).trainer  # four steps of two rows
    assert trainer.evaluate()["eval_rows"] == len(trainer.eval_dataset) == 2
    assert [list(row["input_ids"]) for row in trainer.eval_dataset] == [list(whole[i]["input_ids"]) for i in (0, 2)]
    assert "evaluation: 2 of 5 held-out rows, 1 times: at most evaluation_share=0.1" in caplog.text


def broken(*args, **kwargs):
    raise ValueError("this part\nis broken")


PARTS = {
    "the evaluation": ("evaluate", None), "the figure of the curves": (curves, "draw"),
    "the model card": (run_card, "write"), "the parity gate": (training, "compare"),
    "the upload": ("push_to_hub", None),
}  # fmt: skip


@pytest.mark.draws
@pytest.mark.parametrize("part", PARTS)
def test_a_fault_after_training_costs_neither_the_head_nor_the_other_parts(part, folder, tmp_path, monkeypatch, caplog):
    uploads = []
    catch_uploads(monkeypatch, uploads.append)
    monkeypatch.setattr(training, "compare", lambda *_: training.Parity(1.5, 1.5, 1.4, 30, 0.02))
    when = "no" if part == "the evaluation" else "steps"
    wanted = recipe(folder, tmp_path, push_to_hub=True, hub_strategy="end", eval_strategy=when, eval_steps=3)
    object.__setattr__(wanted, "parity", ParityConfig(prompts=1))
    (tmp_path / "results.json").write_text('{"eval_accepted_length": 9.0}')  # an earlier run's
    run = prepare(wanted)
    owner, name = PARTS[part]
    monkeypatch.setattr(*((run.trainer, owner) if name is None else (owner, name)), broken)
    metrics = run.train()
    assert run.failed == [part]
    told = [record.getMessage() for record in caplog.records if "failed" in record.getMessage()]
    assert told == [f"{part} failed (ValueError: this part is broken); the head is saved in {tmp_path}"]
    assert (tmp_path / "model.safetensors").is_file() and results(tmp_path) == metrics
    assert ("eval_accepted_length" in metrics) is (part != "the evaluation")
    assert ("parity_measured" in metrics) is (part != "the parity gate")
    assert (tmp_path / "curves.png").is_file() is (part != "the figure of the curves")
    assert (tmp_path / "README.md").is_file() is (part != "the model card")
    assert len(uploads) == (part != "the upload")


def test_a_run_that_is_stopped_after_training_leaves_no_results_of_an_earlier_one(folder, tmp_path):
    def stopped(*args, **kwargs):
        raise KeyboardInterrupt

    (tmp_path / "results.json").write_text('{"eval_accepted_length": 9.0}')
    run = prepare(recipe(folder, tmp_path, features=folder / "saved", eval_strategy="no"))
    run.trainer.evaluate = stopped
    with pytest.raises(TrainingStopped, match="the head is saved"):
        run.train()
    assert "train_loss" in results(tmp_path) and "eval_accepted_length" not in results(tmp_path)


def test_the_last_line_says_which_loss_it_gives(folder, tmp_path):
    run = prepare(recipe(folder, tmp_path, features=folder / "saved"))
    line = run.summary({"train_loss": 14.3812, "eval_loss": 13.3491, "eval_accepted_length": 1.3726})
    assert line == f"saved {tmp_path}: held-out loss 13.35, held-out accepted length 1.373"
    assert run.summary({"train_loss": 14.3812}) == f"saved {tmp_path}: mean training loss 14.38"


def test_the_exit_status_says_that_a_part_failed(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(curves, "draw", broken)
    (tmp_path / "recipe.yaml").write_text(recipe(folder, tmp_path / "out", features=folder / "saved").to_yaml())
    assert heads.main([str(tmp_path / "recipe.yaml")]) == 1
    assert f"saved {tmp_path / 'out'}: " in capsys.readouterr().out
