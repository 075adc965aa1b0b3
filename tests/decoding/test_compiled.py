"""Compiled steps: the text is the one without compiling.

The backend "eager" traces as torch's own does, with no graph break allowed, and runs the operations as they are.
"""

import pytest
import torch

from specheads import (
    AdaptiveChain,
    BestFirstTree,
    DraftModel,
    DynamicTree,
    NGram,
    PromptLookup,
    SampledTree,
    StaticTree,
    chain,
    comb,
    convert,
    generate_many,
)  # fmt: skip
from specheads.decoding.acceptance import RULES, rule_named
from specheads.decoding.compiled import StepCompiler, compiled_steps
from specheads.decoding.verify.causal import Target
from tests.reference.slow_heads import FORMS, KINDS, WINDOWED
from tests.reference.slow_heads import shallow_spec_model as spec_model
from tests.support.compiled_texts import DRAWING, endless, fresh_dynamo, texts_of  # noqa: F401
from tests.support.families import FAMILIES, RECURRENT, build
from tests.support.prompts import PROMPTS, padded
from tests.support.tiny_models import near, tiny_llama

TREES = {"chain": chain(3), "comb": comb(3, 2), "dynamic": DynamicTree(8, 3, 3), "best first": BestFirstTree(8, 3, 3)}

DRAWN = TREES | {"sampled": SampledTree((2, 2, 1)), "sampled chain": SampledTree((1, 1, 1))}
LOSSY = [
    "typical:0.3", "topn:5:margin=0.2", "margin:0.3", "cs_leniency:2", "lenient:0.5", "no_residual", "fuzzy:js:0.3",
    "fuzzy:kl:0.3:mode=rescue", "fuzzy:top_k_kl:0.5:k=7", "fuzzy:top_p_tv:0.5", "fuzzy:tv:0.3:processed=true",
    "ensemble:0.5", "block", "traversal", "exact",
]  # fmt: skip


@pytest.mark.sampled(29)
@pytest.mark.parametrize(
    "sampling", [{}, {"do_sample": True, "temperature": 0.8, "seed": 5}], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(("kind", "options"), [*((kind, {}) for kind in KINDS), *WINDOWED])
def test_a_heads_whole_step_is_one_graph_and_gives_the_same_text(kind, options, tree, sampling):
    model = spec_model(kind, **options)
    without, compiled = texts_of(model, padded(PROMPTS), tree=TREES[tree], **sampling)
    assert compiled == without
    steps = compiled_steps(model.base, "eager")
    assert steps.failure is None
    assert [function.__name__ for function, _ in steps._known] == ["whole_step"]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["DFlash 2", "rnn", "Domino"])
def test_a_step_of_each_form_of_a_parallel_heads_block_is_one_graph(form):
    model = spec_model("parallel", **FORMS[form])
    without, compiled = texts_of(model, padded(PROMPTS), tree=BestFirstTree(6, 2, 2))
    assert compiled == without
    steps = compiled_steps(model.base, "eager")
    assert steps.failure is None and [function.__name__ for function, _ in steps._known] == ["whole_step"]


@pytest.mark.sampled(199)
@pytest.mark.parametrize("sampling", [DRAWING | {"top_k": 3}, {}, DRAWING], ids=["few tokens", "greedy", "sampled"])
@pytest.mark.parametrize("tree", DRAWN)
@pytest.mark.parametrize("rule", LOSSY)
def test_every_rule_is_judged_in_the_graph_whatever_the_draft_was_drawn_from(rule, tree, sampling):
    if rule == "block" and tree == "sampled":
        pytest.skip("Block judges chains")
    kind = KINDS[(LOSSY.index(rule) + list(DRAWN).index(tree)) % len(KINDS)]
    model = endless(kind)
    without, compiled = texts_of(model, padded(PROMPTS), tree=DRAWN[tree], accept=rule, **sampling)
    assert compiled == without
    assert [function.__name__ for function, _ in compiled_steps(model.base, "eager")._known] == ["whole_step"]


def test_the_grid_of_rules_has_every_rule():
    assert {rule.partition(":")[0] for rule in LOSSY} == set(RULES)
    assert all(rule_named(rule).on_device for rule in LOSSY)


def test_drafts_past_the_limit_have_no_part_in_the_text():
    """Block judges a token by those after it."""
    model = endless("medusa")
    for new in range(4, 12):
        options = DRAWING | {"max_new_tokens": new, "seed": new, "top_k": 4}
        without, compiled = texts_of(model, padded(PROMPTS), tree=SampledTree((1, 1, 1)), accept="block", **options)
        assert compiled == without
    assert len(compiled_steps(model.base, "eager")) == 1


@pytest.mark.sampled(97)
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
    texts = ((padded(PROMPTS), {}), ({"inputs": line}, DRAWING), ({"inputs": line.flip(1)}, DRAWING))
    for prompts, sampling in texts:  # the third meets the second's graph
        without, compiled = texts_of(model, prompts, draft="head", tree=tree, **sampling)
        assert compiled == without
    steps = compiled_steps(model.base, "eager")
    assert steps.failure is None
    assert {function.__name__ for function, _ in steps._known} == functions
    assert len(steps) == 2 * len(functions)  # of three rows, greedy, and of one, sampled
    assert not steps.failures
    assert all("forward" not in vars(part.module) for part in Target(model.base).recurrent)


@pytest.mark.slow
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
    assert not steps.failures


@pytest.mark.slow
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


def test_a_model_told_to_compile_does_so_unless_a_call_says_otherwise():
    model = spec_model("medusa")
    ids = torch.tensor([PROMPTS[0]])
    assert model.compile("eager") is model
    model.generate(ids, draft="head", max_new_tokens=12, compile=False)
    assert len(compiled_steps(model.base, "eager")) == 0
    model.generate(ids, draft="head", max_new_tokens=12)
    assert len(compiled_steps(model.base, "eager")) == 1


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", KINDS[::-1])
def test_the_first_step_is_in_the_graph_after_prompts_of_any_length(kind, monkeypatch):
    """Under this rule a wrong draft is another text."""
    monkeypatch.setattr(StepCompiler, "verify", None)
    model = endless(kind)
    for prompts in ([[5], [8, 2]], [[5, 9, 11], [7, 3]], [[7], [3, 1, 4, 1, 5, 9, 2, 6]]):
        without, compiled = texts_of(model, padded(prompts), tree=chain(2), accept="topn:60")
        assert compiled == without
    assert len(compiled_steps(model.base, "eager")) == 1


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
