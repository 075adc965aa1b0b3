"""The race's arithmetic on a fake clock, and the prompts it runs on."""

import json
from collections import Counter
from itertools import pairwise, permutations

import pytest
import torch

from specheads.bench import decoders, environment, report
from specheads.bench.batches import batch_by_batch, draw_numbers, join_outputs, split
from specheads.bench.prompts import held_out_prompts, read_prompts
from specheads.bench.runner import Output, race, time_batch, turns
from specheads.decoding.drafters import DraftModel
from specheads.decoding.generation import prompt_batches
from specheads.decoding.loop import part_timer
from specheads.decoding.planner import chain, default_static
from specheads.models.convert import convert


class Clock:
    """Time passes only when something says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def scripted(clock, seconds, tokens=(5, 6, 7, 8), per_step=1, log=None, name=""):
    """A decoder that gives `tokens`, `per_step` at a time; its k-th run takes seconds[k] in equal steps."""
    runs = iter(seconds)

    def decode(batch, watch):
        took, left = next(runs), list(tokens)
        if log is not None:
            log.append(name)
        groups = []
        while left:
            groups.append([left.pop(0) for _ in range(min(per_step, len(left)))])
        if watch is not None:
            watch.put(batch["input_ids"])
        for group in groups:
            clock.now += took / len(groups)
            if watch is not None:
                watch.put(torch.tensor(group))
        return Output([list(tokens)])

    return decode


PROMPT = {"input_ids": torch.tensor([[1, 2, 3]])}


def test_neither_the_warm_up_nor_one_slow_repeat_changes_a_speed_up():
    clock = Clock()
    # The machine is 10 times slower in the second repeat; the warm-up is slowest.
    slow, fast = scripted(clock, [99, 4.0, 40.0, 4.4]), scripted(clock, [99, 2.0, 20.0, 1.1])
    result = race({"slow": slow, "fast": fast}, [PROMPT], repeats=3, clock=clock)
    assert result.speeds("slow") == pytest.approx([1.0, 0.1, 4 / 4.4])
    rows = report.summary(result, "slow")
    assert rows["slow"]["tokens_per_second"] == pytest.approx(4 / 4.4) and rows["slow"]["speed_up"] == 1
    assert rows["fast"]["speed_up"] == pytest.approx(2.2)


def test_speed_is_all_tokens_over_all_seconds_not_a_mean_of_speeds():
    clock = Clock()
    result = race({"one": scripted(clock, [0, 1.0, 3.0])}, [PROMPT, PROMPT], repeats=1, clock=clock)
    assert result.speeds("one") == [report.summary(result, "one")["one"]["tokens_per_second"]] == [8 / 4]


def test_there_is_an_interval_for_all_but_the_reference_and_a_race_of_one_batch():
    clock = Clock()
    racers = {"slow": scripted(clock, [0, 2.0, 6.0]), "fast": scripted(clock, [0, 1.0, 3.0])}
    rows = report.summary(race(racers, [PROMPT, PROMPT], repeats=1, clock=clock), "slow")
    assert [row["speed_up"] for row in rows.values()] == [1, 2]
    assert [report.format_interval(row) for row in rows.values()] == ["–", "2.00–2.00"]
    racers = {"slow": scripted(clock, [0, 2.0]), "fast": scripted(clock, [0, 1.0])}
    rows = report.summary(race(racers, [PROMPT], repeats=1, clock=clock), "slow")
    assert rows["fast"]["speed_up_interval"] is None and report.format_interval(rows["fast"]) == "–"


def test_decoders_take_turns_at_every_prompt_and_none_always_follows_the_same():
    clock, log = Clock(), []
    racers = {name: scripted(clock, [1.0] * 61, log=log, name=name) for name in "abc"}
    race(racers, [PROMPT] * 30, repeats=2, clock=clock)
    rounds = ["".join(log[first : first + 3]) for first in range(0, len(log), 3)]
    assert rounds[0] == "abc" and len(rounds) == 61  # the warm-up first
    assert {"".join(sorted(one)) for one in rounds} == {"abc"}
    after = Counter(pairwise(log[3:]))
    assert all(after[before, name] >= 15 for before, name in permutations("abc", 2))  # of some 25
    assert list(turns("abc", 9, 2)) == list(turns("abc", 9, 2))


def test_no_repeat_begins_that_would_overrun_the_budget():
    clock = Clock()
    result = race({"one": scripted(clock, [0, *[10.0] * 9])}, [PROMPT], repeats=5, budget=30, clock=clock)
    assert len(result.runs["one"]) == 3
    clock = Clock()
    result = race({"one": scripted(clock, [0, 10.0])}, [PROMPT], repeats=5, budget=1, clock=clock)
    assert len(result.runs["one"]) == 1  # there is always one


def test_out_of_time_every_decoder_has_run_the_same_prompts():
    clock = Clock()
    racers = {name: scripted(clock, [0, *[10.0] * 9]) for name in "ab"}
    result = race(racers, [PROMPT] * 4, repeats=3, budget=50, clock=clock)
    assert [len(runs) for runs in result.runs.values()] == [1, 1]
    assert [len(runs[0]) for runs in result.runs.values()] == [2, 2]  # a third would end after 60 seconds
    assert report.summary(result, "b")["a"]["speed_up"] == 1


def test_accepted_length_counts_the_bonus_and_leaves_the_prefill_out():
    clock = Clock()
    racers = {
        "plain": scripted(clock, [1.0] * 2, tokens=range(7)),
        "three": scripted(clock, [1.0] * 2, tokens=range(7), per_step=3),
    }
    rows = report.summary(race(racers, [PROMPT], repeats=1, clock=clock), "plain")
    assert rows["plain"]["accepted_length"] == 1
    assert rows["three"]["accepted_length"] == 2  # 3 of the prefill step left out: (3 + 1) / 2


def test_a_text_that_differs_is_found_at_its_first_token():
    clock = Clock()
    racers = {
        "a": scripted(clock, [1.0] * 4, tokens=[4, 5, 6]),
        "b": scripted(clock, [1.0] * 4, tokens=[4, 9, 6]),
        "c": scripted(clock, [1.0] * 4, tokens=[4, 5]),
    }
    result = race(racers, [PROMPT, PROMPT], repeats=1, clock=clock)
    assert result.differing("a", "a") == []
    assert result.differing("b", "a") == [(0, 0, 1), (1, 0, 1)]
    assert result.differing("c", "a") == [(0, 0, 2), (1, 0, 2)]
    rows = report.summary(result, "a")
    assert [rows[name]["identical"] for name in "abc"] == [True, False, False]
    assert [rows[name]["same_text"] for name in "abc"] == [2, 0, 0]


@pytest.mark.parametrize("plan", [True, False])
def test_what_the_decoders_say_is_what_generate_does(base, plan):
    model = convert(base, "medusa", num_heads=2)
    ids = torch.tensor([[1, 5, 9, 11]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    racers = {
        "reference": decoders.transformers_generate(base, 12),
        "own": decoders.specheads_generate(model, 12, draft=plan),
    }
    result = race(racers, [batch], repeats=2)
    assert result.differing("own", "reference") == []
    steps = result.runs["own"][0][0].steps
    assert sum(gained for gained, _ in steps) == len(result.runs["own"][0][0].output.tokens[0])
    statistics = result.runs["own"][0][0].output.statistics
    assert len(steps) == statistics["steps"] + 1
    row = json.loads(json.dumps(report.summary(result, "reference")["own"]))
    assert row["identical"] is True and row["accepted_length"] == pytest.approx(statistics["accepted_length"])


@pytest.mark.parametrize("rows", [1, 3])
def test_the_parts_of_a_call_add_up_to_it_and_timing_ends_with_it(base, rows):
    model = convert(base, "medusa", num_heads=2)
    batch = {"input_ids": torch.tensor([[1, 5, 9, 11]] * rows), "attention_mask": torch.ones(rows, 4)}
    run = time_batch(decoders.specheads_generate(model, 12), batch)
    assert set(run.output.parts) == {"prefill", "draft", "verify", "accept", "step", "other"}
    assert all((seconds > 0) == (part != "step") for part, seconds in run.output.parts.items())
    assert 0.5 * run.seconds < sum(run.output.parts.values()) <= run.seconds
    steps = run.output.statistics["steps"]
    assert [len(gains) for gains in run.output.gains] == [steps + 1] * rows
    assert [sum(gains) for gains in run.output.gains] == [12] * rows
    assert part_timer.get() is None
    plain = time_batch(decoders.specheads_generate(base, 12), batch).output.parts
    assert plain["draft"] < plain["verify"]


def test_batches_race_without_a_stopwatch_and_still_know_their_accepted_length(base):
    model = convert(base, "medusa", num_heads=2)
    ids = torch.tensor([[1, 5, 9, 11], [0, 1, 7, 3]])
    batch = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    racers = {"reference": decoders.transformers_generate(base, 10), "own": decoders.specheads_generate(model, 10)}
    result = race(racers, [batch], repeats=1)
    assert result.differing("own", "reference") == []
    rows = report.summary(result, "reference")
    own = rows["own"]
    assert rows["reference"]["accepted_length"] is rows["reference"]["accepted_by_depth"] is own["by_text"] is None
    assert own["accepted_length"] == pytest.approx(1 + sum(own["accepted_by_depth"])) and own["accepted_length"] >= 1


@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_draft_that_ends_the_text_is_counted_at_its_depth(base, batch_size, monkeypatch):
    ids = torch.tensor([[1, 5, 9, 11], [1, 7, 3, 8], [4, 4, 2, 6]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    end = decoders.specheads_generate(base, 9)(batch, None).tokens[0][3]
    monkeypatch.setattr(base.generation_config, "eos_token_id", end)
    racers = {
        "reference": decoders.specheads_generate(base, 9),
        "own": decoders.specheads_generate(base, 9, draft=DraftModel(base), plan=chain(4), batch_size=batch_size),
    }
    run = racers["own"](batch, None)
    assert run.tokens[0][-1] == end and run.gains[0] == [1, 3] and run.accepted[0] == [0, 3]
    row = report.summary(race(racers, [batch], repeats=1), "reference")["own"]
    taken = [count for accepted in run.accepted for count in accepted[1:]]
    assert row["accepted_by_depth"] == [sum(count >= d for count in taken) / len(taken) for d in range(1, 5)]
    parts = batch_by_batch(racers["own"], 2)(batch, None)
    assert (parts.tokens, parts.gains, parts.accepted) == (run.tokens, run.gains, run.accepted)


@pytest.mark.parametrize("batch_size", [None, 2])
def test_nodes_are_counted_by_the_ranks_that_a_pass_over_the_text_gives_their_tokens(base, batch_size):
    """The base drafts for itself, so the choices of a node are the likeliest tokens of its own distribution."""
    ids = torch.tensor([[1, 5, 9, 11], [1, 7, 3, 8], [4, 4, 2, 6]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "seeds": [3, 4, 5]}
    own = decoders.specheads_generate(base, 24, draft=DraftModel(base), plan=default_static(40, 3),
                                      batch_size=batch_size, do_sample=True, temperature=0.3)  # fmt: skip
    run = own(batch, None)
    counted = Counter()
    for prompt, tokens, gains, accepted in zip(ids.tolist(), run.tokens, run.gains, run.accepted, strict=True):
        logits = base(torch.tensor([[*prompt, *tokens]])).logits[0]
        at = gains[0]
        for gained, count in zip(gains[1:], accepted[1:], strict=True):
            ranks = [int((logits[len(prompt) + i - 1] > logits[len(prompt) + i - 1, tokens[i]]).sum())
                     for i in range(at, at + count)]  # fmt: skip
            counted.update(".".join(map(str, ranks[:depth])) for depth in range(1, count + 1))
            at += gained
    assert run.statistics["accepted_nodes"] == counted and any("1" in node for node in counted)
    row = report.summary(race({"own": own}, [batch], repeats=2), "own")["own"]
    steps = run.statistics["rows_stepped"]
    assert row["accepted_nodes"] == {node: count / steps for node, count in counted.items()}
    if batch_size is None:
        assert join_outputs([run, run]).statistics["accepted_nodes"] == counted + counted


RAGGED = {
    "input_ids": torch.tensor([[0, 0, 1, 5], [0, 9, 11, 7], [1, 7, 3, 2], [0, 0, 0, 8], [0, 4, 4, 9]]),
    "attention_mask": torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1], [0, 1, 1, 1]]),
}


@pytest.mark.parametrize("limits", [None, [3, 14, 1, 9, 6]])
def test_a_queue_gives_the_texts_of_its_prompts_alone_refilled_or_batch_by_batch(base, limits):
    queue = RAGGED if limits is None else {**RAGGED, "limits": limits}
    model = convert(base, "medusa", num_heads=2)
    alone = decoders.transformers_generate(base, 12)
    wanted = [alone({name: values[i : i + 1] for name, values in queue.items()}, None).tokens[0] for i in range(5)]
    assert [len(row) for row in wanted] == (limits or [12] * 5)
    unfilled = batch_by_batch(decoders.specheads_generate(model, 12), 2)
    refilled = decoders.specheads_generate(model, 12, batch_size=2)
    for decode in (
        batch_by_batch(alone, 2),
        unfilled,
        refilled,
        decoders.specheads_generate(model, 12),
        decoders.specheads_generate(base, 12),
    ):
        assert decode(queue, None).tokens == wanted
    steps = {}
    for name, decode in (("unfilled", unfilled), ("refilled", refilled)):
        output = decode(queue, None)
        assert [sum(row) for row in output.gains] == [len(row) for row in wanted]
        assert output.statistics["gained"] == sum(map(len, wanted)) - 5
        assert output.parts["prefill"] > 0 < output.parts["verify"]
        steps[name] = output.statistics["steps"]
    if limits:  # of batches of 2 the longer one decides how many steps they take
        assert steps["refilled"] < steps["unfilled"]


def test_limits_are_drawn_by_the_seed_from_the_whole_range():
    drawn = draw_numbers(300, 3, 7, 1, "limits")
    assert drawn == draw_numbers(300, 3, 7, 1, "limits") != draw_numbers(300, 3, 7, 2, "limits")
    assert set(drawn) == {3, 4, 5, 6, 7}


def test_batches_of_a_queue_have_no_columns_of_padding_alone():
    parts = list(split({**RAGGED, "limits": [1, 2, 3, 4, 5]}, 2))
    assert [part["input_ids"].tolist() for part in parts] == [
        [[0, 1, 5], [9, 11, 7]], [[1, 7, 3, 2], [0, 0, 0, 8]], [[4, 4, 9]],
    ]  # fmt: skip
    assert [part["limits"] for part in parts] == [[1, 2], [3, 4], [5]]


class Letters:
    """One token a character; what the prompts need of a tokenizer."""

    pad_token_id = 0

    def __call__(self, text):
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, ids, skip_special_tokens=True):
        return "".join(map(chr, ids))


def test_held_out_prompts_start_a_line_and_come_from_files_nobody_trains_on():
    names = ["argparse.py", "ast.py", "base64.py", "bisect.py"]
    prompts = held_out_prompts(Letters(), 3, num_tokens=40, held_out=names)
    import ast
    import base64
    from pathlib import Path

    assert [len(p) for p in prompts] == [40] * 3 and len(set(prompts)) == 3
    assert "\n" + prompts[1] in Path(ast.__file__).read_text("utf8")
    assert "\n" + prompts[2] in Path(base64.__file__).read_text("utf8")
    with pytest.raises(ValueError, match="9 prompts asked for, but only 4"):
        held_out_prompts(Letters(), 9, num_tokens=40, held_out=names)


def test_prompt_files_are_read_and_what_is_wrong_is_named_by_its_line(tmp_path):
    lines = tmp_path / "p.txt"
    lines.write_text("one\n\ntwo\n", "utf8")

    def prompts_from(path, count=None):
        return [prompt.asked for prompt in read_prompts(path, count)]

    assert prompts_from(lines) == ["one", "two"] and prompts_from(lines, 1) == ["one"]
    rows = tmp_path / "p.jsonl"
    rows.write_text('"a"\n{"prompt": "b"}\n{"text": "c"}\n', "utf8")
    assert prompts_from(rows) == ["a", "b", "c"]
    rows.write_text('"a"\n{"other": 1}\n', "utf8")
    with pytest.raises(ValueError, match="line 2"):
        prompts_from(rows)
    rows.write_text("{", "utf8")
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        prompts_from(rows)
    lines.write_text("", "utf8")
    with pytest.raises(ValueError, match="holds no prompts"):
        prompts_from(lines)
    lines.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not UTF-8"):
        prompts_from(lines)
    with pytest.raises(FileNotFoundError):
        prompts_from(tmp_path / "absent.txt")


def test_batches_are_padded_in_front_and_an_empty_prompt_is_refused():
    made = prompt_batches.batches(Letters(), ["abc", "d", "ef"], torch.device("cpu"), size=2)
    assert made[0]["input_ids"].tolist() == [[97, 98, 99], [0, 0, 100]]
    assert made[0]["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert made[1]["input_ids"].tolist() == [[101, 102]]
    with pytest.raises(ValueError, match="prompt 2 has no tokens"):
        prompt_batches.batches(Letters(), ["a", "b", ""], torch.device("cpu"), size=2)


def test_the_report_names_hardware_and_versions_and_writes_both_files(tmp_path):
    record = environment.environment()
    line = environment.line(record | {"cores": 2, "torch_threads": 1, "cpu": "C"})
    assert torch.__version__ in line and "transformers" in line and line.startswith("2 cores of C, 1 thread, ")
    text = report.markdown(("a", "b"), [["x", "1"]])
    assert text.splitlines() == ["| a | b |", "| --- | ---: |", "| x | 1 |"]
    paths = report.write(tmp_path / "new", "figures", text, {"a": 1})
    assert paths[0].read_text("utf8") == text and json.loads(paths[1].read_text("utf8")) == {"a": 1}
