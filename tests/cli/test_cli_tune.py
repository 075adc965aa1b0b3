"""specheads tune, and the commands that go by what it measured."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

import specheads
from specheads.bench.tune import TuneConfig, merge, tune
from specheads.bench.tune.tree_search import acceptance_of, recorded_ranks, search_head
from specheads.cli.commands import tune as command
from specheads.cli.commands.tune import show
from specheads.data.batches import Collator
from specheads.decoding.compiled import compiled_steps
from specheads.decoding.generation.recorded import Record, record
from specheads.decoding.planner.by_cost import CostTable, StepCosts, shipped_costs
from specheads.models.calibration import expected_length
from specheads.models.costs import auto_drafter, cost_key, cost_path
from tests.reference.slow_heads import shallow_spec_model
from tests.support.command_line import CONTROL, run
from tests.support.tiny_models import gpt2, tiny_llama

QUICK = ("--rounds", 1, "--nodes", 1, "--nodes", 4, "--length", 16)


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_tune_writes_one_file_that_generate_and_info_find(shipped, home, capsys):
    code, out, err = run(capsys, "tune", shipped / "eagle3", *QUICK, "--json")
    (result,) = json.loads(out)["results"]
    assert code == 0 and not CONTROL.search(err) and "measuring eagle3 head" in err
    path = Path(result["file"])
    assert path.parent == home / "specheads" / "costs" and [*path.parent.iterdir()] == [path]
    for curve in (result["verify"]["16"], result["loop"], result["read"], result["level"]):
        times = [ms for _, ms in curve]
        assert times == sorted(times) and times[0] >= 0
    assert [count for count, _ in result["verify"]["16"]] == [1, 4] and result["verify"]["16"][0][1] > 0
    model = specheads.SpecModel.from_pretrained(shipped / "eagle3", dtype=torch.float32)
    assert auto_drafter(model.base, model.head).costs.key == cost_key(model.base, model.head)
    assert auto_drafter(model.base).costs is None and auto_drafter(model.base.bfloat16(), model.head).costs is None
    code, out, _ = run(capsys, "info", shipped / "eagle3")
    assert code == 0 and str(path) in out and "float32; batch 1" in out
    assert "shipped ones; `specheads tune`" in run(capsys, "info", shipped / "medusa")[1]
    run(capsys, "tune", shipped / "eagle3", *QUICK, "--batch", 3)
    assert sorted(CostTable.load(path).batches) == [1, 3]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["medusa", "eagle3", None])
def test_compiled_steps_have_a_table_of_their_own(kind, capsys):
    model = shallow_spec_model(kind or "eagle3")
    head = model.head if kind else None
    config = TuneConfig(nodes=(1, 6), lengths=(16,), rounds=1, steps=1, compile="eager")
    found = tune(model.base, head, config)
    assert found.key == cost_key(model.base, head, compiled=True) != cost_key(model.base, head)
    found.save(cost_path(found.key))
    drafter, costs = auto_drafter(model.base, head), found.for_rows(1)
    assert drafter.compiled_costs == CostTable.load(cost_path(found.key)) and drafter.costs is None
    assert 0 < costs.step(1, 1, 16) <= costs.step(1, 6, 16)
    assert (costs.read is None) == (kind is None) and costs.draft(1, (1, 1), 8) <= costs.draft(1, (1, 1), 32)
    show([{"drafter": "a head", "file": "f", "batch": 1, "search": [], **costs.to_dict()}])
    assert "verify after 16" in capsys.readouterr().out
    steps = compiled_steps(model.base, "eager")
    assert steps.failure is None and not steps.failures
    functions = [function.__name__ for function, _ in steps._known]
    sizes = {key[-3] for function, key in steps._known if function.__name__ == "step_after_draft"}
    assert sizes == {6}, "a dummy is not filled up to the largest tree"
    assert functions.count("whole_step") >= 4 if kind else functions.count("whole_step") == 1


def test_generate_goes_by_the_file_it_is_given_and_refuses_one_of_another_model(shipped, tmp_path, capsys):
    costs = tmp_path / "costs.json"
    code, out, _ = run(capsys, "tune", shipped / "eagle3", *QUICK, "--output", costs)
    assert code == 0 and f"saved as {costs}" in out.replace("\n", "") and "verify after 16" in out
    ask = ("--prompt", "def f(x):", "--max-new-tokens", 12, "--json")
    record = json.loads(run(capsys, "generate", shipped / "eagle3", *ask, "--draft", f"auto:{costs}")[1])
    default = json.loads(run(capsys, "generate", shipped / "eagle3", *ask)[1])
    head = json.loads(run(capsys, "generate", shipped / "eagle3", *ask, "--tree", "chain:2")[1])
    assert record["drafter"].startswith("auto:") and default["drafter"] == "auto" and head["drafter"] == "eagle3 head"
    assert record["token_ids"] == default["token_ids"] == head["token_ids"]
    code, _, err = run(capsys, "generate", shipped / "medusa", *ask, "--draft", f"auto:{costs}")
    assert code == 2 and "costs.json holds costs for head" in err and err.count("\n") == 1
    code, _, err = run(capsys, "generate", shipped / "medusa", *ask, "--draft", "auto:absent.json")
    assert code == 2 and "absent.json" in err


def test_tune_searches_a_record_that_it_writes_first(shipped, tmp_path, capsys):
    texts = tmp_path / "texts.json"
    rows = [{"prompt": [7, 8, 9, 7, 8], "output": [9, 7, 8, 9] * 5}, {"prompt": [3], "output": [4, 5, 6] * 6}]
    texts.write_text(json.dumps({"vocab_size": 258, "length": 20, "outputs": rows}), "utf8")
    ask = ("tune", shipped / "eagle3", *QUICK, "--search", texts)
    code, out, _ = run(capsys, *ask, "--json")
    (result,) = json.loads(out)["results"]
    assert code == 0 and {row["drafter"] for row in result["search"]} == {"none", "lookup", "eagle3 head"}
    assert all(row["tokens_per_second"] > 0 and row["accepted_length"] >= 1 for row in result["search"])
    assert result["acceptance"] and all(sum(shares) <= 1 for shares in result["acceptance"])
    code, out, _ = run(capsys, *ask)  # which measures anew, so that other trees may be the best of their size
    lines = [line.split() for line in out.partition("Expected from the record")[2].splitlines()]
    speeds = [float(words[-1]) for words in lines if words and words[0] in ("none", "lookup", "eagle3")]
    assert code == 0 and len(speeds) >= 3 and speeds == sorted(speeds, reverse=True)


def test_a_missing_record_is_written_first_and_one_of_another_base_refused(shipped, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "PROMPTS", 2)
    monkeypatch.setattr(command, "LENGTH", 6)
    texts = tmp_path / "new" / "folder" / "texts.json"
    code, out, err = run(capsys, "tune", shipped / "eagle3", *QUICK, "--search", texts, "--json")
    assert code == 0, err
    assert json.loads(out)["results"][0]["search"] and [*texts.parent.iterdir()] == [texts]
    assert len(Record.load(texts).outputs) == 2
    held = json.loads(texts.read_text("utf8"))
    for other in ({"vocab_size": 300, "base": None}, {"base": {**held["base"], "weights": "0123456789abcdef"}}):
        texts.write_text(json.dumps(held | other), "utf8")
        code, out, err = run(capsys, "tune", shipped / "eagle3", *QUICK, "--search", texts)
        assert code == 2 and not out and "it is of another target than" in err and "delete or rename the file" in err


def test_the_search_finds_the_fastest_tree_of_recorded_ranks():
    # The first draft is right in 3 of 4 texts, the second then in 2 of 3; the fourth text has it at rank 1.
    ranks = torch.tensor([[0, 0, -1], [0, 0, 2], [0, 3, 0], [1, 0, 0]])
    assert acceptance_of(ranks)[0][:2] == (0.75, 0.25) and acceptance_of(ranks)[1][0] == pytest.approx(2 / 3)
    texts, costs = ranks.split(1), shipped_costs("cpu").for_rows(1)
    found = {(one.tree, one.nodes): one for one in search_head("a head", texts, costs, 64)}
    assert found["chain:2", 3].accepted_length == 1 + 3 / 4 + 2 / 4 == expected_length("chain:2", ranks)
    assert found["chain:2", 3].ms == pytest.approx(costs.step(1, 3, 64) + costs.draft(1, (1,), 3))
    assert len({(one.nodes, one.tree) for one in found.values()}) == len(found)


def test_the_search_expects_what_decoding_the_recorded_texts_accepts():
    """The head knows the first half of each text and not the second, in which most of its steps begin."""
    model = specheads.convert(tiny_llama(num_hidden_layers=2), "medusa", num_heads=3)
    known = record(model.base, [[5, 6, 7], [9, 3, 4, 8], [60, 11, 7]], 40, eos_token_id=None)
    rows = [[*prompt, *text[:20]] for prompt, text in known.outputs.items()]
    batch = Collator(0)([{"input_ids": row, "labels": row} for row in rows])
    optimizer = torch.optim.Adam(model.head.parameters(), 1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    texts = recorded_ranks(model.eval(), known)
    tokens = steps = 0
    for prompt in known.outputs:
        asked = {"max_new_tokens": 44, "eos_token_id": None, "return_dict_in_generate": True}
        out = model.generate(torch.tensor([prompt]), draft="head", tree="chain:3", **asked)
        position = 1  # the prefill gives the first of the record's 40 tokens
        for step in out.steps[1:]:
            if position < 40:
                position, steps = min(40, position + len(step.tokens[0])), steps + 1
        tokens += position - 1
    found = {one.tree: one for one in search_head("a head", texts, shipped_costs("cpu").for_rows(1), 64)}
    assert found["chain:3"].accepted_length == pytest.approx(tokens / steps)
    assert expected_length("chain:3", torch.cat(texts)) > 1.1 * tokens / steps
    with pytest.raises(ValueError, match="no text of the record has more than the 3 tokens of a draft"):
        recorded_ranks(model, known.cut(3))


def test_the_search_expects_what_the_measured_batch_would_take():
    costs = shipped_costs("cpu").for_rows(8)
    costs = replace(costs, batch=8)  # whatever size was shipped
    (one, *_) = search_head("a head", [torch.tensor([[0, 0], [0, 2], [1, 0]])], costs, 64)
    assert one.ms == pytest.approx(costs.step(8, 2, 64) + costs.draft(8, (), 2))
    assert one.tokens_per_second == pytest.approx(8 * one.accepted_length / one.ms * 1e3)


def test_what_cannot_be_measured_is_refused(shipped, tmp_path, capsys):
    code, _, err = run(capsys, "tune", shipped / "eagle3", shipped / "medusa", "--output", tmp_path / "a.json")
    assert code == 2 and "--output is one file, and 2 models are tuned" in err
    with pytest.raises(ValueError, match=r"nodes=\[2\] must hold 1"):
        TuneConfig(nodes=(2,))
    assert cost_path(cost_key(specheads.convert(_tiny(), "medusa").base, None)).name.count("-") == 2


def test_a_folder_of_costs_that_cannot_be_written_is_refused_before_anything_is_measured(
    shipped, home, capsys, monkeypatch
):
    monkeypatch.setattr(command, "measure", lambda *given, **options: pytest.fail("measured"))
    home.write_text("no folder", "utf8")
    code, _, err = run(capsys, "tune", shipped / "eagle3", *QUICK)
    assert code == 2 and f"{home} is a file, not a folder" in err and err.count("\n") == 1
    home.unlink()
    monkeypatch.setattr(os, "access", lambda *given: False)  # root may write anywhere
    code, _, err = run(capsys, "tune", shipped / "eagle3", *QUICK)
    assert code == 2 and f"{home.parent} cannot be written to" in err and err.count("\n") == 1


def test_a_measurement_takes_its_steps_alone_and_a_head_reads_as_many_positions_as_it_says():
    model = shallow_spec_model("eagle3")
    passes, read = [], []
    model.base.register_forward_pre_hook(lambda *given: passes.append(1))
    model.head.register_forward_pre_hook(lambda module, given: read.append(given[1].shape[1]))
    costs = tune(model.base, model.head, TuneConfig(nodes=(1, 4), lengths=(11,), rounds=1, steps=2)).for_rows(1)
    measurements = 2 + len(costs.read.points) + len(costs.level.points)
    assert len(passes) == measurements * (1 + 1 + 2), "the prompt, a step that warms up, and two that are timed"
    assert [read.count(count) for count in (11, 16, 64)] == [measurements - 2, 2, 2], "11 is the prompt"


def test_nodes_and_lengths_named_twice_are_measured_once():
    costs = tune(_tiny(), None, TuneConfig(nodes=(2, 1, 2), lengths=(16, 16), rounds=1, steps=1)).for_rows(1)
    assert [nodes for nodes, _ in costs.loop.points] == [nodes for nodes, _ in costs.verify[16].points] == [1, 2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"nodes": (1, 2)}, r"nodes=\[1, 2\] and steps=5 take 386 tokens .* 256 positions; give fewer steps$"),
        ({"nodes": (1, 99)}, r"take 596 tokens .* 256 positions; give fewer steps or fewer nodes$"),
        ({"compile": "eager"}, r"take 258 tokens .* 256 positions; give fewer steps or fewer nodes$"),
    ],
)
def test_steps_that_do_not_fit_the_positions_of_the_base_are_refused_before_any_is_timed(options, said):
    base = gpt2(256)
    with pytest.raises(ValueError, match=said):
        tune(base, specheads.convert(base, "medusa").head, TuneConfig(**options), lambda *told: pytest.fail("measured"))


def test_a_length_leaves_room_for_the_steps_after_it():
    base = gpt2(160)
    head = specheads.convert(base, "medusa").head
    costs = tune(base, head, TuneConfig(nodes=(1, 2), lengths=(8, 150), rounds=1, steps=1)).for_rows(1)
    assert [*costs.verify] == [8, 160 - 2 * 64 - 2] and costs.read.points[-1][0] == 64


def test_a_head_of_one_depth_has_no_further_level_to_time():
    model = specheads.convert(_tiny(), "medusa", num_heads=1)
    costs = tune(model.base, model.head, TuneConfig(nodes=(1, 2), lengths=(16,), rounds=1, steps=1)).for_rows(1)
    assert costs.level(1) == costs.level(8) == 0 and costs.draft(1, (), 4) == costs.read(4) > 0


def test_steps_that_are_not_compiled_give_no_costs_of_compiled_ones():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    config = TuneConfig(nodes=(1, 6), lengths=(16,), rounds=1, steps=1, compile="eager")
    with pytest.raises(ValueError, match=r"LlamaForCausalLM decodes without .* \(its positions change with the length"):
        tune(tiny_llama(num_hidden_layers=1, rope_parameters=rope), None, config)

    def broken(graph, inputs):
        raise OSError("no compiler")

    base = tiny_llama(num_hidden_layers=1)
    compiled_steps(base, "eager").backend = broken
    with pytest.raises(ValueError, match=r"\(BackendCompilerFailed: .*no compiler\); tune without --compile$"):
        tune(base, None, config)
    with pytest.raises(ValueError, match="unknown backend of"):
        tune(base, None, TuneConfig(compile="inductr"))


def test_one_step_that_is_not_compiled_gives_no_costs_of_those_that_are():
    base, compiled = tiny_llama(num_hidden_layers=1), []

    def breaks_later(graph, inputs):
        if compiled:
            raise OSError("no more")
        compiled.append(graph)
        return graph.forward

    compiled_steps(base, "eager").backend = breaks_later
    with pytest.raises(ValueError, match=r"no more\); tune without --compile$"):
        tune(base, None, TuneConfig(nodes=(1, 6), lengths=(16,), rounds=1, steps=1, compile="eager"))
    assert len(compiled_steps(base, "eager")) == 1 and compiled_steps(base, "eager").failure is None


def test_costs_that_other_versions_measured_are_dropped_with_one_line_when_a_batch_is_added(tmp_path, caplog):
    path, known = tmp_path / "costs.json", shipped_costs("cpu").for_rows(1).to_dict()
    one, four, eight = (StepCosts.from_dict(batch, known) for batch in (1, 4, 8))
    new, both = CostTable(None, {8: eight}), CostTable(None, {1: one, 4: four}, ((0.5,),))
    both.save(path)
    assert [*merge(CostTable.load(path), new).batches] == [1, 4, 8] and not caplog.messages
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "versions": {**content["versions"], "torch": "1.0"}}))
    merged = merge(CostTable.load(path), new)
    assert [*merged.batches] == [8] and merged.acceptance == both.acceptance
    (line,) = caplog.messages
    assert line.startswith("dropped the costs of batch 1, 4, measured with torch 1.0, specheads ") and "\n" not in line
    merged.save(path)
    caplog.clear()
    assert CostTable.load(path, merged.key) == merged and not caplog.messages
    path.write_text(json.dumps({**content, "versions": None}))
    assert [*merge(CostTable.load(path), both).batches] == [1, 4] and not caplog.messages, "all are measured anew"


def _tiny():
    return tiny_llama(num_hidden_layers=2)
