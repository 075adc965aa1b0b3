"""Models that accelerate offloads as a whole: between calls their weights are on meta, and they decode as in memory."""

import copy

import torch
from accelerate import cpu_offload

import specheads
from specheads import DraftModel
from tests.reference.slow_heads import shallow_spec_model
from tests.support.families import RECURRENT, build
from tests.support.prompts import PROMPTS, padded
from tests.support.seq2seq_models import tiny_t5
from tests.support.tiny_models import near

OPTIONS = {"max_new_tokens": 10, "do_sample": False}
TEXTS = {
    "head": lambda base, model: model.generate(**padded(PROMPTS), **OPTIONS, draft="head"),
    "new head": lambda base, model: specheads.convert(base, "medusa").generate(**padded(PROMPTS), **OPTIONS),
    "draft model": lambda base, model: specheads.generate(base, **padded(PROMPTS), **OPTIONS, draft=DraftModel(base)),
    "many": lambda base, model: [one.tokens for one in model.generate_many(PROMPTS, **OPTIONS)],
    "loss": lambda base, model: model(torch.tensor(PROMPTS[-1:]), labels=torch.tensor(PROMPTS[-1:])).loss,
}  # fmt: skip


def offloaded(model):
    model = copy.deepcopy(model)
    cpu_offload(getattr(model, "base", model), execution_device=torch.device("cpu"))
    return model


def test_an_offloaded_base():
    for what in TEXTS:
        models = [shallow_spec_model("eagle3"), offloaded(shallow_spec_model("eagle3"))]
        expected, found = [TEXTS[what](model.base, model.eval()) for model in models]
        assert torch.equal(found, expected) if isinstance(expected, torch.Tensor) else found == expected


def test_an_offloaded_encoder_decoder():
    for draft in ["lookup", "small"]:
        base = tiny_t5()
        texts = []
        for model in (base, offloaded(base)):
            drafter = DraftModel(near(base, 0.02) if model is base else offloaded(near(base, 0.02)))
            found = specheads.generate_many(model, PROMPTS, **OPTIONS, draft=drafter if draft == "small" else draft)
            texts.append([one.tokens for one in found])
        assert texts[0] == texts[1]


def test_an_offloaded_hybrid():
    for name in ["Qwen3-Next", "Zamba2"]:
        base = build(*RECURRENT[name])
        expected = specheads.generate(base, **padded(PROMPTS), **OPTIONS, draft="lookup")
        assert torch.equal(specheads.generate(offloaded(base), **padded(PROMPTS), **OPTIONS, draft="lookup"), expected)
