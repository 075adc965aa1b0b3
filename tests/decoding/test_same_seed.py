"""A seed gives the text of plain decoding, whatever drafts a point mass: in batches, with and without processors."""

import resource

import pytest
import torch

import specheads
from specheads import DraftModel, DynamicTree, MaxGram, PromptLookup, StaticTree, chain
from tests.support.prompts import padded
from tests.support.tiny_models import repetitive_model

PROMPTS = padded([[7, 8, 9, 7, 8], [31], [5, 5, 60, 61, 5, 5, 60]])
OPTIONS = {"do_sample": True, "max_new_tokens": 40, "pad_token_id": 0, "eos_token_id": 96}
HEADED = specheads.convert(repetitive_model("Llama"), "medusa", num_heads=3)
DRAFTS = {
    "lookup": {"draft": PromptLookup(4)},
    "max-gram": {"draft": MaxGram(6)},
    "head, static": {"draft": HEADED.head, "tree": StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0)))},
    "head, dynamic": {"draft": HEADED.head, "tree": DynamicTree(8, 3, 3)},
    "head, chain": {"draft": HEADED.head, "tree": chain(3)},
    "its own draft model": {"draft": DraftModel(HEADED.base), "tree": StaticTree(((0,), (1,), (2,), (0, 0), (1, 0)))},
}


@pytest.mark.parametrize("processors", [{}, {"top_p": 0.8, "temperature": 1.3}, {"repetition_penalty": 1.2}], ids=str)
@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.sampled(4)
def test_a_seed_gives_the_text_of_plain_decoding(name, processors):
    for seed in (0, 1):
        options = {**PROMPTS, **OPTIONS, **processors, "seed": seed}
        plain = specheads.generate(HEADED.base, **options)
        out = specheads.generate(HEADED.base, **options, **DRAFTS[name], return_dict_in_generate=True)
        assert torch.equal(out.sequences, plain)
        accepted = sum(sum(step.accepted) for step in out.steps)
        assert accepted > 0 or name != "its own draft model"


def test_a_limit_that_no_text_reaches_takes_no_memory_and_leaves_a_seeds_text():
    length, before = 1100, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def stop(ids, scores, **kwargs):
        return ids.shape[1] >= length

    given = {**padded([[7, 8, 9, 7, 8]]), "do_sample": True, "pad_token_id": 0, "eos_token_id": None, "seed": 4}
    near, far = (
        specheads.generate(HEADED.base, **given, **limit, draft=draft)
        for limit, draft in (
            ({"max_length": length}, None),
            ({"max_new_tokens": 3 * 10**7, "stopping_criteria": [stop]}, "lookup:3"),
        )
    )
    assert torch.equal(near, far)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


def test_another_seed_gives_another_text():
    texts = [specheads.generate(HEADED.base, **PROMPTS, **OPTIONS, seed=seed) for seed in (0, 1)]
    assert texts[0].shape != texts[1].shape or not torch.equal(*texts)
