"""Caches and states are freed when a call ends, and not when Python next looks for circles: a few calls could fill a
device."""

import gc

import pytest
import torch

from specheads import DraftModel, chain, comb, generate
from tests.reference.slow_heads import shallow_spec_model as spec_model
from tests.support.families import FAMILIES, RECURRENT, build
from tests.support.prompts import PROMPTS, padded
from tests.support.seq2seq_models import tiny_t5
from tests.support.tiny_models import near, tiny_llama


def tensors_in_circles(call):
    """The shapes of tensors that only a search for circles frees after this call."""
    call()  # what is kept for later calls
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        call()
        gc.collect()
        return [tuple(one.shape) for one in gc.garbage if isinstance(one, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", FAMILIES | RECURRENT)
def test_no_cache_of_a_family_is_left(name):
    base = build(*(FAMILIES | RECURRENT)[name])
    assert tensors_in_circles(lambda: generate(base, **padded(PROMPTS), draft="lookup", max_new_tokens=6)) == []


@pytest.mark.parametrize("compile", [False, "eager"])
@pytest.mark.parametrize("kind", ["medusa", "eagle3", "parallel"])
def test_no_cache_of_a_head_is_left(kind, compile):
    model = spec_model(kind)
    for tree in (chain(3), comb(2, 2)):
        options = {"tree": tree, "max_new_tokens": 6, "compile": compile}
        assert tensors_in_circles(lambda options=options: model.generate(**padded(PROMPTS), **options)) == []


def test_no_cache_of_a_draft_model_or_an_encoder_decoder_is_left():
    base, small = tiny_llama(num_hidden_layers=2), tiny_t5()
    drafter = DraftModel(near(base))
    assert tensors_in_circles(lambda: generate(base, **padded(PROMPTS), draft=drafter, max_new_tokens=6)) == []
    ids = {"input_ids": torch.tensor([[3, 4, 5]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    assert tensors_in_circles(lambda: generate(small, **ids, draft="lookup", max_new_tokens=6)) == []


def test_a_circle_would_be_seen():
    def call():
        one = [torch.ones(7)]
        one.append(one)

    assert tensors_in_circles(call) == [(7,)]
