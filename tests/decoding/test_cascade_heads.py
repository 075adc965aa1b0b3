"""Cascades with a head first: it reviews n-grams, the other drafts continue, and the text is the target's."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from specheads import (
    Cascade,
    DraftModel,
    DraftTree,
    MaxGram,
    PromptLookup,
    chain,
    convert,
)
from tests.reference.published_maxgram import published as published_maxgram
from tests.support.prompts import padded
from tests.support.tiny_models import near, tiny_llama

T5_BY_SIZE, T5_BY_WORK = [[5, 14, 10], [0, 1, 10], [0, 0, 10]], [[5, 8, 10], [0, 1, 10], [0, 0, 10]]


class Compared(Cascade):
    """Records its proposals, and the chains that its head drafts alone."""

    def __init__(self, *args):
        super().__init__(*args)
        self.alone, self.seen = {}, []

    def propose(self, context, sampler, plan):
        tree = super().propose(context, sampler, plan)
        levels = self.k_matrix[0][0]
        # Slots for the whole draft, which is fed to the head if it is accepted.
        plan = SimpleNamespace(depth=levels, drafting_slots=self.most + 1, grow=chain(levels).grow)
        head_tree = self.drafts[0].propose(replace(context, memory=self.alone), sampler, plan)
        pairs = zip(context.history, tree.tokens[:, 1:].tolist(), head_tree.tokens[:, 1:].tolist(), strict=True)
        self.seen.append([(list(text), drafted, head) for text, drafted, head in pairs])
        return tree


@pytest.fixture(scope="module", params=["medusa", "hydra", "eagle3", "parallel", "dflash"])
def headed(request):
    dflash = {"sample_from_anchor": False, "causal": False, "markov_rank": 0}
    kind, options = ("parallel", dflash) if request.param == "dflash" else (request.param, {})
    return convert(tiny_llama(num_hidden_layers=3), kind, **options)


@pytest.mark.parametrize("leniency", [1, 1e30])
@pytest.mark.sampled(3)
def test_a_head_reviews_ngrams_and_they_continue_after_it(headed, leniency):
    """At leniency 1 it drafts as alone, at the largest it accepts every n-gram. After its tokens n-grams continue."""
    inputs = padded([[5, 6, 7, 8, 5, 6], [20, 21, 20, 21, 20, 21, 20]])
    drafter = Compared([headed.head, MaxGram(6)], [[3, 4], [0, 6]], leniency)
    options = {"do_sample": False, "max_new_tokens": 40}
    out = headed.generate(**inputs, draft=drafter, **options)
    assert torch.equal(out, headed.base.generate(**inputs, **options))
    proposals = [row for step in drafter.seen[:-8] for row in step]
    assert len(proposals) > 10
    copied = 0
    for text, drafted, head in proposals:
        run = published_maxgram(text, 7, [0] * 97)
        if leniency == 1:
            assert drafted[:3] == head
            run = head + published_maxgram(text + head, 4, [0] * 97)
        elif not run:
            continue
        copied += len(run) == 7
        assert drafted[: len(run)] == run
    assert copied > 5
    passes = len(drafter.seen) * (1 if headed.head.fixed_depth else 3)
    assert passes - 6 <= drafter.reviews[0] <= passes  # fewer at the length limit


class Unchanged(LogitsProcessor):
    """Of a kind that is not known, so that the first step waits to see whether it keeps state."""

    def __call__(self, input_ids, scores):
        return scores


def test_a_head_reads_what_a_step_without_drafts_leaves(headed):
    """It drafts as it would alone, though the step that came with the prompt was not to draft."""
    inputs = padded([[5, 6, 7, 8, 5, 6], [20, 21, 20, 21, 20, 21, 20]])
    drafter = Compared([headed.head, MaxGram(6)], [[3, 4], [0, 6]])
    options = {"do_sample": False, "max_new_tokens": 30, "logits_processor": LogitsProcessorList([Unchanged()])}
    out = headed.generate(**inputs, draft=drafter, **options)
    assert torch.equal(out, headed.base.generate(**inputs, **options))
    first, *others = drafter.seen
    assert not any(drafted for _, drafted, _ in first)
    compared = [(drafted[:3], head) for step in others[:-8] for _, drafted, head in step]
    assert len(compared) > 10 and all(drafted == head for drafted, head in compared)


def test_ngrams_draft_again_after_a_token_of_a_lenient_head():
    """Compared with a loop over Medusa's distributions, which do not depend on what is drafted."""
    model, leniency = convert(tiny_llama(num_hidden_layers=3, initializer_range=0.2), "medusa"), 25
    inputs, probs, kinds = padded([[5, 6, 7, 8, 5, 6, 7, 8, 5]]), [], set()

    class Checking(Cascade):
        def propose(self, context, sampler, plan):
            text, head = list(context.history[0]), self.drafts[0]
            newest = context.newest(context.features)
            probs[:] = [head.draft_logits(block(newest), i)[0].softmax(-1) for i, block in enumerate(head.blocks)]
            drafted = super().propose(context, sampler, plan).tokens[0, 1:].tolist()
            expected, run = [], []
            for p in probs[:4]:
                run = run or published_maxgram(text + expected, 6, [0] * 97)
                best = int(p.argmax())
                if run and (run[0] == best or p[run[0]] > 1 / leniency):
                    kinds.add("lenient" if run[0] != best else "agreed")
                    expected.append(run.pop(0))
                else:
                    kinds.add("rejected" if run else "own")
                    expected, run = [*expected, best], []
            run = run or published_maxgram(text + expected, 6, [0] * 97)
            length = min(6, context.target.limit - len(text) - 1)
            assert drafted == (expected + run)[:length]
            return DraftTree.chains(context.root, [drafted])

    options = {"do_sample": False, "max_new_tokens": 30}
    out = model.generate(**inputs, draft=Checking([model.head, MaxGram(6)], [[4, 2], [0, 6]], leniency), **options)
    assert torch.equal(out, model.base.generate(**inputs, **options))
    assert {"lenient", "rejected"} <= kinds


@pytest.mark.sampled(3)
def test_a_head_a_model_and_ngrams_match_greedy(headed):
    base, inputs = headed.base, padded([[31], [5, 6, 7, 8, 9]])
    options = {"do_sample": False, "max_new_tokens": 16}
    for leniency in (1, 2):
        for drafts, k_matrix in [
            ([headed.head, DraftModel(near(base)), PromptLookup(4)], [[3, 4, 2], [0, 3, 2], [0, 0, 4]]),
            ([headed.head], [[3]]),
        ]:
            out = headed.generate(**inputs, draft=Cascade(drafts, k_matrix, leniency), **options)
            assert torch.equal(out, base.generate(**inputs, **options))
