"""What a sweep is asked for: every setting once, and what makes no sense refused in one line."""

import dataclasses

import pytest
import torch

from specheads.bench.sweep.drafters import Bench
from specheads.bench.sweep.grid import Setting, Sweep, expand_rules, parse_numbers, read_sweep
from specheads.bench.sweep.run import common_of
from specheads.bench.sweep.tasks import Question, Task
from tests.support.paths import ROOT


def made(**options):
    return Sweep.from_dict({"drafters": "head", **options}).settings()


def test_the_grid_is_every_combination_once_with_the_exact_rule_and_no_drafts_beside_them():
    settings = made(
        drafters=["head", "model:m"], accept=["fuzzy:js,tv:0.1,0.2", "exact", "fuzzy:js:0.1"], gamma=[3, 5],
        temperature=[0, 0.7],
    )  # fmt: skip
    rules = {"exact", "fuzzy:js:0.1", "fuzzy:js:0.2", "fuzzy:tv:0.1", "fuzzy:tv:0.2"}
    wanted = {
        Setting(drafter, rule, tree, t)
        for drafter in ("head", "model:m") for rule in rules for tree in ("chain:3", "chain:5") for t in (0.0, 0.7)
    } | {Setting("none"), Setting("none", temperature=0.7)}  # fmt: skip
    assert set(settings) == wanted and len(settings) == len(wanted) == 42
    # What a ratio is taken to is measured itself, before it.
    for i, setting in enumerate(settings):
        assert setting.reference == setting or setting.reference in settings[:i]


def test_a_lossy_rule_is_compared_with_the_exact_one_and_that_with_no_drafts():
    lossy = Setting("head", "typical", "chain:3", 1.0, 50)
    assert lossy.reference == dataclasses.replace(lossy, accept="exact")
    assert lossy.reference.reference == Setting("none", temperature=1.0, top_k=50)
    assert Setting("head", "fuzzy:js:0:rescue").reference == Setting("none")  # at threshold 0 it is lossless
    assert Setting("none").reference == Setting("none")


def test_top_k_of_1_is_greedy_and_top_k_alone_samples_at_temperature_1():
    def ways(**options):
        return Sweep.from_dict({"drafters": "head", **options}).samplings()

    assert ways() == ways(temperature=0) == ways(top_k=1) == ways(top_k=[1], temperature=[0, 1]) == [(0.0, 0)]
    assert ways(top_k=[1, 50]) == [(0.0, 0), (1.0, 50)]
    assert ways(top_k=50, temperature=[0, 0.5]) == [(0.0, 0), (0.5, 50)]
    assert ways(temperature=[0, 1]) == [(0.0, 0), (1.0, 0)]


def test_thresholds_replace_those_of_lossy_rules_alone():
    rules = Sweep(("head",), accept=("fuzzy:js:0.4", "typical", "block"), thresholds=(0.1, 0.2)).rules()
    assert rules == ["fuzzy:js:0.1", "fuzzy:js:0.2", "typical:0.1", "typical:0.2", "block"]
    assert list(expand_rules("fuzzy:js,kl:k=5,6")) == ["fuzzy:js:k=5", "fuzzy:js:k=6", "fuzzy:kl:k=5", "fuzzy:kl:k=6"]


def test_an_option_that_would_change_nothing_is_refused_with_what_it_goes_with():
    cascade = {"drafters": "cascade:model:m+maxgram", "k_matrices": [[2, 2]]}
    options_of_cascades = {"leniency": 2.0, "notation": "paper", "cost": "model_parameters"}
    unused = {
        "thresholds": ((0.1, 0.2), "thresholds='0.1,0.2' goes with a rule that has a threshold", {"accept": "typical"}),
        "chat": (True, "chat=True goes with a task whose prompts are text", {"task": "syntax"}),
        "run_code": (True, "run_code=True goes with the task humaneval", {"task": "humaneval"}),
        **{name: (value, "goes with a drafter cascade", cascade) for name, value in options_of_cascades.items()},
    }  # fmt: skip
    for name, (value, said, used) in unused.items():
        with pytest.raises(ValueError, match=said) as refused:
            made(**{name: value})
        assert "\n" not in str(refused.value)
        made(**{name: value}, **used)
        made(**{name: next(f.default for f in dataclasses.fields(Sweep) if f.name == name)})


def test_a_k_matrix_may_be_rows_text_or_several_and_belongs_to_cascades():
    one = "[[5, 8], [0, 8]]"
    for given in ([[5, 8], [0, 8]], one, [[[5, 8], [0, 8]]], [one]):
        settings = made(drafters="cascade:model:m+maxgram", k_matrices=given)
        assert [s.k_matrix for s in settings] == ["", one]
    assert len(made(drafters=["cascade:model:m+maxgram", "lookup"], k_matrices=[one, "[[2, 2], [0, 2]]"])) == 4
    with pytest.raises(ValueError, match="takes k_matrices"):
        made(drafters="cascade:model:m+maxgram")
    with pytest.raises(ValueError, match="are for drafters cascade"):
        made(k_matrices=one)
    with pytest.raises(ValueError, match="is no JSON"):
        made(drafters="cascade:model:m+maxgram", k_matrices="[[5,8]")


def test_a_yaml_file_gives_the_same_sweep_as_options_which_go_over_it(tmp_path):
    file = tmp_path / "s.yaml"
    file.write_text("drafters: head\naccept: fuzzy:js\nthresholds: [0.1, 2e-1]\ngamma: 5\nnum_prompts: 9\n", "utf8")
    wanted = Sweep(("head",), accept=("fuzzy:js",), thresholds=(0.1, 0.2), gamma=(5,), num_prompts=9)
    assert read_sweep(file, {"task": None, "trees": []}) == wanted
    assert read_sweep(file, {"gamma": [3, 7]}).gamma == (3, 7)


def test_every_shipped_sweep_is_valid_and_short():
    recipes = sorted((ROOT / "recipes").glob("sweep_*.yaml"))
    assert len(recipes) == 6
    for recipe in recipes:
        assert len(recipe.read_text("utf8").splitlines()) <= 30 and len(read_sweep(recipe, {}).settings()) > 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"drafer": "x"}, "did you mean 'drafters'"), ({"drafters": []}, "drafters is empty"),
        ({"accept": "fuzzy:jss:0.1"}, "did you mean 'js'"), ({"accept": "fuzzy:js"}, "threshold is missing"),
        ({"gamma": 0}, "gamma=0 "), ({"gamma": 2.5}, "gamma=2.5 "),
        ({"temperature": -1}, "temperature=-1.0 must be at least 0"), ({"thresholds": "x"}, "is not a number"),
        ({"gamma": 3, "trees": "chain:3"}, "trees and gamma"), ({"repeats": 0}, "repeats=0"),
        ({"drafters": "lookup", "accept": "fuzzy:js:0.1"}, "'lookup' gives none"), ({"clock": "sun"}, "unknown clock"),
        ({"drafters": "auto", "accept": "fuzzy:js:0.1"}, "'auto' gives none"),
        ({"thresholds": [3.0], "accept": "lenient"}, "at most 1"), ({"cost": "dear"}, "unknown cost"),
        ({"trees": "bush:3"}, "bush:3"), ({"task": "mmul"}, "did you mean 'mmlu'"),
    ],
)  # fmt: skip
def test_a_sweep_that_cannot_be_run_is_refused_in_one_line(options, said):
    with pytest.raises(ValueError, match=said.replace("(", r"\(")) as refused:
        made(**options)
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="gamma='x' is not a whole number"):
        parse_numbers("3,x", "gamma", int)


def test_automatic_drafts_come_from_the_first_head_wherever_it_is_named(shipped):
    head, other = str(shipped / "eagle3"), str(shipped / "medusa")
    for drafters in ([head, "auto"], ["auto", head], ["lookup", "auto", head, other]):
        bench = Bench(Sweep.from_dict({"drafters": drafters}))
        assert bench.drafter("auto").head is bench.drafter(head)
    bench = Bench(Sweep.from_dict({"drafters": "auto", "base": str(shipped / "base")}))
    assert bench.drafter("auto").head is None


def test_rows_of_two_processes_are_not_those_of_one_even_with_a_thread_each(shipped, monkeypatch):
    sweep = Sweep.from_dict({"drafters": "lookup", "base": str(shipped / "base"), "task": "prompts"})
    bench, task = Bench(sweep), Task("prompts", [Question([5, 6], "")], 4, None)
    for threads in (1, 12):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert len({common_of(bench, sweep, task, workers) for workers in (1, 2, 3)}) == 3
