"""lm-evaluation-harness as far as our model for it needs it: its class `hf`, its table of models, its command.

The harness is no dependency of the tests: it brings some forty packages. The stand-in calls generate() as version
0.4.13 does.
"""

import importlib
import sys
from types import ModuleType, SimpleNamespace

from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteriaList

import specheads.compat

MODULE = "specheads.compat.harness"
PROMPTS = ["def f(x): return x\n" * 2, "class A:\n" * 4]


class HFLM:
    """What `hf` is to its subclasses."""

    def __init__(self, pretrained, dtype="auto", device="cpu", batch_size=1):
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


def simple_evaluate(model, tasks, limit):
    answers = model.generate_until(PROMPTS)
    samples = [{"resps": row} for row in answers.tolist()]
    return {"samples": {tasks[0]: samples}, "results": {tasks[0]: {"exact_match": 0.0}}}


def install(monkeypatch):
    """Put it in place of the harness. Returns what gets registered and how often the command ran."""
    calls = SimpleNamespace(registered={}, ran=0)
    registry = SimpleNamespace(register=lambda name, target: calls.registered.update({name: target}))
    for name, contents in {
        "lm_eval": {"simple_evaluate": simple_evaluate},
        "lm_eval.models": {},
        "lm_eval.models.huggingface": {"HFLM": HFLM},
        "lm_eval.api": {},
        "lm_eval.api.registry": {"model_registry": registry},
        "lm_eval.__main__": {"cli_evaluate": lambda: setattr(calls, "ran", calls.ran + 1)},
    }.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    forget()
    calls.module = importlib.import_module(MODULE)
    return calls


def forget():
    """Leave no class on the stand-in to later tests."""
    sys.modules.pop(MODULE, None)
    vars(specheads.compat).pop("harness", None)
