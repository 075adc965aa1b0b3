"""The order of the rounds of `specheads bench`, resuming, queues, and what is left out."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants

from specheads.bench.batches import draw_numbers
from specheads.bench.compare import report, run
from specheads.bench.compare.decoder_texts import parse_decoder
from specheads.bench.compare.options import BenchOptions
from specheads.bench.compare.peer import PeerError
from specheads.bench.compare.prompt_sets import PromptSet, default_sets
from specheads.bench.figures.results import RESULTS, Results
from specheads.bench.runner import Output
from specheads.models.costs import cost_key, cost_path
from tests.support.auto_costs import FREE
from tests.support.races import GREEDY, quiet, race


class Scripted:
    """A decoder that gives the prompt's first token `count` times, and logs that it ran."""

    drafters, refill, compiles, compiles_as_needed, lossy = (), False, True, False, False

    def __init__(self, name, log, count=3, dies_at=None, fails=None, compiles=True):
        self.compiles, self.limits = compiles, []
        self.name, self.log, self.count, self.dies_at, self.fails = name, log, count, dies_at, fails

    def refusal(self, cell):
        return "takes one row at a time" if self.name == "single" and cell.batch > 1 else None

    def build(self, setup, cell):
        def decode(batch, watch):
            if self.fails == int(batch["input_ids"][0, 0]):
                raise PeerError("cannot take it")
            if len(self.log) == self.dies_at:
                raise KeyboardInterrupt
            self.log.append(self.name)
            self.limits.append(batch.get("limits"))
            return Output([[int(row[-1])] * self.count for row in batch["input_ids"]], seconds=1.0 + len(self.name))

        return decode


def measured(setup, folder, specs, *, prompts=((5, 6), (7, 8)), tell=quiet, **options):
    sets = [PromptSet("p", [list(ids) for ids in prompts], [None] * len(prompts))]
    given = {"reference": next(iter(specs)), "repeats": 2, **options}
    return race(setup, folder, tuple(specs), sets, specs, tell, **given)


def test_decoders_take_turns_at_every_prompt_after_a_warm_up(monkeypatch, setup, tmp_path):
    log = []
    monkeypatch.setattr("gc.freeze", lambda: log.append("|"))
    specs = {name: Scripted(name, log) for name in "abc"}
    outcome = measured(setup, tmp_path, specs)
    orders = ["".join(one["order"]) for one in outcome.rounds]
    # The warm-up takes the shortest and the longest batch, and what it leaves is not looked through for garbage later.
    assert "".join(log) == "aabbcc|" + "".join(orders)
    assert [(one["repeat"], one["index"]) for one in outcome.rounds] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {"".join(sorted(order)) for order in orders} == {"abc"} and len(set(orders)) > 1
    assert outcome.complete and outcome.left_out == {}


def test_what_does_not_compile_is_warmed_up_by_a_few_tokens_of_one_prompt(setup, tmp_path):
    spec = Scripted("a", [], compiles=False)
    measured(setup, tmp_path, {"a": spec}, repeats=1, max_new_tokens="50-60")
    assert spec.limits[0] == [4] and len(spec.limits) == 3  # the set-up's own limit is 4
    assert all(50 <= limit <= 60 for (limit,) in spec.limits[1:])


def test_rounds_of_steps_in_turn_are_those_of_texts(setup, tmp_path):
    sets = [PromptSet("p", [[5, 6], [7, 8, 9]], [None, None])]
    found = {}
    for turns in ("texts", "steps"):
        options = {"reference": "plain", "batch": (1, 2), "temperature": (0, 1), "turns": turns, "seed": 3}
        found[turns] = race(setup, tmp_path, ("plain", "eagle3"), sets, **options).rounds
    assert len(Results(tmp_path / RESULTS).rows) == 2 * len(found["texts"])  # each is measured for itself
    for one, other in zip(*found.values(), strict=True):
        for name in ("plain", "eagle3"):
            mine, theirs = one["decoders"][name], other["decoders"][name]
            assert mine["gains"] == theirs["gains"] and mine["differs_at"] == theirs["differs_at"]
    with pytest.raises(ValueError, match="'words': expected texts or steps"):
        BenchOptions(turns="words")


@pytest.mark.parametrize("dies_at", [9, 12, 14])
def test_a_stopped_run_keeps_its_rounds_and_resumes_with_the_others(setup, tmp_path, dies_at):
    log = []
    stopped = measured(setup, tmp_path, {name: Scripted(name, log, dies_at=dies_at) for name in "abc"})
    assert not stopped.complete and len(stopped.rounds) == (dies_at - 6) // 3
    log.clear()
    whole = measured(setup, tmp_path, {name: Scripted(name, log) for name in "abc"})
    assert whole.complete and whole.rounds[: len(stopped.rounds)] == stopped.rounds and len(whole.rounds) == 4
    assert len(log) == 6 + 3 * (4 - len(stopped.rounds))
    log.clear()
    again = measured(setup, tmp_path, {name: Scripted(name, log) for name in "abc"})
    assert again.rounds == whole.rounds and log == []


def test_before_the_first_round_ctrl_c_is_ctrl_c(setup, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        measured(setup, tmp_path, {"a": Scripted("a", [], dies_at=2)})


@pytest.mark.parametrize("change", [{"seed": 1}, {"prompts": ((5, 6), (7, 9))}, {"reference": "b"}])
def test_another_question_is_measured_anew(setup, tmp_path, change):
    log = []
    for options in ({}, change):
        log.clear()
        measured(setup, tmp_path, {name: Scripted(name, log) for name in "ab"}, **options)
        assert len(log) == 4 + 8
    assert len(Results(tmp_path / RESULTS).rows) == 8


def test_another_default_tree_other_costs_and_another_peer_are_measured_anew(setup, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    monkeypatch.setattr("os.getloadavg", lambda: (random.random() * 100, 0, 0))
    version, base = iter(["1.2", "1.2", "1.2", "1.2", "1.3"]), setup.models.target
    setup.peers["fake"] = SimpleNamespace(command=["python"], ask=lambda op: {"fake": next(version)})
    asked = BenchOptions(decoder=("eagle3", "eagle3 auto"), reference="plain")

    def identity():
        return run.identity(asked, setup, run.decoders_of(asked))

    first = identity()
    assert identity() == first, "whatever the load"
    head = setup.drafter("eagle3")
    replace(FREE, key=cost_key(base, head)).save(cost_path(cost_key(base, head)))
    seen = {first, identity()}
    head.config = replace(head.config, tree=((0,), (0, 0)))
    seen |= {identity()}
    seen |= {identity()}  # of the next peer
    assert len(seen) == 4


def test_more_repeats_add_to_the_rounds_that_are_there(setup, tmp_path):
    log = []
    measured(setup, tmp_path, {"a": Scripted("a", log)}, repeats=1)
    log.clear()
    outcome = measured(setup, tmp_path, {"a": Scripted("a", log)}, repeats=3)
    assert len(outcome.rounds) == 6 and len(log) == 2 + 4


@pytest.mark.parametrize("batch", [1, 2])
def test_prompts_are_sampled_independently_and_alike_by_every_decoder_of_ours(setup, tmp_path, monkeypatch, batch):
    taken, timed = [], run.time_batch

    def watched(decoder, batch):
        found = timed(decoder, batch)
        taken.append(list(map(tuple, found.output.tokens)))
        return found

    monkeypatch.setattr(run, "time_batch", watched)
    setup.max_new_tokens = 12
    names = ("transformers", "plain", "lookup", "eagle3 tree=chain:2", "plain refill")
    sets = [PromptSet("p", [[5, 6]] * 4, [None] * 4)]
    outcome = race(setup, tmp_path, names, sets, batch=batch, temperature=1.5, max_new_tokens=12, queue=2)
    assert outcome.left_out == {}
    texts = {name: [] for name in names}
    for name, rows in zip((name for one in outcome.rounds for name in one["order"]), taken, strict=True):
        texts[name] += rows
    theirs, *ours = texts.values()
    assert len(set(theirs)) == len(set(ours[0])) == 4, "one prompt four times: four texts"
    assert len({tuple(sorted(one)) for one in ours}) == 1


def test_no_cell_searches_with_the_beams_of_the_base_s_own_config(setup, monkeypatch):
    monkeypatch.setattr(setup.models.target.generation_config, "num_beams", 3)
    batch = {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.ones(1, 2), "seeds": [7]}
    for cell in (GREEDY, replace(GREEDY, temperature=0.8)):
        plain, theirs, drafted = (
            parse_decoder(name).build(setup, cell)(batch, None).tokens
            for name in ("plain", "transformers", "eagle3 tree=chain:2")
        )
        assert drafted == plain and (cell.temperature or theirs == plain)


def test_what_cannot_serve_a_cell_is_left_out_of_it_with_the_reason(setup, tmp_path):
    specs = {
        "ref": Scripted("ref", []), "single": Scripted("single", []), "other": Scripted("other", [], count=2),
        "broken": Scripted("broken", [], fails=5), "late": Scripted("late", [], fails=7),
    }  # fmt: skip
    prompts = ((5, 6), (7, 8, 9), (6, 1, 1, 1))
    outcome = measured(setup, tmp_path, specs, prompts=prompts, batch=(1, 3), repeats=1)
    cell, batched = "p, batch 1, T = 0", "p, batch 3, T = 0"
    assert outcome.left_out == {
        "broken": {cell: "cannot take it"}, "single": {batched: "takes one row at a time"},
        "late": {cell: "cannot take it"},
    }  # fmt: skip
    assert [sorted(one["decoders"]) for one in outcome.rounds[:3]] == [
        ["late", "other", "ref", "single"], ["other", "ref", "single"], ["other", "ref", "single"],
    ]  # fmt: skip
    rows = report.rows_of(outcome.rounds, "ref", 1.0)
    by_name = {row["decoder"]: row for row in rows if row["batch"] == 1}
    assert by_name["late"]["texts"] == 1 and by_name["ref"]["same_text"] == 3 and by_name["other"]["same_text"] == 0
    with pytest.raises(PeerError):  # nothing to compare with
        measured(setup, tmp_path / "new", specs, prompts=prompts, reference="broken")


def test_progress_never_goes_back_and_ends_at_1(setup, tmp_path):
    told = []
    measured(
        setup, tmp_path, {name: Scripted(name, []) for name in "ab"}, batch=(1, 2),
        tell=lambda part, note: told.append((part, note)),
    )  # fmt: skip
    parts = [part for part, _ in told]
    assert parts == sorted(parts) and parts[-1] == 1 and parts.count(1) == 1
    assert told[0][1] == "p, batch 1, T = 0: warming up a"


MIXED = tuple([5 + i, *range(20, 20 + i)] for i in range(7))


def run_queue(setup, folder, *texts, prompts=MIXED, **options):
    setup.max_new_tokens = 11
    given = {"batch": 2, "queue": 4, "max_new_tokens": "2-11", "reference": texts[0], **options}
    return race(setup, folder, texts, [PromptSet("p", list(prompts), [None] * len(prompts))], **given)


def test_a_refilled_batch_is_measured_beside_an_unfilled_one(setup, tmp_path):
    texts = ("transformers", "plain", "plain refill", "eagle3", "eagle3 tree=chain:2 refill", "eagle3 auto")
    outcome = run_queue(setup, tmp_path, *texts)
    assert outcome.complete and outcome.left_out == {}
    assert [len(one["categories"]) for one in outcome.rounds] == [4, 3]  # queues, not batches
    rows = {row["decoder"]: row for row in report.rows_of(outcome.rounds, "transformers", 1.0)}
    assert all(row["same_text"] == row["texts"] == 7 for row in rows.values())
    lengths = [n for one in outcome.rounds for n in one["decoders"]["plain"]["tokens"]]
    assert lengths == draw_numbers(7, 2, 11, 0, "limits p") and len(set(lengths)) > 3
    steps = {name: sum(one["decoders"][name]["steps"] for one in outcome.rounds) for name in texts[1:]}
    assert steps["plain refill"] < steps["plain"] and rows["plain refill"]["accepted_length"] == 1
    assert 0 < rows["plain refill"]["step_seconds"] < 1 > rows["plain"]["step_seconds"] > 0


def test_sampled_texts_of_a_queue_are_measured_too(setup, tmp_path):
    outcome = run_queue(setup, tmp_path, "plain", "plain refill", temperature=(0.8,))
    one, two = (outcome.rounds[0]["decoders"][name]["tokens"] for name in ("plain", "plain refill"))
    assert outcome.complete and one == two == draw_numbers(7, 2, 11, 0, "limits p")[:4]


def test_lengths_and_limits_are_independent_in_each_set_and_between_sets(setup, tmp_path):
    found = {}

    class Watching(Scripted):
        def build(self, setup, cell):
            def decode(batch, watch):
                drawn = found.setdefault(cell.prompts, {"lengths": [], "limits": []})
                drawn["lengths"] += batch["attention_mask"].sum(1).tolist()
                drawn["limits"] += batch["limits"]
                return Output([[1]] * len(batch["input_ids"]), seconds=1.0)

            return decode

    sets = default_sets(setup.models.tokenizer, 64, 128, fewest=16)
    options = {"reference": "a", "batch": 64, "max_new_tokens": "32-256", "queue": 64}
    race(setup, tmp_path, "a", sets, {"a": Watching("a", [])}, **options)
    drawn = [torch.tensor(one[use][:64]).double() for one in found.values() for use in ("lengths", "limits")]
    assert [(int(one.min()) >= low, len(one)) for one, low in zip(drawn, (16, 32) * 2, strict=True)] == [(True, 64)] * 4
    # The draws are fixed by the seed: 0.5 is four standard deviations of 64 independent pairs.
    assert float((torch.corrcoef(torch.stack(drawn)) - torch.eye(4)).abs().max()) < 0.5


def test_without_a_range_a_queue_has_one_limit(setup, tmp_path):
    outcome = run_queue(setup, tmp_path, "plain", "lookup refill", max_new_tokens=11, queue=7)
    assert [one["decoders"]["lookup refill"]["tokens"] for one in outcome.rounds] == [[11] * 7]


def test_refilling_asks_for_a_queue_and_for_what_can_be_refilled(setup, tmp_path):
    with pytest.raises(ValueError, match="'plain refill' refills rows from a queue"):
        run.decoders_of(BenchOptions(decoder="plain refill"))
    with pytest.raises(ValueError, match="at least a batch of 16"):
        BenchOptions(queue=8)
    with pytest.raises(ValueError, match="the smaller first"):
        BenchOptions(max_new_tokens="9-8")

    class Rigid(type(setup.drafter("lookup"))):
        refillable = False

    setup.models.drafter = lambda name: Rigid(2)
    outcome = run_queue(setup, tmp_path, "plain", "lookup refill")
    (reason,) = set(outcome.left_out["lookup refill"].values())
    assert reason == "its rows cannot be refilled: Rigid cannot change the prompt of one row"


@pytest.mark.parametrize("change", [{"queue": 5}, {"max_new_tokens": "3-4"}])
def test_another_queue_is_measured_anew(setup, tmp_path, change):
    for options in ({}, change):
        log = []
        given = {"queue": 4, "max_new_tokens": "2-4", **options}
        measured(setup, tmp_path, {"a": Scripted("a", log)}, prompts=MIXED, repeats=1, **given)
        assert len(log) > 4
