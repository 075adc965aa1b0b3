"""Compiled steps: what the host has a part in stays outside the graph, and what cannot be compiled is decoded without.

The backend "eager" traces as torch's own does, with no graph break allowed, and runs the operations as they are.
"""

import re
from copy import copy
from types import SimpleNamespace

import pytest
import torch

from specheads import (
    AdaptiveChain,
    DraftModel,
    NGram,
    PromptLookup,
    SampledTree,
    Typical,
    chain,
    generate,
    generate_many,
)
from specheads.decoding.compiled import compiled_steps
from specheads.decoding.compiled.graphs import reason_not_compiled
from specheads.decoding.verify.causal import Target
from specheads.decoding.verify.model_inputs import ModelInputs
from tests.reference.slow_heads import shallow_spec_model as spec_model
from tests.support.compiled_texts import DRAWING, endless, fresh_dynamo, texts_of  # noqa: F401
from tests.support.families import FAMILIES, RECURRENT
from tests.support.paths import ROOT
from tests.support.prompts import PROMPTS, padded
from tests.support.tiny_models import near, tiny_llama


def compatibility():
    """What docs/compatibility.md says of compiled steps."""
    text = (ROOT / "docs" / "compatibility.md").read_text()
    return text.partition("## The compiled step\n")[2].partition("\n## ")[0]


def test_the_documentation_lists_the_families_that_compile():
    listed = compatibility().split("\n\n")[1]
    assert " ".join(listed.split()) == "; ".join(FAMILIES | RECURRENT) + "."


def test_the_documentation_lists_the_reasons_why_others_do_not():
    target = Target(tiny_llama(num_hidden_layers=2), static=True)
    target.inputs = ModelInputs()
    spread = SimpleNamespace(hf_device_map={"model.layers.0": 0, "model.layers.1": 1})
    cases = [
        {"is_encoder_decoder": True}, {"switch": object()},
        {"inputs": ModelInputs(token_types=torch.zeros(1, 3))}, {"base": spread},
    ]  # fmt: skip
    rows = re.findall(r"^\| .* \| (.*) \|$", compatibility(), re.MULTILINE)[1:]
    assert reason_not_compiled(target) is None
    for row, case in zip(rows, cases, strict=True):
        other = copy(target)
        vars(other).update(case)
        assert reason_not_compiled(other).partition(" (")[0] == row


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("draft", "tree", "accept", "functions"),
    [
        (PromptLookup(3), None, None, {"step_after_draft"}),
        (PromptLookup(3, width=2), None, None, {"step_after_draft"}),
        (NGram(2), None, None, {"step_after_draft"}),
        ("small", AdaptiveChain(4), None, {"step_after_draft"}),
        ("small", SampledTree((2, 1)), None, {"verify"}),
        ("small", AdaptiveChain(4), Typical(), {"step_after_draft"}),
        ("small", AdaptiveChain(4), "fuzzy:js:0.3", {"step_after_draft"}),
        ("small", AdaptiveChain(4, sampled=True), "block", {"step_after_draft"}),
        (PromptLookup(3), chain(3), "lenient:0.5", {"step_after_draft"}),
        ("small", chain(3), "fuzzy:random:0.3", {"verify"}),
        (None, None, None, {"whole_step"}),
    ],
)
def test_what_the_host_has_a_part_in_is_left_out_of_the_graph(draft, tree, accept, functions):
    base = tiny_llama(num_hidden_layers=1)
    draft = DraftModel(near(base)) if draft == "small" else draft
    for sampling in ({"seed": 4}, {"do_sample": True, "top_k": 20, "seed": 4}):
        if accept or tree:
            sampling |= {"tree": tree, "accept": accept}
        without, compiled = texts_of(base, padded(PROMPTS), draft=draft, **sampling)
        assert compiled == without
    assert {function.__name__ for function, _ in compiled_steps(base, "eager")._known} == functions


def test_processors_that_read_the_prefix_stay_outside():
    model = spec_model("eagle3")
    without, compiled = texts_of(model, padded(PROMPTS), draft="head", repetition_penalty=1.3, no_repeat_ngram_size=2)
    assert compiled == without
    assert [function.__name__ for function, _ in compiled_steps(model.base, "eager")._known] == ["verify"]


def test_what_cannot_be_compiled_is_decoded_without_after_one_warning(hf_log):
    def broken(graph, inputs):
        raise OSError("no compiler")

    base = tiny_llama(num_hidden_layers=1)
    steps = compiled_steps(base, "eager")
    steps.backend = broken
    for draft in (None, PromptLookup(3)):
        without, compiled = texts_of(base, padded(PROMPTS), draft=draft)
        assert compiled == without
    assert "no compiler" in steps.failure
    assert len(steps) == 0
    assert sum("without" in record.message for record in hf_log.records) == 1


def test_a_backend_that_torch_does_not_have_is_refused_and_one_that_was_registered_is_taken():
    base, options = tiny_llama(num_hidden_layers=1), {**padded(PROMPTS[:1]), "max_new_tokens": 4, "do_sample": False}
    for call in (generate, generate_many):
        given = options if call is generate else {"prompts": PROMPTS[:1], "max_new_tokens": 4}
        with pytest.raises(
            ValueError, match=r"^unknown backend of torch\.compile 'inductr'; did you mean 'inductor'\?$"
        ):
            call(base, **given, compile="inductr")
    torch._dynamo.register_backend(lambda graph, inputs: graph.forward, name="of_ours")
    compiled = generate(base, **options, compile="of_ours")
    assert torch.equal(compiled, generate(base, **options)) and len(compiled_steps(base, "of_ours")) == 1


def test_a_wrong_call_fails_as_it_does_without():
    model = spec_model("medusa", num_heads=3)
    ids = torch.tensor([PROMPTS[0]])
    with pytest.raises(ValueError, match="a tree 4 deep needs as many Medusa heads"):
        model.generate(ids, tree=chain(4), max_new_tokens=12, compile="eager")


def test_a_model_whose_positions_change_with_the_length_is_decoded_without(hf_log):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    base = tiny_llama(num_hidden_layers=1, rope_parameters=rope, max_position_embeddings=24)
    without, compiled = texts_of(base, padded(PROMPTS), draft=PromptLookup(3), max_new_tokens=30)
    assert compiled == without
    assert "positions change with the length" in hf_log.text
