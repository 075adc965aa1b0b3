"""A head that was idle: it reads what it missed, and then drafts as one that read at every step."""

from dataclasses import replace

import pytest
import torch

import specheads
from specheads import Drafter, DraftTree, PromptLookup, chain
from specheads.decoding.drafters.pending import PendingFeatures
from specheads.decoding.planner import NoDraft
from specheads.decoding.planner.plan import ReserveSlots
from tests.support.auto_costs import HEADS, OPTIONS, Trained
from tests.support.prompts import padded

PROMPTS = padded([[7, 8, 9, 7, 8], [31], [5, 5, 60, 61, 5, 5, 60]])


@pytest.fixture(scope="module")
def heads():
    return Trained()


class Alternating(Drafter):
    """Drafts copies, of which rows accept different numbers. Beside them a head drafts at each step, and the same head
    with a memory of its own at every n-th; `drafts` holds what both drafted there, `by_text` what each drafted, by the
    row's text."""

    layers = property(lambda self: self.head.layers)
    refillable = True

    def __init__(self, head, every):
        self.head, self.every, self.drafts, self.step = head, every, [], 0
        self.by_text = [{}, {}]
        self.plan = ReserveSlots(chain(3), 8)
        self.always, self.rarely = PendingFeatures(), PendingFeatures()

    def default_plan(self, device, do_sample):
        return chain(4)

    def propose(self, context, sampler, plan):
        self.always.add(context), self.rarely.add(context)
        one = self.always.propose(self.head, context, sampler, self.plan)
        if self.step % self.every == self.every - 1:
            other = self.rarely.propose(self.head, context, sampler, self.plan)
            running = context.new > 0
            self.drafts.append((one.tokens[running], other.tokens[running]))
            for tree, known in ((one, self.by_text[0]), (other, self.by_text[1])):
                known.update((tuple(context.history[b]), tree.tokens[b].tolist()) for b in running.nonzero()[:, 0])
        elif self.step % self.every == self.every // 2:  # reads without drafting
            self.rarely.propose(self.head, context, sampler, NoDraft(self.plan))
        self.step += 1
        return PromptLookup(4).propose(context, sampler, plan)

    def refill(self, context, rows, prompts, plan):
        for unread in (self.always, self.rarely):
            unread.refill(self.head, context, rows, replace(prompts, memory={}), self.plan)
        PromptLookup(4).refill(context, rows, prompts, plan)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("every", [4, 7])
@pytest.mark.parametrize("head", HEADS)
def test_a_head_that_was_idle_drafts_as_one_that_never_was(heads, head, every):
    drafter = Alternating(heads[head].head, every)
    out = specheads.generate(heads[head].base, **PROMPTS, **{**OPTIONS, "eos_token_id": 97}, draft=drafter)
    assert len({tuple(step.accepted) for step in out.steps}) > 3, "all rows accepted the same"
    assert len(drafter.drafts) > 2 and all(torch.equal(one, other) for one, other in drafter.drafts)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("every", [2, 5, 30])
@pytest.mark.parametrize("head", HEADS)
def test_a_head_that_was_idle_drafts_after_a_prompt_that_took_a_row_as_alone(heads, head, every):
    """every=30: it has read no prompt when the third takes the row of the first."""
    model, prompts = heads[head], [[7, 8, 9, 7, 8], [31], [5, 5, 60, 61, 5, 5, 60], [9, 31, 9], [60, 5, 7, 7], [8, 8]]
    options = {"max_new_tokens": 40, "eos_token_id": 97, "do_sample": True, "temperature": 0.7}
    alone = {}
    for seed, prompt in enumerate(prompts):
        drafter = Alternating(model.head, 1)
        model.generate(torch.tensor([prompt]), **options, seed=seed, draft=drafter)
        alone |= drafter.by_text[0]
    drafter, many = Alternating(model.head, every), {**options, "max_new_tokens": [6, 40, 40, 40, 40, 40]}
    specheads.generate_many(model.base, prompts, batch_size=2, **many, seed=[*range(6)], draft=drafter)
    for known in drafter.by_text:
        common = known.keys() & alone.keys()
        assert len(common) > 2 and all(known[text] == alone[text] for text in common)


def test_an_idle_head_reads_on_beside_a_row_that_ended_with_the_others_and_got_no_prompt(heads):
    """The last step of such rows drafts nothing, so the drafter is not called. The head reads at the 11th call, which
    is the first after the third prompt took a row."""

    class Silent(Alternating):
        def propose(self, context, sampler, plan):
            super().propose(context, sampler, plan)
            return DraftTree.root_only(context.root)

    model, prompts = heads["eagle3"], [[7, 8, 9, 7, 8], [31], [5, 5, 60, 61, 5, 5, 60]]
    options = {"max_new_tokens": 12, "eos_token_id": 97, "do_sample": False}
    alone = [model.base.generate(torch.tensor([ids]), **options)[0].tolist() for ids in prompts]
    texts = specheads.generate_many(model.base, prompts, batch_size=2, **options, draft=Silent(model.head, 11))
    assert [[*text.prompt, *text.tokens] for text in texts] == alone
