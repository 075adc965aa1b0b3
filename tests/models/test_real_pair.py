"""The head that ships for Qwen2.5-Coder-0.5B-Instruct: its files, and, where SPECHEADS_REAL names the folder of that
model, their text."""

import os

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specheads import SpecModel
from specheads.models.config import SpecConfig
from tests.support.paths import ROOT

HEAD = ROOT / "checkpoints" / "qwen2.5-coder-0.5b" / "eagle3"
BASE = os.environ.get("SPECHEADS_REAL", "")
QUESTIONS = (
    "Write a Python function that returns the n-th Fibonacci number without recursion.",
    "A train leaves at 9:40 and arrives at 12:05. It stops twice, for 6 minutes each. How long does it move?",
    "Explain in three sentences what a hash table is.",
)


def test_it_names_the_model_on_the_hub_and_is_small():
    config = SpecConfig.from_pretrained(HEAD)
    assert config.base_model_name_or_path == "Qwen/Qwen2.5-Coder-0.5B-Instruct"
    assert config.base_fingerprint["weights"] is None, "the published weights are not those it was trained beside"
    assert sum(path.stat().st_size for path in HEAD.parent.rglob("*")) <= 40e6
    card = (HEAD / "README.md").read_text("utf8")
    assert "license: apache-2.0" in card and "base_model: Qwen/Qwen2.5-Coder-0.5B-Instruct" in card


@pytest.mark.slow
@pytest.mark.skipif(not BASE, reason="SPECHEADS_REAL names no folder with Qwen2.5-Coder-0.5B-Instruct")
def test_beside_the_model_two_steps_give_three_tokens_and_the_text_is_its_own(hf_log):
    base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.bfloat16).eval()
    model, tokenizer = SpecModel.from_pretrained(HEAD, base=base), AutoTokenizer.from_pretrained(BASE)
    assert not [record for record in hf_log.records if record.levelname in ("WARNING", "ERROR")]
    options = {"max_new_tokens": 64, "do_sample": False, "repetition_penalty": 1.0, "return_dict_in_generate": True}
    tokens = steps = 0
    for question in QUESTIONS:
        message = [{"role": "user", "content": question}]
        inputs = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        plain = model.generate(**inputs, **options, draft=False)
        out = model.generate(**inputs, **options, draft="head", tree="chain:4")
        assert torch.equal(out.sequences, plain.sequences), question
        steps += out.statistics()["steps"]
        tokens += out.statistics()["tokens"] - 1
        assert torch.equal(model.generate(**inputs, **options).sequences, plain.sequences), "automatic drafts"
    assert tokens / steps >= 1.5, f"{tokens} tokens in {steps} steps"
