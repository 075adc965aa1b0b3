"""The model `specheads` of lm-evaluation-harness, on a stand-in for the harness's own class."""

import importlib
import sys

import pytest
import torch

import specheads
from tests.support import lm_eval_stand_in
from tests.support.lm_eval_stand_in import HFLM, PROMPTS


@pytest.fixture
def harness(monkeypatch):
    yield lm_eval_stand_in.install(monkeypatch)
    lm_eval_stand_in.forget()


def test_answers_are_those_of_hf_in_fewer_steps(harness, shipped):
    base, head = shipped / "base", str(shipped / "eagle3")
    expected = HFLM(base).generate_until(PROMPTS)
    given = {
        "copies": {}, "automatic": {"head": head}, "a chain": {"head": head, "tree": "chain:3"},
        "copies beside a head": {"head": head, "draft": "lookup"}, "the base itself": {"draft": f"model:{base}"},
    }  # fmt: skip
    for name, options in given.items():
        drafted = harness.module.DraftedLM(base, **options)
        assert torch.equal(drafted.generate_until(PROMPTS), expected), name
        count = drafted.statistics
        assert count["tokens"] >= count["row_steps"] > 0, name
    assert count["tokens"] > 1.5 * count["row_steps"]  # what it drafts for itself is accepted
    plain = drafted.model.generate(drafted.tokenizer(PROMPTS[0], return_tensors="pt").input_ids, max_new_tokens=2)
    assert isinstance(plain, torch.Tensor)  # a call of the harness that asks for no drafts is the model's own


def test_what_cannot_draft_is_refused_by_name(harness, shipped, monkeypatch):
    with pytest.raises(ValueError, match=r"unknown draft= without head= 'head'"):
        harness.module.DraftedLM(shipped / "base", draft="head")
    monkeypatch.setattr(
        HFLM, "__init__", lambda self, source: setattr(self, "model", specheads.SpecModel.from_pretrained(source))
    )
    with pytest.raises(ValueError, match=r"is a draft head; give pretrained=BASE and head="):
        harness.module.DraftedLM(shipped / "medusa")


def test_the_command_is_the_harnesss_own_with_one_model_more(harness):
    harness.module.main()
    assert harness.registered == {"specheads": "specheads.compat.harness:DraftedLM"} and harness.ran == 1
    where, _, name = harness.registered["specheads"].partition(":")
    assert getattr(importlib.import_module(where), name) is harness.module.DraftedLM


def test_without_the_harness_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    lm_eval_stand_in.forget()
    with pytest.raises(ImportError, match="pip install 'lm_eval"):
        importlib.import_module("specheads.compat.harness")
