"""Steps in code of torch's own compiler: the text is the one without compiling."""

import pytest
import torch
from torch._dynamo.utils import counters

from specheads import PromptLookup, SampledTree, comb, generate
from specheads.decoding.compiled import compiled_steps
from tests.reference.slow_heads import shallow_spec_model as spec_model
from tests.support.compiled_texts import DRAWING, endless, fresh_dynamo  # noqa: F401
from tests.support.families import FAMILIES, RECURRENT, build
from tests.support.prompts import PROMPTS, padded

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", ["Llama", "GPT-2", "Qwen3", "Mixtral", "LFM2", "Qwen3.5"])
def test_torchs_own_compiler_serves_texts_of_all_lengths_of_a_family_with_two_graphs(family):
    base, traced, before = build(*(FAMILIES | RECURRENT)[family]), [], counters["stats"]["unique_graphs"]
    for length, new in ((3, 10), (17, 24), (50, 5), (80, 30)):
        ids = (torch.arange(length) * 7 % 97).unsqueeze(0)
        for draft in (None, PromptLookup(3)):
            options = {"draft": draft, "max_new_tokens": new, "do_sample": False}
            assert generate(base, ids, **options, compile=True).tolist() == generate(base, ids, **options).tolist()
        traced.append(counters["stats"]["unique_graphs"])
    assert compiled_steps(base).failure is None
    assert len(compiled_steps(base)) == 2
    assert set(traced) == {before + 2}


@pytest.mark.parametrize(
    ("tree", "accept"),
    [(SampledTree((2, 2, 1)), "exact"), (SampledTree((2, 1)), "traversal"), (comb(3, 2), "fuzzy:js:0.2")],
)
def test_torchs_own_compiler_draws_the_numbers_of_a_seed(tree, accept):
    model = endless("eagle3")
    options = {**padded(PROMPTS), "tree": tree, "accept": accept, "max_new_tokens": 30, **DRAWING}
    assert model.generate(**options, compile=True).tolist() == model.generate(**options).tolist()
    assert [function.__name__ for function, _ in compiled_steps(model.base)._known] == ["verify"]


@pytest.mark.parametrize(
    ("kind", "options"),
    [("eagle3", {"sliding_window": 4}), ("medusa", {}), ("parallel", {})],
    ids=["eagle3", "medusa", "parallel"],
)
def test_torchs_own_compiler_gives_the_same_greedy_text(kind, options):
    model = spec_model(kind, **options)
    for prompts in (padded(PROMPTS[:1]), padded(PROMPTS)):
        options = {**prompts, "draft": "head", "max_new_tokens": 14, "do_sample": False}
        assert model.generate(**options, compile=True).tolist() == model.generate(**options).tolist()
    assert compiled_steps(model.base).failure is None
