"""Compiled steps: the text is the one without compiling, few graphs serve many texts, and nothing fails that cannot be
compiled.

The backend "eager" traces as torch's own does, with no graph break allowed, and runs the operations as they are.
"""

import gc
import re
from types import SimpleNamespace
from weakref import ref

import pytest
import torch
from torch._dynamo.utils import counters

from specheads import (
    AdaptiveChain,
    BestFirstTree,
    DraftModel,
    DynamicTree,
    NGram,
    PromptLookup,
    SampledTree,
    StaticTree,
    Typical,
    chain,
    comb,
    convert,
    generate_many,
)  # fmt: skip
from specheads.decoding.acceptance import RULES
from specheads.decoding.acceptance.named import rule_named
from specheads.decoding.compiled import StepCompiler, compiled_steps, module_state, reason_not_compiled
from specheads.decoding.target.cache import static_size
from specheads.decoding.target.causal import Target
from specheads.decoding.target.model_inputs import ModelInputs
from tests.reference.slow_heads import KINDS
from tests.reference.slow_heads import shallow_spec_model as spec_model
from tests.support.compiled_texts import DRAWING, fresh_dynamo, shallow, texts_of  # noqa: F401
from tests.support.families import FAMILIES, RECURRENT, build
from tests.support.paths import ROOT
from tests.support.prompts import PROMPTS, padded
from tests.support.tiny_models import near, tiny_llama, with_adapter

TREES = {"chain": chain(3), "comb": comb(3, 2), "dynamic": DynamicTree(8, 3, 3), "best first": BestFirstTree(8, 3, 3)}

DRAWN = TREES | {"sampled": SampledTree((2, 2, 1)), "sampled chain": SampledTree((1, 1, 1))}
LOSSY = [
    "typical:0.3", "topn:5:margin=0.2", "margin:0.3", "cs_leniency:2", "lenient:0.5", "no_residual", "fuzzy:js:0.3",
    "fuzzy:kl:0.3:mode=rescue", "fuzzy:top_k_kl:0.5:k=7", "fuzzy:top_p_tv:0.5", "fuzzy:tv:0.3:processed=true",
    "ensemble:0.5", "block", "traversal", "exact",
]  # fmt: skip


@pytest.mark.sampled(17)
@pytest.mark.parametrize(
    "sampling", [{}, {"do_sample": True, "temperature": 0.8, "seed": 5}], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_heads_whole_step_is_one_graph_and_gives_the_same_text(kind, tree, sampling):
    model = spec_model(kind)
    without, compiled = texts_of(model, padded(PROMPTS), tree=TREES[tree], **sampling)
    assert compiled == without
    steps = compiled_steps(model.base, "eager")
    assert steps.failure is None
    assert [function.__name__ for function, _ in steps._known] == ["whole_step"]


@pytest.mark.sampled(89)
@pytest.mark.parametrize("sampling", [DRAWING | {"top_k": 3}, {}, DRAWING], ids=["few tokens", "greedy", "sampled"])
@pytest.mark.parametrize("tree", DRAWN)
@pytest.mark.parametrize("rule", LOSSY)
def test_every_rule_is_judged_in_the_graph_whatever_the_draft_was_drawn_from(rule, tree, sampling):
    if rule == "block" and tree == "sampled":
        pytest.skip("Block judges chains")
    kind = KINDS[(LOSSY.index(rule) + list(DRAWN).index(tree)) % len(KINDS)]
    model = shallow(kind, 3)
    without, compiled = texts_of(model, padded(PROMPTS), tree=DRAWN[tree], accept=rule, **sampling)
    assert compiled == without
    assert [function.__name__ for function, _ in compiled_steps(model.base, "eager")._known] == ["whole_step"]


def test_the_grid_of_rules_has_every_rule():
    assert {rule.partition(":")[0] for rule in LOSSY} == set(RULES)
    assert all(rule_named(rule).on_device for rule in LOSSY)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rule", ["typical:{}", "fuzzy:js:{}"])
def test_one_graph_serves_all_thresholds_seeds_and_lengths_of_a_rule(rule):
    model, texts = shallow("medusa", 2), set()
    for length, threshold in ((5, 0.02), (9, 0.3), (40, 0.6)):
        ids = (torch.arange(20) * length % 97).unsqueeze(0)[:, :length]
        for temperature in (0.8, 1.2):
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
    without, compiled = texts_of(model, {"inputs": ids}, accept="margin:0.9")
    assert compiled == without
    assert len(compiled_steps(model.base, "eager")) == 3


def test_drafts_past_the_limit_have_no_part_in_the_text():
    """Block judges a token by those after it."""
    model = shallow("medusa", 2)
    for new in range(4, 12):
        options = DRAWING | {"max_new_tokens": new, "seed": new, "top_k": 4}
        without, compiled = texts_of(model, padded(PROMPTS), tree=SampledTree((1, 1, 1)), accept="block", **options)
        assert compiled == without
    assert len(compiled_steps(model.base, "eager")) == 1


def test_a_graph_serves_equal_plans_whatever_was_computed_of_them_before():
    """The shape of a static tree is kept on the plan, and other rules compute more of it."""
    model = shallow("medusa", 2)
    used, ids = comb(3, 2), torch.tensor([PROMPTS[0]])
    model.generate(ids, tree=used, accept="fuzzy:js:0.2", max_new_tokens=12, **DRAWING)
    for tree in (used, comb(3, 2)):
        without, compiled = texts_of(model, {"inputs": ids}, tree=tree, accept="typical")
        assert compiled == without
    assert len(compiled_steps(model.base, "eager")) == 1
    base = build("LlamaConfig", {"max_position_embeddings": 512, "num_hidden_layers": 2})
    for tree, length in ((comb(3, 2), 3), (comb(3, 2), 270)):  # the second graph of the first plan is the third's
        prompts = {"inputs": (torch.arange(length) * 7 % 97).unsqueeze(0)}
        for new in (250, 20) if length == 3 else (20,):
            without, compiled = texts_of(
                base, prompts, draft=DraftModel(near(base)), tree=tree, max_new_tokens=new + (length == 3) * 20
            )
            assert compiled == without


@pytest.mark.sampled(37)
@pytest.mark.parametrize("family", FAMILIES | RECURRENT)
def test_every_family_compiles_with_every_way_of_drafting(family):
    base = build(*(FAMILIES | RECURRENT)[family])
    for draft in (None, PromptLookup(3)):
        without, compiled = texts_of(base, padded(PROMPTS), draft=draft, max_new_tokens=8)
        assert compiled == without
    assert compiled_steps(base, "eager").failure is None
    assert len(compiled_steps(base, "eager")) == 2


@pytest.mark.sampled(16)
@pytest.mark.parametrize("family", ["LFM2", "Qwen3.5", "Falcon-H1", "Jamba"])
@pytest.mark.parametrize(
    ("tree", "functions"),
    [
        (chain(3), {"whole_step"}), (comb(3, 2), {"whole_step"}), (SampledTree((2, 1)), {"whole_step"}),
        (DynamicTree(8, 3, 3), set()),
    ],
    ids=["chain", "comb", "sampled", "dynamic"],
)  # fmt: skip
def test_a_hybrid_targets_step_is_one_graph_for_chains_and_fixed_trees(family, tree, functions):
    model = convert(build(*RECURRENT[family]), "eagle3")
    model.base.generation_config.eos_token_id = None
    line = (torch.arange(20) * 7 % 97).unsqueeze(0)
    for prompts in (padded(PROMPTS), {"inputs": line}, {"inputs": line.flip(1)}):  # the third meets the second's graph
        for sampling in ({}, DRAWING):
            without, compiled = texts_of(model, prompts, draft="head", tree=tree, **sampling)
            assert compiled == without
    steps = compiled_steps(model.base, "eager")
    assert steps.failure is None
    assert {function.__name__ for function, _ in steps._known} == functions
    assert len(steps) == 4 * len(functions)  # two batch sizes, greedy and sampled
    assert not steps._failed
    assert all("forward" not in vars(part.module) for part in Target(model.base).recurrent)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "draft",
    [DraftModel, PromptLookup(3, width=2), NGram(2), AdaptiveChain(4)],
    ids=["model", "lookup", "ngram", "chain"],
)
def test_a_hybrid_target_compiles_what_the_drafter_leaves_to_the_graph(draft):
    base = build(*RECURRENT["LFM2"])
    base.generation_config.eos_token_id = None
    tree = draft if isinstance(draft, AdaptiveChain) else None
    draft = DraftModel(near(base)) if tree or draft is DraftModel else draft  # which is a hybrid itself
    without, compiled = texts_of(base, padded(PROMPTS), draft=draft, tree=tree, max_new_tokens=24)
    assert compiled == without
    steps = compiled_steps(base, "eager")
    assert steps.failure is None
    assert not steps._failed


def test_a_refilled_batch_of_a_hybrid_target_compiles():
    base = build(*RECURRENT["Qwen3.5"])
    prompts = [[(7 * i + k) % 97 for i in range(3 + k)] for k in range(7)]
    texts = [
        [text.tokens for text in generate_many(base, prompts, batch_size=3, max_new_tokens=[5, 20, 9, 3, 17, 8, 12],
         do_sample=False, draft=PromptLookup(3), compile=compile)]
        for compile in (False, "eager")
    ]  # fmt: skip
    assert texts[0] == texts[1]
    assert compiled_steps(base, "eager").failure is None
    assert len(compiled_steps(base, "eager"))


def compatibility():
    """What docs/compatibility.md says of compiled steps."""
    text = (ROOT / "docs" / "compatibility.md").read_text()
    return text.partition("## The compiled step\n")[2].partition("\n## ")[0]


def test_the_documentation_lists_the_families_that_compile():
    listed = compatibility().split("\n\n")[1]
    assert " ".join(listed.split()) == "; ".join(FAMILIES | RECURRENT) + "."


def test_the_documentation_lists_the_reasons_why_others_do_not():
    base = tiny_llama(num_hidden_layers=2)
    without = {"source": None, "static": True, "switch": None, "base": base, "inputs": ModelInputs()}
    spread = SimpleNamespace(hf_device_map={"model.layers.0": 0, "model.layers.1": 1})
    cases = [
        {"source": object()}, {"switch": object()},
        {"inputs": ModelInputs(token_types=torch.zeros(1, 3))}, {"base": spread},
    ]  # fmt: skip
    rows = re.findall(r"^\| .* \| (.*) \|$", compatibility(), re.MULTILINE)[1:]
    assert reason_not_compiled(SimpleNamespace(**without)) is None
    for row, case in zip(rows, cases, strict=True):
        assert reason_not_compiled(SimpleNamespace(**without | case)).partition(" (")[0] == row


@pytest.mark.sampled(3)
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


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7, "top_p": 0.8}, {"min_p": 0.1, "typical_p": 0.9, "epsilon_cutoff": 0.02},
        {"top_k": 5, "temperature": 1.3, "renormalize_logits": True, "suppress_tokens": [3, 5]},
    ],
    ids=str,
)  # fmt: skip
def test_processors_in_the_graph_give_the_text_they_give_outside(options):
    base = tiny_llama(num_hidden_layers=1)
    options = {"do_sample": True, "top_k": 0, "seed": 7, "max_new_tokens": 24} | options
    without, compiled = texts_of(base, padded(PROMPTS), draft=PromptLookup(2), **options)
    assert compiled == without
    assert [function.__name__ for function, _ in compiled_steps(base, "eager")._known] == ["step_after_draft"]


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


def test_a_longer_text_meets_few_graphs():
    base = build("LlamaConfig", {"max_position_embeddings": 1024, "num_hidden_layers": 1})
    for new in (100, 700):
        without, compiled = texts_of(base, padded(PROMPTS), draft=PromptLookup(4), max_new_tokens=new)
        assert compiled == without
    assert len(compiled_steps(base, "eager")) == 4  # of 256, 384, 512 and 768 slots
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


def test_a_model_told_to_compile_does_so_unless_a_call_says_otherwise():
    model = spec_model("medusa")
    ids = torch.tensor([PROMPTS[0]])
    assert model.compile("eager") is model
    model.generate(ids, draft="head", max_new_tokens=12, compile=False)
    assert len(compiled_steps(model.base, "eager")) == 0
    model.generate(ids, draft="head", max_new_tokens=12)
    assert len(compiled_steps(model.base, "eager")) == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_step_is_in_the_graph_after_prompts_of_any_length(kind, monkeypatch):
    """Under this rule a wrong draft is another text."""
    monkeypatch.setattr(StepCompiler, "verify", None)
    model = shallow(kind, 3)
    for prompts in ([[5]], [[5, 9, 11]], [[7], [5, 9, 11], [3, 1, 4, 1, 5, 9, 2, 6]]):
        without, compiled = texts_of(model, padded(prompts), tree=chain(2), accept="topn:60")
        assert compiled == without
    assert len(compiled_steps(model.base, "eager")) == 2  # of one row and of three


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


def test_graphs_are_freed_with_their_head_and_with_their_base():
    model = shallow("medusa", 2)
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


def test_without_a_compiler_of_products_decoding_continues_after_one_warning(monkeypatch, hf_log):
    def broken():
        raise OSError("no C++ compiler")

    monkeypatch.setattr("specheads.decoding.few_rows.load", broken)
    model = spec_model("medusa", num_heads=3)
    options = {"draft": False, "max_new_tokens": 6, "do_sample": False}
    texts = [model.generate(torch.tensor([PROMPTS[0]]), **options, compile=way) for way in (False, True)]
    assert torch.equal(*texts)
    assert "no C++ compiler" in compiled_steps(model.base).failure
    assert sum("without" in record.message for record in hf_log.records) == 1


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


def test_scores_are_those_without_compiling():
    model = spec_model("eagle")
    options = {
        "draft": "head",
        "max_new_tokens": 9,
        "return_dict_in_generate": True,
        "output_scores": True,
        "do_sample": False,
    }
    ids = torch.tensor([PROMPTS[0]])
    without, compiled = (model.generate(ids, **options, compile=compile) for compile in (False, "eager"))
    assert torch.stack(without.scores).equal(torch.stack(compiled.scores))


def test_static_trees_deeper_than_their_rows_are_cut_to_the_limit():
    model = spec_model("eagle3")
    for new in range(1, 8):
        without, compiled = texts_of(
            model, padded(PROMPTS), tree=StaticTree(((0,), (0, 0), (0, 0, 0), (1,))), max_new_tokens=new
        )
        assert compiled == without
