"""Logits processors that mix the rows of a batch: nothing is drafted, since drafts let the rows run apart."""

import logging

import pytest
import torch
from transformers import LogitsProcessor

import specheads
from specheads import DraftModel, SampledTree
from tests.support.prompts import PAD
from tests.support.tiny_models import repetitive_model

BASE = repetitive_model("Llama")
IDS = torch.tensor([[1, 5, 6, 7, 5, 6, 7, 5, 6], [1, 9, 8, 9, 8, 9, 8, 9, 8], [3, 4, 5, 3, 4, 5, 3, 4, 5],
                    [2, 2, 7, 2, 2, 7, 2, 2, 7]])  # fmt: skip
OPTIONS = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}


class Ensemble(LogitsProcessor):
    """The mean of all prompts."""

    def __call__(self, input_ids, scores):
        return scores.log_softmax(-1).mean(0, keepdim=True).expand_as(scores)


class Declared(Ensemble):
    """What it declares is true, and it mixes rows all the same."""

    depends_on_prefix_only = True


class Guidance(LogitsProcessor):
    """Conditional and unconditional prompts in pairs (i, i + B/2)."""

    def __call__(self, input_ids, scores):
        given, free = scores.log_softmax(-1).chunk(2)
        guided = free + 1.5 * (given - free)
        return torch.cat([guided, guided])


class Others(LogitsProcessor):
    """Avoids the tokens of the next row's text."""

    def __call__(self, input_ids, scores):
        return scores.scatter_add(1, input_ids.roll(1, 0), torch.full(input_ids.shape, -3.0))


def centred(input_ids, scores):
    return scores - 0.7 * scores.mean(0, keepdim=True)


@pytest.mark.parametrize("draft", ["lookup", "draft model", "tree"])
@pytest.mark.parametrize("processor", [Ensemble(), Declared(), Guidance(), Others(), centred])
def test_a_processor_that_mixes_rows_gives_the_text_of_hugging_face(processor, draft, hf_log):
    options = {**OPTIONS, "logits_processor": [processor]}
    drafts = {
        "lookup": {"draft": "lookup"}, "draft model": {"draft": DraftModel(BASE)},
        "tree": {"draft": DraftModel(BASE), "tree": SampledTree((2, 1, 1))},
    }[draft]  # fmt: skip
    with hf_log.at_level(logging.WARNING):
        out = specheads.generate(BASE, IDS, **options, **drafts, return_dict_in_generate=True)
    assert torch.equal(out.sequences, BASE.generate(IDS, **options))
    assert out.lossless and out.statistics()["drafted"] == 0
    assert sum("mixes the rows of the batch" in record.getMessage() for record in hf_log.records) == 1


class RowByRow(LogitsProcessor):
    """Forbids each row tokens of its own, and those of its own text."""

    depends_on_prefix_only = True

    def __call__(self, input_ids, scores):
        scores = scores.scatter_add(1, input_ids, torch.full(input_ids.shape, -0.1))
        return scores.index_fill(1, torch.tensor([50]), -torch.inf) - torch.arange(len(scores)).unsqueeze(1)


def halved(input_ids, scores):
    return scores / 2


@pytest.mark.parametrize("processor", [RowByRow(), halved])
def test_one_that_treats_each_row_by_itself_is_drafted_for(processor, hf_log):
    options = {**OPTIONS, "logits_processor": [processor]}
    out = specheads.generate(BASE, IDS, **options, draft=DraftModel(BASE), return_dict_in_generate=True)
    assert torch.equal(out.sequences, BASE.generate(IDS, **options))
    assert out.statistics()["accepted"] > 10 and not hf_log.records


def test_of_many_prompts_each_is_processed_by_itself():
    options = {**OPTIONS, "logits_processor": [centred]}
    many = specheads.generate_many(BASE, IDS.tolist(), draft="lookup", batch_size=4, **options)
    for one in many:
        assert one.tokens == BASE.generate(torch.tensor([one.prompt]), **options)[0, IDS.shape[1] :].tolist()
