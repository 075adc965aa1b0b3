"""docs/extending.md: what it adds from outside is registered, named by its text, and decodes."""

import pytest
import torch

import specheads
from specheads.bench.compare.decoder_texts import expand
from specheads.decoding.acceptance import RULES
from specheads.decoding.drafters import DRAFTERS
from specheads.decoding.planner import PLANS
from specheads.heads import HEADS
from specheads.models import export_checks
from specheads.models.formats import FORMATS
from tests.support.markdown import blocks
from tests.support.paths import ROOT
from tests.support.tiny_models import tiny_llama
from tests.support.two_vocabularies import TARGET

SECTIONS = dict(
    section.split("\n", 1) for section in (ROOT / "docs" / "extending.md").read_text("utf8").split("\n## ")[1:]
)


@pytest.fixture
def registries():
    """As they were, after each test."""
    dicts = (RULES, DRAFTERS, PLANS, HEADS)
    before, formats = [dict(one) for one in dicts], list(FORMATS)
    yield
    for one, entries in zip(dicts, before, strict=True):
        one.clear()
        one.update(entries)
    FORMATS[:] = formats


@pytest.fixture
def scope():
    """What the document says is there."""
    torch.manual_seed(0)
    target = tiny_llama(vocab_size=len(TARGET), pad_token_id=0, bos_token_id=1, eos_token_id=2)
    inputs = TARGET("def main(", return_tensors="pt")
    return {
        "specheads": specheads, "target": target, "tokenizer": TARGET, "inputs": inputs,
        "rows": [{"input_ids": inputs.input_ids[0], "labels": inputs.input_ids[0]}] * 2,
        "collator": specheads.Collator(TARGET.pad_token_id),
        "arguments": specheads.SpecTrainingArguments(
            "trained", max_steps=1, report_to=[], save_strategy="no", use_cpu=True
        ),
    }  # fmt: skip


def test_what_the_document_adds_decodes(registries, scope, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    greedy = scope["target"].generate(**scope["inputs"], max_new_tokens=20, do_sample=False)
    outputs = {}
    for name, section in SECTIONS.items():
        (block,) = blocks(section, "python")
        exec(block, scope)
        outputs[name] = scope.pop("output")
    assert len(outputs) == 5
    for name, output in outputs.items():
        assert output.shape == greedy.shape
        assert name == "An acceptance rule" or torch.equal(output, greedy), name

    assert RULES.write(RULES.build("at_least:0.3")) == "at_least:0.3" and "at_least[:FLOOR]" in RULES.expected
    texts = expand(["repeat:4"], ["fork:3"], ["at_least:0.2,0.4"])
    assert texts[1:] == [f"repeat:4 tree=fork:3 accept=at_least:{floor}" for floor in (0.2, 0.4)]
    with pytest.raises(ValueError, match=r"'at_least:2': floor=2\.0 must be a probability"):
        specheads.generate(scope["target"], **scope["inputs"], draft="repeat", accept="at_least:2")
    assert PLANS.build("fork:3").num_nodes == 7 and PLANS.usage("fork") == "fork:DEPTH[,WIDTH]"
    weights = zip(scope["model"].head.state_dict().values(), scope["again"].head.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in weights)
    assert export_checks.check(tmp_path / "served", scope["model"]).startswith(
        "not checked: transformers reads no such"
    )


def test_a_floor_of_1_rejects_every_draft_and_one_of_0_none(registries, scope):
    (block,) = blocks(SECTIONS["An acceptance rule"], "python")
    exec(block, scope)
    accepted = {}
    for floor in (0, 1):
        output = specheads.generate(
            scope["target"], **scope["inputs"], draft="lookup", accept=f"at_least:{floor}", max_new_tokens=20,
            return_dict_in_generate=True,
        )  # fmt: skip
        accepted[floor] = sum(sum(step.accepted) for step in output.steps)
    assert accepted[1] == 0 < accepted[0]
