"""docs/coming-from.md: every block of ours runs as it is written, section by section, with tiny models in scope."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import specheads
from tests.support.markdown import blocks
from tests.support.paths import ROOT
from tests.support.tiny_models import near, tiny_llama
from tests.support.two_vocabularies import TARGET

TEXT_OF = (ROOT / "docs" / "coming-from.md").read_text("utf8")
SECTIONS = dict(section.split("\n", 1) for section in TEXT_OF.split("\n## ")[1:])


@pytest.mark.parametrize("name", SECTIONS)
def test_what_it_shows_of_ours_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    target = tiny_llama(
        vocab_size=len(TARGET), num_hidden_layers=4, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )  # fmt: skip
    target.save_pretrained("base")
    target.name_or_path = target.config.name_or_path = str(tmp_path / "base")
    inputs = TARGET("def main(", return_tensors="pt")
    Path("bigrams.json").write_text(json.dumps([0] * len(TARGET)))
    rows = [{"input_ids": inputs.input_ids[0], "labels": inputs.input_ids[0]}] * 2
    scope = {
        "target": target, "small": near(target), "tokenizer": TARGET, "inputs": inputs, "specheads": specheads,
        "Trainer": Trainer, "rows": rows, "collator": specheads.Collator(TARGET.pad_token_id),
        "arguments": TrainingArguments("trained", max_steps=1, report_to=[], save_strategy="no", use_cpu=True),
    }  # fmt: skip
    greedy = target.generate(**inputs, max_new_tokens=40, do_sample=False)
    ours, theirs = blocks(SECTIONS[name], "python"), blocks(SECTIONS[name], "py")
    assert ours and len(theirs) == 1
    for block in ours:
        exec(block, scope)
        if "output" in scope:
            output = scope.pop("output")
            if name.startswith("Fuzzy") or "do_sample" in block:
                assert output.shape[1] <= greedy.shape[1]
            else:
                assert torch.equal(output, greedy)
        assert 0 <= scope.get("alpha", 0) <= 1 <= scope.get("acceptance_rate", 1) <= 3
    AutoModelForCausalLM.register(specheads.SpecConfig, specheads.SpecModel, exist_ok=True)  # as before ModelOpt's


def test_ours_is_theirs_with_other_imports():
    """So that a script ports by them: of these examples not a line after the imports differs."""

    def body(block):
        return [line for line in block.splitlines() if line and not line.startswith(("import ", "from "))]

    for name in ("Speculative-Decoding (romsto)", "Cascade Speculative Drafting", "Model Optimizer (speculative)"):
        assert body(blocks(SECTIONS[name], "py")[0]) == body(blocks(SECTIONS[name], "python")[0])
    name = "The notebook: a draft model with top-k sampling"
    ours = body(blocks(SECTIONS[name], "python")[0])
    assert ours == [
        "set_models(target, small)",
        "logits = target(**inputs).logits",
        *body(blocks(SECTIONS[name], "py")[0]),
    ]


def test_it_covers_the_five_systems():
    assert len(SECTIONS) == 5
