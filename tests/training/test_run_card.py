"""A run's folder and its checkpoints say what they hold, in a block that runs; what a user wrote there stays."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, TrainerCallback

from specheads import SpecModel, convert
from specheads.models.card import base_license
from specheads.training.report import card
from specheads.training.report.card import is_ours
from tests.support.fake_hub import catch_uploads
from tests.support.full_disk import fill_disk
from tests.support.markdown import blocks
from tests.support.trainers import rows, trainer_of


def run_beside(shipped, folder, held_out=None, **options):
    """A run of two checkpoints, each after an evaluation."""
    model = convert(AutoModelForCausalLM.from_pretrained(shipped / "base"), "eagle3", steps=2)
    settings = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    trainer = trainer_of(folder, model, held_out or rows(4, 1, (6, 12)), **{**settings, **options})
    trainer.train()
    trainer.save_model()
    return trainer


@pytest.fixture(scope="module")
def run(shipped, tmp_path_factory):
    return run_beside(shipped, tmp_path_factory.mktemp("run") / "e3")


def test_a_restored_head_has_its_own_figures_and_the_card_names_its_step(shipped, tmp_path):
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    trainer = run_beside(shipped, tmp_path / "best", **best)
    first, last = (entry for entry in trainer.state.log_history if "eval_loss" in entry)
    assert first["eval_loss"] > last["eval_loss"] and trainer.head_step == 2
    text = (tmp_path / "best" / "README.md").read_text("utf8")
    assert f"| 1 | {first['eval_accuracy_depth_1']:.3f} |" in text
    assert f"**{first['eval_accepted_length']:.2f}**" in text
    assert "head is that of step 2 of 4, the best of the run" in text
    assert f"| 4 | {last['eval_accepted_length']:.2f} | {last['eval_loss']:.4g} |" in text


def test_a_card_has_the_figures_of_each_of_several_held_out_sets(shipped, tmp_path):
    sets = {"prose": rows(4, 1, (6, 12)), "code": rows(4, 2, (6, 12))}
    trainer = run_beside(shipped, tmp_path / "run", sets)
    text = (tmp_path / "run" / "README.md").read_text("utf8")
    for name in sets:
        first, last = (entry for entry in trainer.state.log_history if f"eval_{name}_loss" in entry)
        length, loss = (last[f"eval_{name}_{figure}"] for figure in ("accepted_length", "loss"))
        assert f"held-out rows ({name}), bonus token included: **{length:.2f}**" in text
        depths, steps = (
            text.partition(f"| {column}, {name} |")[2].partition("\n\n")[0] for column in ("depth", "step")
        )
        assert f"\n| 1 | {last[f'eval_{name}_accuracy_depth_1']:.3f} |" in depths
        assert f"\n| 2 | {first[f'eval_{name}_accepted_length']:.2f} |" in steps
        assert f"\n| 4 | {length:.2f} | {loss:.4g} |" in steps


def folder_of(run):
    return Path(run.args.output_dir)


def test_a_card_says_what_was_measured_up_to_there(run):
    evaluations = [entry for entry in run.state.log_history if "eval_loss" in entry]
    folders = {"checkpoint-2": evaluations[0], "checkpoint-4": evaluations[1], "": evaluations[1]}
    for name, measured in folders.items():
        text = (folder_of(run) / name / "README.md").read_text("utf8")
        steps = measured["step"]
        assert f"**{measured['eval_accepted_length']:.2f}**" in text
        assert f"| 2 | {measured['eval_accuracy_depth_2']:.3f} |" in text
        assert f"{steps} steps of 2 rows out of 12, " in text and "learning rate 0.01 (linear), seed 5" in text
        assert "# EAGLE-3 draft head for base\n" in text and "longest text it was trained on has 1" in text
        assert "specheads 0.1.0, torch 2." in text and "--to vllm" in text


def test_its_block_runs_unchanged(run, capsys):
    for folder in (folder_of(run), folder_of(run) / "checkpoint-2"):
        exec(blocks((folder / "README.md").read_text("utf8"), "python")[0], {})
        assert capsys.readouterr().out.startswith("The first thing to know is")


def test_what_a_user_wrote_stays_and_what_is_ours_is_brought_up_to_date(shipped, tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "README.md").write_text("my notes", "utf8")
    run_beside(shipped, tmp_path / "own", max_steps=2)
    assert (tmp_path / "own" / "README.md").read_text("utf8") == "my notes"

    trainer = run_beside(shipped, tmp_path / "ours", max_steps=2)
    path = tmp_path / "ours" / "README.md"
    assert is_ours(path) and "\n2 steps of" in path.read_text("utf8")
    trainer.state.global_step = 3
    trainer.save_model()
    assert is_ours(path) and "\n3 steps of" in path.read_text("utf8")
    path.write_text(path.read_text("utf8").replace("in fewer passes", "in FEWER passes"), "utf8")
    assert not is_ours(path)
    trainer.state.global_step = 4
    trainer.save_model()
    assert "FEWER" in path.read_text("utf8") and "\n3 steps of" in path.read_text("utf8")


def test_an_upload_by_the_trainer_has_the_heads_own_card(shipped, tmp_path, monkeypatch):
    cards = []
    catch_uploads(monkeypatch, lambda folder: cards.append((folder / "README.md").read_text("utf8")))
    trainer = run_beside(shipped, tmp_path / "run", max_steps=2, push_to_hub=True, hub_strategy="end")  # and so uploads
    trainer.push_to_hub(license="mit")
    for text in cards:
        assert text.startswith("---\nlibrary_name: specheads\n") and "accepted length" in text.lower()
        assert 'from_pretrained("someone/e3", base="path/to/the/base")' in text and "export someone/e3 served" in text
    assert ["license: mit" in text for text in cards] == [False, True]
    with pytest.raises(TypeError, match="leave out dataset_tags"):
        trainer.push_to_hub(dataset_tags="own")


def test_a_head_that_transformers_copies_into_the_runs_folder_finds_its_base(shipped, tmp_path, monkeypatch):
    """As it does before it uploads a checkpoint: the base of the copy is at another relative path."""
    catch_uploads(monkeypatch, lambda folder: None)

    class Loads(TrainerCallback):
        found = 0

        def on_save(self, args, state, control, **kwargs):
            for folder in (tmp_path / "e3", tmp_path / "e3" / f"checkpoint-{state.global_step}"):
                assert SpecModel.from_pretrained(folder).base.name_or_path == str(shipped / "base")
            self.found += 1

    run_beside(shipped, tmp_path / "e3", push_to_hub=True, callbacks=[saved := Loads()])
    assert saved.found == 2


def test_no_file_that_a_run_uploads_holds_the_token_of_its_user(shipped, tmp_path, monkeypatch):
    """transformers pickles the arguments, hub_token among them, beside each checkpoint that it uploads."""
    uploaded = {}
    catch_uploads(
        monkeypatch,
        lambda folder: uploaded.update({path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}),
    )
    trainer = run_beside(
        shipped, tmp_path / "e3", push_to_hub=True, hub_token="hf_secret", hub_strategy="all_checkpoints"
    )
    assert {"training_args.bin", "optimizer.pt", "model.safetensors", "README.md"} <= uploaded.keys()
    assert not [name for name, content in uploaded.items() if b"hf_secret" in content]
    assert trainer.args.hub_token == "hf_secret"


def test_a_card_cut_short_by_a_full_disk_is_not_taken_for_the_users(run, tmp_path, monkeypatch):
    model, record, path = run.accelerator.unwrap_model(run.model), run.record(), tmp_path / "README.md"

    with monkeypatch.context() as patch:
        fill_disk(patch)
        with pytest.raises(OSError, match="No space left on device"):
            card.write(tmp_path, model, record)
    assert not list(tmp_path.iterdir())
    card.write(tmp_path, model, record)
    assert is_ours(path) and path.read_text("utf8").startswith("---\n")


def test_the_licence_of_a_base_is_read_from_its_card(tmp_path):
    for text, found in (
        ("---\nlicense: psfl\n---\n# A base", "psfl"), ("# license: mit", None), ("---\n- mit\n---\n", None),
        ("---\nlicense: [a\n---\n", None),
    ):  # fmt: skip
        (tmp_path / "README.md").write_text(text, "utf8")
        assert base_license(str(tmp_path)) == found
    assert base_license("org/somewhere-else") is None
