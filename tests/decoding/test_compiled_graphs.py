"""Compiled steps: how few graphs serve many texts, what they depend on, and how long they live.

The backend "eager" traces as torch's own does, with no graph break allowed, and runs the operations as they are.
"""

import gc
from dataclasses import replace
from weakref import ref

import pytest
import torch
from torch._dynamo.utils import counters

from specheads import DraftModel, NGram, PromptLookup, SampledTree, chain, comb
from specheads.decoding.compiled import compiled_steps
from specheads.decoding.compiled.keys import module_state
from specheads.decoding.verify.cache import static_size
from tests.reference.slow_heads import shallow_spec_model as spec_model
from tests.support.compiled_texts import DRAWING, endless, fresh_dynamo, texts_of  # noqa: F401
from tests.support.families import build
from tests.support.prompts import PROMPTS, padded
from tests.support.tiny_models import near, tiny_llama, with_adapter


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rule", ["fuzzy:js:{}", "typical:{}"])
def test_one_graph_serves_all_thresholds_seeds_and_lengths_of_a_rule(rule):
    model, texts = endless("medusa"), set()
    for length, threshold, temperature in ((5, 0.02, 0.8), (9, 0.3, 1.2), (40, 0.6, 0.8), (40, 0.6, 1.2)):
        ids = (torch.arange(20) * length % 97).unsqueeze(0)[:, :length]
        options = DRAWING | {"temperature": temperature, "seed": length, "max_new_tokens": 10 + length}
        without, compiled = texts_of(model, {"inputs": ids}, accept=rule.format(threshold), **options)
        assert compiled == without
    for threshold, seed in ((0.01, None), (0.3, 4), (0.9, None)):
        options = {"max_new_tokens": 40, "seed": seed}
        without, compiled = texts_of(model, {"inputs": ids}, accept=rule.format(threshold), **options)
        assert compiled == without
        texts.add(str(compiled))
    assert len(texts) > 1  # so that a threshold that a graph kept would be seen
    assert len(compiled_steps(model.base, "eager")) == 2  # one that draws, one that does not
    without, compiled = texts_of(
        model, {"inputs": ids}, accept="fuzzy:tv:0.3"
    )  # of fuzzy:js, only the divergence differs
    assert compiled == without
    assert len(compiled_steps(model.base, "eager")) == 3


def test_a_graph_serves_equal_plans_whatever_was_computed_of_them_before():
    """The shape of a static tree is kept on the plan, and other rules compute more of it."""
    model = endless("medusa")
    used, ids = comb(3, 2), torch.tensor([PROMPTS[0]])
    model.generate(ids, tree=used, accept="fuzzy:js:0.2", max_new_tokens=12, **DRAWING)
    for tree in (used, comb(3, 2)):
        without, compiled = texts_of(model, {"inputs": ids}, tree=tree, accept="typical")
        assert compiled == without
    assert len(compiled_steps(model.base, "eager")) == 1


@pytest.mark.slow
def test_the_second_graph_of_a_plan_serves_an_equal_plan():
    base = build("LlamaConfig", {"max_position_embeddings": 512, "num_hidden_layers": 2})
    for tree, length in ((comb(3, 2), 3), (comb(3, 2), 270)):
        prompts = {"inputs": (torch.arange(length) * 7 % 97).unsqueeze(0)}
        for new in (250, 20) if length == 3 else (20,):
            without, compiled = texts_of(
                base, prompts, draft=DraftModel(near(base)), tree=tree, max_new_tokens=new + (length == 3) * 20
            )
            assert compiled == without


def test_a_graph_for_trees_in_a_batch_serves_the_shorter_trees_near_the_limit():
    """The inputs of a step near the limit once lay in memory in another way than those of the steps before."""
    base = tiny_llama(num_hidden_layers=2)
    base.generation_config.eos_token_id = None
    for new in (3, 30):  # the graph is that of a shorter tree
        options = {"draft": DraftModel(near(base)), "tree": comb(3, 2), "max_new_tokens": new}
        without, compiled = texts_of(base, padded(PROMPTS), **options)
        assert compiled == without


def test_after_the_first_text_nothing_is_compiled_for_other_lengths_limits_seeds_and_temperatures():
    model = spec_model("eagle3")
    model.base.generation_config.eos_token_id = None
    ids = torch.arange(20).unsqueeze(0)
    model.generate(ids, draft="head", max_new_tokens=8, do_sample=True, temperature=0.5, compile="eager")
    steps, traced = compiled_steps(model.base, "eager"), counters["stats"]["unique_graphs"]
    assert len(steps) == 1
    for length, new, temperature in ((3, 9, 0.9), (31, 40, 1.4), (60, 5, 0.9), (100, 20, 0.2)):
        ids = (torch.arange(length) * length % 97).unsqueeze(0)
        options = {"max_new_tokens": new, "do_sample": True, "temperature": temperature, "seed": length, "draft": True}
        assert model.generate(ids, **options, compile="eager").tolist() == model.generate(ids, **options).tolist()
    assert len(steps) == 1
    assert counters["stats"]["unique_graphs"] == traced


@pytest.mark.slow
def test_a_longer_text_meets_few_graphs():
    base = build("LlamaConfig", {"max_position_embeddings": 1024, "num_hidden_layers": 1})
    for new in (100, 700):
        without, compiled = texts_of(base, padded(PROMPTS), draft=PromptLookup(4), max_new_tokens=new)
        assert compiled == without
    assert len(compiled_steps(base, "eager")) == 4  # of 256, 384, 512 and 768 slots


def test_a_longer_prompt_meets_a_graph_of_its_own():
    base = build("LlamaConfig", {"max_position_embeddings": 512, "num_hidden_layers": 1})
    for length in (3, 300, 4):
        prompts = {"inputs": (torch.arange(length) * 7 % 97).unsqueeze(0)}
        without, compiled = texts_of(base, prompts, draft=PromptLookup(4))
        assert compiled == without
    assert len(compiled_steps(base, "eager")) == 2  # of 256 and 384 slots


def test_caches_have_few_sizes():
    assert [static_size(n) for n in (1, 256, 257, 385, 513, 769, 1025)] == [256, 256, 384, 512, 768, 1024, 1536]
    assert all(n <= static_size(n) <= max(256, 1.5 * n) for n in range(1, 5000))


def test_a_graph_serves_only_the_weights_and_modes_it_was_traced_with():
    base = tiny_llama(num_hidden_layers=1)
    prompts = padded(PROMPTS)
    texts_of(base, prompts)
    before = module_state(base)
    with torch.no_grad():
        base.lm_head.weight.mul_(-1)
    assert module_state(base) == before  # a graph reads weights anew
    without, compiled = texts_of(base, prompts)
    assert compiled == without
    base.double()
    without, compiled = texts_of(base, prompts)
    assert compiled == without
    assert module_state(base) != before
    assert len(compiled_steps(base, "eager")) == 2


def test_hooks_attention_and_adapter_scales_are_part_of_what_is_compiled():
    base, prompts = tiny_llama(num_hidden_layers=1), padded(PROMPTS)
    texts_of(base, prompts)
    before = {module_state(base)}
    with base.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: -output):
        before.add(module_state(base))
        without, compiled = texts_of(base, prompts)
        assert compiled == without
    base.set_attn_implementation("eager")
    before.add(module_state(base))
    assert len(before) == 3
    adapted = with_adapter(num_hidden_layers=1)
    texts_of(adapted, prompts)
    before = module_state(adapted.base_model.model)
    for module in adapted.modules():
        if hasattr(module, "scale_layer"):
            module.scale_layer(0.05)
    assert module_state(adapted.base_model.model) != before
    without, compiled = texts_of(adapted, prompts)
    assert compiled == without


@pytest.mark.parametrize(
    ("read", "change", "other"),
    [
        (torch.get_num_threads, torch.set_num_threads, torch.get_num_threads() + 1),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, "warn"),
        (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    ],
    ids=["threads", "precision", "deterministic", "default dtype"],
)
def test_settings_of_torch_that_code_is_made_for_are_part_of_what_is_compiled(read, change, other):
    base, prompts, before = tiny_llama(num_hidden_layers=1), padded(PROMPTS[:1]), read()
    try:
        texts_of(base, prompts, max_new_tokens=4)
        change(other)
        without, compiled = texts_of(base, prompts, max_new_tokens=4)
    finally:
        change(before)
    assert compiled == without
    assert len(compiled_steps(base, "eager")) == 2


def test_a_base_that_was_moved_has_steps_of_its_own_on_each_device():
    base = tiny_llama(num_hidden_layers=1)
    steps = compiled_steps(base, "eager")
    steps.failure = "no compiler for this device"
    assert compiled_steps(base, "eager") is steps and steps.device == torch.device("cpu")
    moved = compiled_steps(base.to("meta"), "eager")
    assert moved.device == torch.device("meta") and moved.failure is None


def test_a_graph_is_not_made_again_for_processors_and_drafters_that_it_does_not_hold():
    base, prompts = tiny_llama(num_hidden_layers=1), padded(PROMPTS)
    for draft in (PromptLookup(3), NGram(3, filler_top_k=1)):
        texts_of(base, prompts, draft=draft)
    assert len(compiled_steps(base, "eager")) == 1
    for minimum in (4, 5):
        texts_of(base, prompts, draft=PromptLookup(3), min_new_tokens=minimum)
    assert len(compiled_steps(base, "eager")) == 2


def test_adapters_are_part_of_what_is_compiled():
    base = with_adapter(num_hidden_layers=1)
    prompts = padded(PROMPTS)
    active, compiled = texts_of(base, prompts)
    assert compiled == active
    with base.disable_adapter():
        disabled, compiled = texts_of(base, prompts)
    assert compiled == disabled != active
    again, compiled = texts_of(base, prompts)
    assert compiled == again == active
    assert len(compiled_steps(base.base_model.model, "eager")) == 2


def test_options_of_a_head_are_part_of_what_is_compiled():
    model = endless("eagle3")
    options = {**DRAWING, "temperature": 1.5, "draft": "head", "tree": SampledTree((1, 1, 1))}
    before, compiled = texts_of(model, padded(PROMPTS), **options)
    assert compiled == before
    model.head.config = replace(model.head.config, norm_output=True)
    without, compiled = texts_of(model, padded(PROMPTS), **options)
    assert compiled == without != before, "the text of drawn drafts depends on them"


def test_graphs_are_freed_with_their_head_and_with_their_base():
    model = endless("medusa")
    other = spec_model("medusa", model.base)
    for one in (model, other):
        one.generate(**padded(PROMPTS), tree=chain(2), max_new_tokens=8, do_sample=False, compile="eager")
    base, steps = ref(model.base), ref(compiled_steps(model.base, "eager"))
    assert len(steps()) == 2
    del other, one
    gc.collect()
    assert len(steps()) == 1
    graph = ref(*steps()._known.values())
    del model
    gc.collect()
    assert base() is steps() is graph() is None
