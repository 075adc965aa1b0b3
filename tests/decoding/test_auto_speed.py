"""draft="auto" on a clock that runs by the costs: hardly slower than plain decoding where drafts are wrong, and faster
where they are right."""

import pytest
import torch

import specheads
from specheads import Drafter, chain
from specheads.decoding.drafters.auto import AutoDrafter
from tests.support.auto_costs import DEAR, FREE, ONE, OPTIONS, Trained, table
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
