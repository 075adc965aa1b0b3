"""The model card says what a run did and nothing of the machine; the recipe it shows is one that runs again."""

import json
import shutil

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from specheads import SpecModel, convert
from specheads.models.card import card
from specheads.training.recipe.recipe import Recipe
from tests.support.heads_on_disk import trained

RECIPE = {
    "base": "/home/me/models/small", "data": {"train": ["/home/me/private/chats.jsonl", "org/rows"], "max_length": 512},
    "head": {"kind": "eagle3", "steps": 3}, "training": {"output_dir": "/home/me/runs/e3", "learning_rate": 1e-4},
    "parity": {"prompts": 0},
}  # fmt: skip


@pytest.fixture
def run(named, tmp_path):
    """What a run leaves in its output folder."""
    folder = tmp_path / "run"
    trained(named, "eagle3", draft_vocab_size=40).save_pretrained(folder)
    last = {"eval_accepted_length": 3.281, "parity_measured": 3.27, "eval_accuracy_depth_1": 0.741}
    last |= {"eval_accuracy_depth_2": 0.55, "eval_conditional_accuracy_depth_2": 0.74}
    last |= {"eval_accepted_length_from_0": 3.4, "eval_accepted_length_from_16384": 1.25}
    history = [{"step": 10 * i, "eval_accepted_length": 1 + i / 10, "eval_loss": 5 - i / 10} for i in range(23)]
    (folder / "results.json").write_text(json.dumps(last))
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": [{"loss": 9.0, "step": 1}, *history]}))
    (folder / "recipe.yaml").write_text(Recipe.from_dict(RECIPE).to_yaml())
    (folder / "curves.png").write_bytes(b"a picture")
    return folder


def test_the_card_says_what_the_run_did(run):
    model = SpecModel.from_pretrained(run)
    model.config.base_model_name_or_path = "org/base"
    text = card(model.config, model.base, model.head, repo_id="someone/head", license="apache-2.0")
    front = yaml.safe_load(text.split("---")[1])
    assert front["base_model"] == "org/base" and front["license"] == "apache-2.0" and "eagle3" in front["tags"]
    assert 'from_pretrained("someone/head")' in text and "# EAGLE-3 draft head for org/base" in text
    assert "**3.28**" in text and "3.27" in text and "| 1 | 0.741 |  |" in text and "| 2 | 0.550 | 0.740 |" in text
    assert "| 0 | 1.00 | 5 |" in text and "| 220 | 3.20 | 2.8 |" in text and text.count("\n| ") == 1 + 2 + 1 + 8 + 3
    assert "| 0–1k | 3.40 |\n| 16k+ | 1.25 |" in text
    assert "(curves.png)" in text and "org/rows" in text and "chats.jsonl" in text and "learning_rate: 0.0001" in text
    assert "specheads export someone/head served --to vllm" in text and "--to medusa" not in text
    assert "/home" not in text and "output_dir" not in text


def test_the_hub_reads_the_figures_of_each_held_out_set(run, tmp_path):
    """As huggingface_hub, whose reader the hub's page agrees with, finds them in the card's front matter."""
    sets = {"eval_code_accepted_length": 2.5, "eval_chat_accepted_length": 3.25, "eval_chat_accuracy_depth_1": 0.75}
    (run / "results.json").write_text(json.dumps(sets))
    (run / "trainer_state.json").unlink()
    model = SpecModel.from_pretrained(run)
    written = ModelCard(card(model.config, model.base, model.head, repo_id="someone/head"))
    found = {(one.dataset_name, one.metric_name): one.metric_value for one in written.data.eval_results}
    length = "accepted length of a greedy chain"
    assert found == {
        ("held-out rows (code)", length): 2.5,
        ("held-out rows (chat)", length): 3.25,
        ("held-out rows (chat)", "accuracy at depth 1"): 0.75,
    }
    assert written.data.pipeline_tag == "text-generation" and written.data.model_name.startswith("EAGLE-3")
    assert written.data.widget[0]["text"] in written.text  # what the example of the card continues
    (run / "results.json").unlink()
    assert ModelCard(card(model.config, model.base, model.head)).data.eval_results is None


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, "auto"])
def test_figures_are_not_those_of_the_head_before_it_changed(run, tmp_path, dtype):
    model = SpecModel.from_pretrained(run, dtype=dtype)

    def written(name):
        return (model.export(tmp_path / name, "vllm") / "README.md").read_text("utf8"), card(
            model.config, model.base, model.head
        )

    exported, carded = written("before")
    assert "| 3.28 |" in exported and "**3.28**" in carded and "(curves.png)" in carded
    with torch.no_grad():
        next(model.head.parameters()).mul_(1.01)
    exported, carded = written("after")
    assert "was not recorded" in exported and "3.28" not in exported
    assert "3.28" not in carded and "curves.png" not in carded and "learning_rate" not in carded


def test_a_relative_path_is_not_taken_for_a_name_of_the_hub(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for path in ("checkpoints/base", "data/chats.jsonl"):
        (tmp_path / path).mkdir(parents=True)
    recipe = {**RECIPE, "base": "checkpoints/base", "data": {"train": ["data/chats.jsonl", "org/rows"]}}
    (run / "recipe.yaml").write_text(Recipe.from_dict(recipe).to_yaml())
    model = SpecModel.from_pretrained(run)
    model.config.base_model_name_or_path = "checkpoints/base"
    text = card(model.config, model.base, model.head, repo_id="someone/head")
    assert "checkpoints" not in text and "data/" not in text and "base_model:" not in text and "org/rows" in text
    assert "draft head for base\n" in text and "- chats.jsonl" in text
    assert 'from_pretrained("someone/head", base="path/to/the/base")' in text


def test_what_is_not_there_is_left_out(named):
    model = trained(named, "medusa", tap=3)
    text = card(model.config, model.base, model.head, repo_id="a/b")
    assert "## Measured" not in text and "## Trained" not in text and "license" not in text
    assert str(named.name_or_path) not in text and "no other program reads" in text


@pytest.mark.parametrize(
    "found",
    [
        {"eval_accepted_length": None, "parity_measured": "3.2", "eval_accuracy_depth_1": []},
        {"decoded": {"humaneval": 0.3}},
        {"decoded": [3.2, {"accepted_length": 3.2}]},
        {"decoded": [{"accepted_length": 3, "prompts": 4, "new_tokens": 8, "tree": "chain:3", "temperature": "low"}]},
    ],
)
def test_figures_that_are_no_numbers_are_left_out_of_card_and_export(found, run, tmp_path):
    """results.json is a name that other programs use too, and a head may come from a stranger."""
    (run / "curves.png").unlink()
    (run / "results.json").write_text(json.dumps(found))
    (run / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": 1, "eval_accepted_length": "?"}]}))
    model = SpecModel.from_pretrained(run)
    assert "## Measured" not in card(model.config, model.base, model.head)
    readme = (model.export(tmp_path / "out", "vllm") / "README.md").read_text("utf8")
    assert "Its accepted length was not recorded" in readme


def test_a_recipe_as_yaml_is_the_same_recipe():
    recipe = Recipe.from_dict(RECIPE)
    again = Recipe.from_dict(yaml.safe_load(recipe.to_yaml()))
    assert again == recipe and "packing" not in recipe.to_yaml()


def test_pushing_writes_the_card_and_keeps_one_that_is_there(run, monkeypatch):
    calls = []

    class Api:
        def __init__(self, token):
            self.there = token == "with a card"

        def create_repo(self, repo_id, **kwargs):
            return type("Repo", (), {"repo_id": repo_id})

        def file_exists(self, repo_id, name, revision=None):
            assert revision in (None, *calls)  # a branch is made before it is asked about
            return (self.there or revision == "carded") and name == "README.md"

        def create_branch(self, repo_id, branch, exist_ok):
            calls.append(branch)

        def upload_folder(self, folder_path, ignore_patterns, **kwargs):
            calls.append(({path.name: path.read_bytes() for path in folder_path.iterdir()}, ignore_patterns))
            return "https://example.org/commit"

    monkeypatch.setattr("specheads.hub.HfApi", Api)
    model = SpecModel.from_pretrained(run)
    assert model.push_to_hub("someone/head", revision="v2") == "https://example.org/commit"
    model.push_to_hub("someone/head", token="with a card")
    model.push_to_hub("someone/head", revision="carded")
    branch, (files, ignored), (_, kept), _, (_, kept_there) = calls
    assert kept_there == ["README.md"]
    assert json.loads(files["config.json"])["base_model_name_or_path"] is None and model.config.base_model_name_or_path
    assert b"/base" not in files["model.safetensors"] + files["config.json"]
    assert branch == "v2" and ignored is None and kept == ["README.md"]
    assert (
        files.keys() == {"README.md", "config.json", "model.safetensors", "curves.png"}
        and b"**3.28**" in files["README.md"]
    )


def pushed(model, monkeypatch):
    """The text of every file that push_to_hub() uploads."""
    files = {}

    class Api:
        def __init__(self, token):
            pass

        def create_repo(self, repo_id, **kwargs):
            return type("Repo", (), {"repo_id": repo_id})

        def file_exists(self, repo_id, name, revision=None):
            return False

        def upload_folder(self, folder_path, **kwargs):
            files.update({path.name: path.read_bytes().decode("utf8", "replace") for path in folder_path.iterdir()})

    monkeypatch.setattr("specheads.hub.HfApi", Api)
    model.push_to_hub("someone/head")
    return files


def test_nothing_of_the_machine_is_pushed_from_another_directory_or_without_the_base(named, monkeypatch, tmp_path):
    home = tmp_path / "home"
    shutil.copytree(named.name_or_path, home / "models" / "small")
    monkeypatch.chdir(home)
    model = convert(AutoModelForCausalLM.from_pretrained("models/small"), "medusa")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    model.save_pretrained(tmp_path / "head")
    assert (
        json.loads((tmp_path / "head" / "config.json").read_text())["base_model_name_or_path"] == "../home/models/small"
    )
    loaded = SpecModel.from_pretrained(tmp_path / "head")
    shutil.rmtree(home)
    for each in (model, loaded):
        files = pushed(each, monkeypatch)
        assert json.loads(files["config.json"])["base_model_name_or_path"] is None
        assert "home" not in files["config.json"] + files["README.md"] + files["model.safetensors"]
        assert "models/small" not in "".join(files.values()) and 'base="path/to/the/base"' in files["README.md"]


def test_a_recipe_without_training_options_gives_a_card(run):
    (run / "recipe.yaml").write_text("base: org/base\nhead: eagle3\ntraining:\n")
    model = SpecModel.from_pretrained(run)
    assert "head: eagle3" in card(model.config, model.base, model.head)
