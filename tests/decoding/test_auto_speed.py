"""draft="auto" on a clock that runs by the costs: hardly slower than plain decoding where drafts are wrong, and faster
where they are right."""

import pytest
import torch

import specheads
from specheads import Drafter, chain
from specheads.decoding.drafters.auto import AutoDrafter
from specheads.decoding.planner import ChildLogits
from specheads.decoding.planner.by_cost import CostTable, Curve, StepCosts
from tests.support.auto_costs import DEAR, FREE, ONE, OPTIONS, Trained, table
from tests.support.prompts import padded
from tests.support.tiny_models import repetitive_model


class Clock(Drafter):
    """An automatic drafter on a clock that runs by its costs; ms: of all steps."""

    def __init__(self, head, costs):
        self.costs, self.calls, self.levels, self.ms = costs.for_rows(1), 0, 0, 0.0
        self.auto = AutoDrafter(None if head is None else Counting(head, self), costs)

    layers = property(lambda self: self.auto.layers)

    def default_plan(self, device, do_sample):
        return self.auto.default_plan(device, do_sample)

    def propose(self, context, sampler, plan):
        calls, levels = self.calls, self.levels
        tree = self.auto.propose(context, sampler, plan)
        self.ms += self.costs.step(1, tree.num_nodes, context.bound)
        if self.calls > calls:
            self.ms += self.costs.draft(1, (1,) * max(0, self.levels - levels - 1), 1)
        return tree


class Counting(Drafter):
    """A head that counts its calls and the levels it drafted; wrong: it drafts one token, whatever the text."""

    max_depth = 8

    def __init__(self, head, clock):
        self.head, self.clock = head, clock

    layers = property(lambda self: self.head.layers)

    def default_plan(self, device, do_sample):
        return chain(2)

    def propose(self, context, sampler, plan):
        tree = self.head.propose(context, sampler, plan)
        self.clock.calls += 1
        self.clock.levels += max(tree.max_depth, 1 + len(getattr(plan.plan, "levels", ())))
        return tree


def ms_per_token(base, head, costs, tokens=200, **options):
    clock = Clock(head, costs)
    out = specheads.generate(
        base, **ONE, **{**OPTIONS, "max_new_tokens": tokens, "eos_token_id": 97}, draft=clock, **options
    )
    return clock.ms / (sum(len(step.tokens[0]) for step in out.steps[1:]))


RANDOM_TEXT = {"do_sample": True, "temperature": 6.0, "seed": 2}


@pytest.fixture(scope="module")
def heads():
    return Trained()


@pytest.fixture(scope="module")
def plain_ms():
    """A plain step's, as no draft pays."""
    return ms_per_token(repetitive_model("Llama"), None, table(100.0), **RANDOM_TEXT)


def test_it_is_hardly_slower_than_plain_decoding_where_drafts_are_wrong(plain_ms):
    for costs in [FREE, table(0.5, 0.5), DEAR]:
        torch.manual_seed(1)
        model = specheads.convert(repetitive_model("Llama"), "eagle3")
        assert ms_per_token(model.base, model.head, costs, **RANDOM_TEXT) < 1.06 * plain_ms


def test_it_is_faster_where_copies_are_right(heads):
    base = heads["eagle3"].base
    slow = ms_per_token(base, None, table(100.0))
    assert ms_per_token(base, None, table(0.3)) < 0.7 * slow
    assert ms_per_token(base, heads["eagle3"].head, table(0.3)) < 0.7 * slow


class Sometimes(Drafter):
    """Knows the text, and drafts it right from its index `start` on, wrong before."""

    layers = ()
    max_depth = 8

    def __init__(self, text, start):
        self.text, self.start, self.steps = text, start, []

    def default_plan(self, device, do_sample):
        return chain(3)

    def propose(self, context, sampler, plan):
        done, level = len(context.history[0]), 0
        self.steps.append(done)

        def expand(tokens, parents):
            nonlocal level
            index, level = done + level, level + 1
            token = self.text[index] if self.start <= index < len(self.text) else 0
            logits = torch.zeros(97)
            logits[token] = 4.0  # a probability of 0.36
            return ChildLogits(logits.expand(*tokens.shape, -1))

        return plan.grow(context.root, expand, sampler, 97)


def test_a_head_that_did_not_pay_is_tried_again_and_used_once_it_does():
    base = repetitive_model("Llama")
    options = {**OPTIONS, "max_new_tokens": 400, "eos_token_id": 97, "do_sample": True, "temperature": 6.0, "seed": 2}
    text = specheads.generate(base, **ONE, **options).sequences[0].tolist()
    head = Sometimes(text, 250)
    out = specheads.generate(base, **ONE, **options, draft=AutoDrafter(head, table(0.5, 0.5)))
    assert out.sequences[0].tolist() == text
    early, late = ([n for n in head.steps if low <= n < high] for low, high in ((60, 250), (300, 400)))
    assert 1 <= len(early) <= 20, "tried now and then"
    assert len(late) >= 5 and len(late) * 3 < 100, "several tokens a step once it is right"


def test_a_head_that_promises_nothing_is_tried_once_reading_the_prompt_is_a_small_share():
    """2 % of 150 steps of 4 ms are 12 ms: enough to read 100 positions at 0.01 ms each, not at 1 ms."""
    for read_ms, tried in [(0.01, True), (1.0, False)]:
        prompt = padded([[5 + i % 80 for i in range(100)]])
        verify, flat = {64: Curve(((1, 4.0), (64, 100.0)))}, Curve(((1, 0.0),))
        read = Curve(((1, read_ms), (64, 64 * read_ms)))
        head = Sometimes([], 10**9)
        options = {**OPTIONS, **RANDOM_TEXT, "max_new_tokens": 150, "eos_token_id": 97}
        costs = CostTable(None, {1: StepCosts(1, verify, flat, flat, read, Curve(((1, 0.5),)))}, ((0.02,),))
        specheads.generate(repetitive_model("Llama"), **prompt, **options, draft=AutoDrafter(head, costs))
        assert bool(head.steps) == tried
