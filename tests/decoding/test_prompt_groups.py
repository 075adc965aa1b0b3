"""Claims about reading the prompts of a batch: those of similar lengths share a pass, and the text stays the same."""

import pytest
import torch

import specheads
from specheads.decoding.generation.many import generate_many
from specheads.decoding.verify.causal import Target
from specheads.decoding.verify.model_inputs import similar_lengths
from tests.support.families import FAMILIES, RECURRENT, build

LENGTHS = (150, 5, 90, 148, 7, 70, 66)


def test_groups_are_of_similar_lengths_and_one_where_little_is_saved():
    assert similar_lengths([634, 70, 600, 80, 36, 64, 470]) == [[0, 2], [6], [3, 1, 4, 5]]
    for lengths in ([5, 9, 60, 3], [100, 100, 90], [200]):
        assert similar_lengths(lengths) == [list(range(len(lengths)))]


@pytest.mark.parametrize("family", ["Llama", "Qwen2, sliding layers", "Gemma-3", "Qwen3.5"])
@pytest.mark.parametrize("draft", [False, "lookup", "head"])
def test_texts_of_prompts_of_all_lengths_are_those_of_each_alone(family, draft, monkeypatch):
    config, options = {**FAMILIES, **RECURRENT}[family]
    base = build(config, {**options, "max_position_embeddings": 256})
    passes = []
    read = Target._read_prompts
    monkeypatch.setattr(
        Target, "_read_prompts", lambda self, ids, *rest: (passes.append(tuple(ids.shape)), read(self, ids, *rest))[1]
    )
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 40, (n,), generator=generator).tolist() for n in LENGTHS]
    options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    drafter = specheads.convert(base, "eagle3").head if draft == "head" else draft
    alone = [generate_many(base, [prompt], draft=False, **options)[0].tokens for prompt in prompts]
    passes.clear()
    found = generate_many(base, prompts[:5], batch_size=5, draft=drafter, **options)
    assert passes == ([(5, 150)] if family == "Qwen3.5" else [(2, 150), (1, 90), (2, 7)]), "states are read at once"
    refilled = generate_many(base, prompts, batch_size=3, draft=drafter, **options)
    assert [one.tokens for one in found] == alone[:5] and [one.tokens for one in refilled] == alone
