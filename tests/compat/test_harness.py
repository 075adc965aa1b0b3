"""The model `specheads` of lm-evaluation-harness, on a stand-in for the harness's own class.

The harness is no dependency of the tests: it brings some forty packages. The stand-in calls generate() as version
0.4.13 does.
"""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteriaList

import specheads

PROMPTS = ["def f(x): return x\n" * 2, "class A:\n" * 4]


class HFLM:
    """What `hf` is to its subclasses."""

    def __init__(self, pretrained, dtype="auto"):
        self.model = AutoModelForCausalLM.from_pretrained(pretrained, dtype=dtype)
        self.tokenizer = AutoTokenizer.from_pretrained(pretrained, padding_side="left")

    def _model_generate(self, context, max_length, stop, **generation_kwargs):
        if generation_kwargs.get("temperature", 0.0) == 0.0:
            generation_kwargs["do_sample"] = False
        return self.model.generate(
            input_ids=context, max_length=max_length, pad_token_id=self.tokenizer.pad_token_id, use_cache=True,
            stopping_criteria=StoppingCriteriaList(), **generation_kwargs,
        )  # fmt: skip

    def generate_until(self, requests):
        encoded = self.tokenizer(requests, return_tensors="pt", padding=True)
        ids, mask = encoded["input_ids"], encoded["attention_mask"]
        return self._model_generate(ids, ids.shape[1] + 20, ["\n\n"], attention_mask=mask)


@pytest.fixture
def harness(monkeypatch):
    """specheads.compat.harness over the stand-in, and what was registered and run."""
    calls = SimpleNamespace(registered={}, ran=0)
    monkeypatch.setitem(sys.modules, "lm_eval", ModuleType("lm_eval"))
    for name, contents in {
        "lm_eval.models": {},
        "lm_eval.models.huggingface": {"HFLM": HFLM},
        "lm_eval.api": {},
        "lm_eval.api.registry": {
            "model_registry": SimpleNamespace(register=lambda name, target: calls.registered.update({name: target}))
        },
        "lm_eval.__main__": {"cli_evaluate": lambda: setattr(calls, "ran", calls.ran + 1)},
    }.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "specheads.compat.harness", raising=False)
    module = importlib.import_module("specheads.compat.harness")
    yield SimpleNamespace(module=module, calls=calls)
    sys.modules.pop("specheads.compat.harness", None)
    vars(specheads.compat).pop("harness", None)


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
    assert harness.calls.registered == {"specheads": "specheads.compat.harness:DraftedLM"} and harness.calls.ran == 1
    where, _, name = harness.calls.registered["specheads"].partition(":")
    assert getattr(importlib.import_module(where), name) is harness.module.DraftedLM


def test_without_the_harness_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "specheads.compat.harness", raising=False)
    with pytest.raises(ImportError, match="pip install 'lm_eval"):
        importlib.import_module("specheads.compat.harness")
