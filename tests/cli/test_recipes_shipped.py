"""Recipes by name: listed, printed, copied, and found by every command that takes one; names and options completed."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import specheads_cli as cli
from specheads.decoding.acceptance.named import RULES
from specheads.decoding.drafters.named import DRAFTERS
from specheads.decoding.planner.named import PLANS
from specheads.models.formats import ENGINES
from specheads_cli import complete, shipped
from specheads_cli.shipped import find_recipe, recipe_names
from tests.support.command_line import run
from tests.support.paths import ROOT
from train import features, heads

FILES = {path.relative_to(ROOT / "recipes").with_suffix("").as_posix() for path in (ROOT / "recipes").rglob("*.yaml")}


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A working directory without recipes."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_recipe_is_listed_with_what_it_is_for(elsewhere, capsys):
    code, out, _ = run(capsys, "recipes")
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in out.splitlines() if line.startswith("  ")}
    assert code == 0 and set(lines) == FILES
    assert lines["eagle3"] == "EAGLE-3 (arXiv:2503.01840) for a chat model of about 8B parameters"
    assert lines["medusa2"].endswith("on texts the base wrote itself (train/self_distill.py)"), "it takes two lines"
    listed = json.loads(run(capsys, "recipes", "--json")[1])["recipes"]
    assert {entry["name"] for entry in listed} == FILES and all(len(entry["summary"]) > 20 for entry in listed)
    assert {entry["for"] for entry in listed if entry["name"].startswith("accelerate/")} == {"launch"}


def test_a_recipe_is_printed_copied_and_pointed_at_but_never_copied_over_a_file(elsewhere, capsys):
    text = (ROOT / "recipes" / "eagle3.yaml").read_text("utf8")
    assert run(capsys, "recipes", "eagle3")[:2] == (0, text)
    assert run(capsys, "recipes", "eagle3", "--output", "my.yaml")[0] == 0
    assert Path("my.yaml").read_text("utf8") == text
    Path("my.yaml").write_text("mine")
    code, _, err = run(capsys, "recipes", "medusa", "--output", "my.yaml")
    assert code == 2 and "my.yaml exists" in err and Path("my.yaml").read_text() == "mine"
    assert Path(run(capsys, "recipes", "accelerate/ddp", "--path")[1].strip()).samefile(
        ROOT / "recipes/accelerate/ddp.yaml"
    )
    assert "give the NAME" in run(capsys, "recipes", "--output", "other.yaml")[2]


def test_one_recipe_as_json_has_its_text_and_two_ways_at_once_are_refused(elsewhere, capsys):
    found = json.loads(run(capsys, "recipes", "eagle3", "--json")[1])
    assert found["text"] == Path(found["path"]).read_text("utf8") and (found["name"], found["for"]) == (
        "eagle3",
        "train",
    )
    ways = {"--output": ["--output", "my.yaml"], "--path": ["--path"], "--json": ["--json"]}
    for one, other in itertools.combinations(ways, 2):
        code, out, err = run(capsys, "recipes", "eagle3", *ways[other], *ways[one])
        assert code == 2 and not out and f"{one} and {other}: give one of them" in err
    assert not Path("my.yaml").exists()


def test_a_path_comes_before_a_name_and_a_folder_of_the_name_does_not_hide_it(elsewhere):
    (elsewhere / "eagle3").mkdir()
    assert find_recipe("eagle3", "train").samefile(ROOT / "recipes" / "eagle3.yaml")
    (elsewhere / "medusa").write_text("own")
    assert find_recipe("medusa", "train").read_text() == "own"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["train", "eagel3"], "did you mean 'eagle3'?"),
        (["train", "recipes/eagle3.yaml"], "did you mean 'eagle3'?"),
        (["train", "sweep_rules"], "'sweep_rules' is for specheads sweep"),
        (["train", "accelerate/ddp"], "'accelerate/ddp' is for accelerate launch"),
        (["features", "medussa"], "did you mean 'medusa'?"),
        (["sweep", "sweep_rule"], "did you mean 'sweep_rules'?"),
        (["sweep", "eagle3"], "'eagle3' is for specheads train"),
        (["recipes", "medussa"], "did you mean 'medusa'?"),
        (["train", "zzzz"], "shipped: eagle, eagle3, hydra"),
    ],
)
def test_a_mistyped_name_is_refused_with_the_nearest(args, said, elsewhere, capsys):
    code, out, err = run(capsys, *args)
    assert code == 2 and not out and said in err and len(err.splitlines()) == 1


def test_every_command_finds_a_recipe_by_its_name(elsewhere, capsys):
    """Each gets as far as the option that its recipe does not know."""
    for args in (["train", "eagle3"], ["features", "eagle3"]):
        code, _, err = run(capsys, *args, "head.stesp=1")
        assert code == 2 and "steps" in err, args
    for main in (heads.main, features.main):
        assert main(["eagle3", "head.stesp=1", *(["--output", "o"] if main is features.main else [])]) == 2
        assert "steps" in capsys.readouterr().err
    code, _, err = run(capsys, "sweep", "sweep_gamma", "--task", "prommpts", "--no-plots")
    assert code == 2 and "did you mean 'prompts'" in err


def completed(words, tmp_path):
    """What bash would offer for the last of these words, by the program itself, which may not import torch."""
    script = (
        "import sys, specheads_cli\ntry:\n    specheads_cli.run([])\n"
        "except SystemExit: pass\nsys.exit(not {'torch', 'specheads'}.isdisjoint(sys.modules))"
    )
    environment = {
        **os.environ, "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1),
        "_SPECHEADS_COMPLETE": "complete_bash",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_the_shell_completes_commands_options_recipes_rules_and_trees_without_torch(tmp_path):
    (tmp_path / "exp.yaml").write_text("")
    assert {"train", "recipes", "doctor"} <= set(completed(["specheads", ""], tmp_path))
    assert completed(["specheads", "train", "--dry"], tmp_path) == ["--dry-run"]
    assert completed(["specheads", "train", "e"], tmp_path)[:2] == ["eagle", "eagle3"]
    assert "exp.yaml" in completed(["specheads", "train", "e"], tmp_path)
    assert completed(["specheads", "sweep", "sweep_s"], tmp_path) == ["sweep_syntax"]
    assert completed(["specheads", "generate", "runs/"], tmp_path) == [], "the shell completes paths itself"
    assert completed(["specheads", "generate", "x", "--accept", "t"], tmp_path) == ["traversal", "typical", "topn"]


def test_what_is_completed_is_what_there_is():
    assert [RULES.usage(name) for name in RULES] == list(complete.RULES)
    assert [name for name, rule in RULES.items() if rule.lossless is True] == list(complete.LOSSLESS)
    assert [PLANS.usage(name) for name in PLANS] == list(complete.TREES)
    assert [DRAFTERS.usage(name) for name in DRAFTERS] == list(complete.DRAFTERS)
    assert set(complete.ENGINES) == set(ENGINES)
    assert set(recipe_names()) == FILES and set(shipped.USES) == {shipped.kind_of(name) for name in FILES}


def test_the_shell_script_is_shown(capsys, monkeypatch):
    monkeypatch.setattr("typer.completion._get_shell_name", lambda: "bash")
    with pytest.raises(SystemExit) as stopped:
        cli.run(["--show-completion"])
    assert not stopped.value.code and "complete -o default -F" in capsys.readouterr().out
