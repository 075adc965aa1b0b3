"""Decoders of `specheads bench` as text."""

import pytest
import torch

from benchmarks.engines import openvino
from specheads.bench import decoders
from specheads.bench.compare.decoder_spec import BenchSetup, Cell
from specheads.bench.compare.decoder_texts import Ours, TransformersLookup, expand, parse_decoder
from specheads.models.named import Models
from specheads.models.spec_model import SpecModel
from tests.support.races import GREEDY

pytestmark = pytest.mark.usefixtures("openvino_engine")


def test_a_text_names_a_decoder_or_what_drafts_with_its_tree_and_rule():
    assert parse_decoder("transformers-lookup:5") == TransformersLookup(5)
    assert parse_decoder("plain") == Ours(None)
    assert parse_decoder("eagle3 tree=chain:5 accept=fuzzy:js:0.2") == Ours("eagle3", "chain:5", "fuzzy:js:0.2")
    assert parse_decoder("model:a/b:c tree=dynamic:12,4,4") == Ours("model:a/b:c", "dynamic:12,4,4")
    assert parse_decoder("plain refill") == Ours(None, refill=True)
    cascade = Ours("cascade:model:m+maxgram", k_matrix="[[5, 8], [0, 8]]", leniency=2.0)
    assert parse_decoder("cascade:model:m+maxgram k=[[5,8],[0,8]] leniency=2") == cascade
    assert parse_decoder("cascade:lookup+maxgram") == Ours("cascade:lookup+maxgram")  # with the usual matrix
    assert parse_decoder("openvino:16:out/head:4:2") == openvino.OpenVINO(16, "out/head", 4, 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names nothing"),
        ("eagle3 tree=bush", "bush"),
        ("eagle3 accept=never", "never"),
        ("eagle3 trees=chain:5", "did you mean 'tree'"),
        ("eagle3 fast", "'fast' is none of tree=…, accept=…, compile, auto and refill"),
        ("eagle3 compile=false", "'compile=false': compile takes no value"),  # it was compiled
        ("eagle3 tree=chain:3 tree=chain:5", "given twice"),
        ("plain tree=chain:5", "plain drafts nothing"),
        ("eagle3 auto tree=chain:5", "auto chooses the tree"),
        ("'eagle3", "quotation"),
        ("transformers tree=chain:5", "tree"),
        ("transformers-lookup:many", "many"),
        ("cascade:model:m+maxgram leniency=2", "goes with k=…"),
        ("cascade:model:m+maxgram k=[[5,8]", "is not a matrix"),
        ("lookup k=[[5]]", "unknown word 'k'"),
        ("lookup accept=fuzzy:js:0.1", "lookup gives none"),
        ("openvino:5", "expected openvino, openvino:NUM_TOKENS:HEAD"),
    ],
)
def test_a_text_that_names_none_is_refused_with_itself(text, said):
    with pytest.raises(ValueError, match=r"^decoder ") as error:
        parse_decoder(text)
    assert repr(text) in str(error.value) and said in str(error.value) and "\n" not in str(error.value)


def test_trees_and_rules_multiply_what_names_none():
    assert expand(["transformers", "plain", "eagle3", "lookup tree=chain:2"], ["chain:3", "chain:5"], ["typical"]) == [
        "transformers", "plain", "eagle3 tree=chain:3", "eagle3 tree=chain:3 accept=typical", "eagle3 tree=chain:5",
        "eagle3 tree=chain:5 accept=typical", "lookup tree=chain:2", "lookup tree=chain:2 accept=typical",
    ]  # fmt: skip
    rules = ["fuzzy:js,tv:0.1,0.2", "exact", "fuzzy:js:0.1"]
    assert expand(["head"], [], rules) == [
        "head", *(f"head accept=fuzzy:{kind}:{t}" for kind in ("js", "tv") for t in ("0.1", "0.2")),
    ]  # fmt: skip


def test_compiled_decoders_ask_generate_for_it(monkeypatch):
    asked = {}
    monkeypatch.setattr(decoders, "specheads_generate", lambda *args, **options: asked.update(options))
    setup = BenchSetup(Models(None, None), None, 4, 4, {})
    parse_decoder("plain compile").build(setup, Cell("p", 1, 0.8))
    assert asked["compile"] is True and asked["temperature"] == 0.8
    parse_decoder("plain").build(setup, GREEDY)
    asked.clear()
    parse_decoder("plain").build(setup, GREEDY)
    assert "compile" not in asked and asked["do_sample"] is False


def test_auto_asks_the_models_own_generate_for_it(monkeypatch, setup):
    original, asked = SpecModel.generate, []

    def generate(self, inputs=None, *, draft, **options):
        asked.append(draft)
        return original(self, inputs, draft="head", **options)

    monkeypatch.setattr(SpecModel, "generate", generate)
    batch = {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.ones(1, 2)}
    auto = parse_decoder("eagle3 auto").build(setup, GREEDY)(batch, None)
    assert asked == ["auto"] and auto.tokens == parse_decoder("eagle3").build(setup, GREEDY)(batch, None).tokens
    with pytest.raises(ValueError, match="auto takes a head, and 'lookup' is none"):
        parse_decoder("lookup auto").build(setup, GREEDY)
    assert expand(["eagle3", "eagle3 auto"], ["chain:3"]) == ["eagle3 tree=chain:3", "eagle3 auto"]
