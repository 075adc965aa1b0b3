"""Decoders that take turns at each step: each counts its own time alone, and writes the text it writes by itself."""

import pytest
import torch

from specheads.bench import decoders
from specheads.bench.runner import Output, await_turn, time_batch, time_by_steps
from specheads.models.convert import convert
from tests.bench.test_bench import PROMPT, Clock, scripted


def stepping(clock, name, seconds, log, fails=False):
    """A decoder that gives one token a step and says when each begins."""

    def decode(batch, watch):
        watch.put(batch["input_ids"])
        for number, took in enumerate(seconds):
            await_turn.get()()
            if fails and number:
                raise ValueError(f"{name} failed")
            log.append(name)
            clock.now += took
            watch.put(torch.tensor([number]))
        return Output([list(range(len(seconds)))])

    return decode


def test_decoders_that_take_turns_at_steps_count_their_own_time_alone():
    clock, log = Clock(), []
    own = {"a": [1.0, 2.0, 3.0, 4.0], "b": [10.0, 20.0], "c": [100.0, 200.0, 300.0]}
    racers = {name: stepping(clock, name, seconds, log) for name, seconds in own.items()}
    found = time_by_steps({**racers, "whole": scripted(clock, [7.0], tokens=(5, 6))}, PROMPT, clock)
    for name, seconds in own.items():
        assert found[name].seconds == pytest.approx(sum(seconds))
        assert found[name].steps == tuple((1, pytest.approx(took)) for took in seconds)
    assert found["whole"].seconds == pytest.approx(7.0) and found["whole"].output.tokens == [[5, 6]]
    assert [sorted(log[:3]), sorted(log[3:6]), sorted(log[6:8]), log[8:]] == [[*"abc"], [*"abc"], [*"ac"], ["a"]]
    assert await_turn.get() is None


def test_a_decoder_that_fails_between_steps_leaves_the_others_their_turns():
    clock, log = Clock(), []
    racers = {name: stepping(clock, name, [1.0, 2.0], log, fails=name == "b") for name in "abc"}
    found = time_by_steps(racers, PROMPT, clock)
    assert str(found["b"]) == "b failed" and sorted(log) == [*"aabcc"]
    assert found["a"].seconds == found["c"].seconds == pytest.approx(3.0)


@pytest.mark.parametrize("rows", [1, 3])
def test_steps_in_turn_give_the_texts_of_whole_texts_in_turn(base, rows):
    model = convert(base, "medusa", num_heads=2)
    batch = {"input_ids": torch.tensor([[1, 5, 9, 11]] * rows), "attention_mask": torch.ones(rows, 4)}
    racers = {
        "transformers": decoders.transformers_generate(base, 12),
        "plain": decoders.specheads_generate(base, 12),
        "head": decoders.specheads_generate(model, 12),
    }
    orders = []
    racers["seen"] = lambda batch, watch: orders.append(await_turn.get()) or Output([[0]])
    for name, run in time_by_steps(racers, batch).items():
        if name == "seen":
            continue
        alone = time_batch(racers[name], batch).output
        assert run.output.tokens == alone.tokens and run.output.gains == alone.gains
        assert sum(run.output.parts.values()) <= run.seconds and (name == "transformers" or run.output.parts["verify"])
    assert callable(orders[0])


def test_a_decoder_of_ours_waits_for_its_turn_at_each_step(base):
    waits, batch = [], {"input_ids": torch.tensor([[1, 5, 9, 11]]), "attention_mask": torch.ones(1, 4)}
    token = await_turn.set(lambda: waits.append(1))
    try:
        output = decoders.specheads_generate(base, 12)(batch, None)
    finally:
        await_turn.reset(token)
    assert output.statistics["steps"] == 11 and len(waits) == 12  # and once at the end of the text
