"""What bench is asked for: one declaration for Python, recipes and the command, and nonsense refused in one line."""

from dataclasses import fields

import pytest

from specheads.bench.compare.options import BenchOptions
from specheads.bench.compare.run import decoders_of
from specheads.cli.app import app
from specheads.cli.options.measure import BenchCommand
from specheads.cli.program import typer
from tests.support.paths import ROOT


def test_the_command_has_each_option_by_its_name():
    command = typer.main.get_command(app).commands["bench"]
    names = [parameter.name for parameter in command.params]
    assert names == [*(field.name for field in fields(BenchOptions)), "as_json"]
    assert "as_json" not in BenchCommand().to_dict()
    assert all(field.metadata["help"] for field in fields(BenchOptions))


def test_values_may_be_texts_lists_or_alone_and_are_kept_once():
    assert BenchOptions(batch="1,4,1").batch == BenchOptions(batch=[1, 4]).batch == (1, 4)
    assert BenchOptions(temperature=0).temperature == (0.0,) and BenchOptions(tree="chain:3").tree == ("chain:3",)
    assert BenchOptions(max_new_tokens="32-256").limits == (32, 256) and BenchOptions(max_new_tokens=9).limits == (
        None,
        9,
    )
    assert BenchOptions(temperature=(0, 0.7), top_k=(1, 50)).samplings == [(0.0, 0), (0.7, 50)]
    assert BenchOptions(shard="2/3").part == (1, 3) and BenchOptions().to_dict()["out"] == "runs/bench"


def test_a_recipe_is_under_the_options_given(tmp_path):
    file = tmp_path / "b.yaml"
    file.write_text("decoder: head\naccept: fuzzy:js:0.1,2e-1\nbatch: [1, 2]\nnum_prompts: 9\n", "utf8")
    options = BenchOptions.read({"recipe": str(file), "batch": "4"})
    assert options == BenchOptions(decoder="head", accept="fuzzy:js:0.1,2e-1", batch=4, num_prompts=9, recipe=str(file))


def test_every_shipped_recipe_is_valid_and_short():
    recipes = sorted((ROOT / "recipes").glob("bench_*.yaml"))
    assert len(recipes) == 5
    for recipe in recipes:
        options = BenchOptions.read({"recipe": str(recipe)})
        assert len(recipe.read_text("utf8").splitlines()) <= 34 and len(decoders_of(options)) > 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"decodr": "x"}, "did you mean 'decoder'"), ({"batch": 0}, "batch=0 must be at least 1"),
        ({"batch": 2.5}, "batch=2.5 is not a whole number"), ({"temperature": "hot"}, "'hot' is not a number"),
        ({"temperature": -1}, "temperature=-1.0 must be at least 0"), ({"repeats": 0}, "repeats=0 must be"),
        ({"cost": "dear"}, "unknown cost"), ({"turns": "words"}, "expected texts or steps"),
        ({"shard": "3/2"}, "such as 1/2"), ({"max_new_tokens": "8-2"}, "the smaller first"),
        ({"chat": True}, "chat is for the prompts of a file"), ({"run_code": True}, "run_code is for the task"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_refused_in_one_line(options, said):
    with pytest.raises(ValueError, match=said.replace("(", r"\(")) as refused:
        BenchOptions.read(options)
    assert "\n" not in str(refused.value)
