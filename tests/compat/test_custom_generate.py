"""examples/hub as transformers loads it: custom_generate of a call, in a pipeline and in a model's repository."""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer, pipeline

import specheads
from tests.support.markdown import blocks
from tests.support.paths import ROOT

REPOSITORY = ROOT / "examples" / "hub"
GREEDY = {"max_new_tokens": 24, "do_sample": False}
PROMPT = "def f(x): return x\n" * 3


@pytest.fixture(autouse=True)
def modules_in_tmp(tmp_path, monkeypatch):
    """Where transformers copies the code that it loads."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))


@pytest.fixture(scope="module")
def base(shipped):
    return AutoModelForCausalLM.from_pretrained(shipped / "base")


@pytest.fixture(scope="module")
def tokenizer(shipped):
    return AutoTokenizer.from_pretrained(shipped / "base")


def test_a_call_drafts_and_gives_the_models_own_text(base, tokenizer, shipped):
    inputs = tokenizer(PROMPT, return_tensors="pt")
    expected = base.generate(**inputs, **GREEDY)
    ours = {"custom_generate": str(REPOSITORY), "trust_remote_code": True, "return_dict_in_generate": True, **GREEDY}
    copies = base.generate(**inputs, **ours, draft="lookup")
    head = base.generate(**inputs, **ours, draft=str(shipped / "eagle3"), tree="chain:3")
    for out in (copies, head):
        assert torch.equal(out.sequences, expected)
        assert max(step.drafted[0] for step in out.steps) > 0, "nothing was drafted"
    assert max(step.drafted[0] for step in head.steps) == 3
    with pytest.raises(ValueError, match="lookupp"):
        base.generate(**inputs, **ours, draft="lookupp")


def test_a_repository_that_holds_it_drafts_by_default(base, tokenizer, shipped, tmp_path):
    shutil.copytree(shipped / "base", tmp_path / "model")
    shutil.copytree(REPOSITORY / "custom_generate", tmp_path / "model" / "custom_generate")
    inputs = tokenizer(PROMPT, return_tensors="pt")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=True)
    out = loaded.generate(**inputs, **GREEDY, return_dict_in_generate=True)
    assert torch.equal(out.sequences, base.generate(**inputs, **GREEDY))
    assert isinstance(out, specheads.SpecGenerateOutput)


@pytest.mark.parametrize("drafts", ["custom_generate", "head"])
def test_a_pipeline_streams_drafted_text(base, tokenizer, shipped, drafts):
    """Text comes before the end, in pieces, and is that of the base's own pipeline."""
    model, options = base, {"custom_generate": str(REPOSITORY), "trust_remote_code": True, "draft": "lookup"}
    if drafts == "head":
        model, options = specheads.load_head(base, shipped / "eagle3"), {}
    (own,) = pipeline("text-generation", model=base, tokenizer=tokenizer)(PROMPT, return_full_text=False, **GREEDY)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=5)
    pieces, put = [], streamer.put
    streamer.put = lambda ids: pieces.append(len(ids.flatten())) or put(ids)
    (said,) = pipeline("text-generation", model=model, tokenizer=tokenizer)(
        PROMPT, streamer=streamer, return_full_text=False, **GREEDY, **options
    )
    streamed = list(streamer)
    assert said == own and "".join(streamed).rstrip() == own["generated_text"].rstrip()
    assert pieces[0] == len(tokenizer(PROMPT)["input_ids"]) and 3 < len(pieces) <= 25 and sum(pieces[1:]) == 24


def test_its_card_runs(shipped, tmp_path, monkeypatch, capsys):
    (tmp_path / "checkpoints").symlink_to(shipped)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for block in blocks((REPOSITORY / "README.md").read_text("utf8"), "python"):
        exec(block, {})
    assert capsys.readouterr().out.startswith("class Queue:")
