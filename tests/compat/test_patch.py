"""patch(): the model's own generate() takes transformers' and FSD's draft arguments, and is itself again afterwards."""

import copy
import io
import pickle

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaForCausalLM

import specheads
from specheads import AdaptiveChain, Exact, Fuzzy, PromptLookup, SampledTree, chain, convert
from specheads.compat import patch_generation
from specheads.compat.patch import draft_arguments
from specheads.decoding.drafters.assistant import accepted_whole
from tests.support.prompts import BATCHES
from tests.support.tiny_models import near, tiny_llama, with_adapter
from tests.support.two_vocabularies import OWN, TARGET, TEXT

GREEDY = {"do_sample": False, "max_new_tokens": 16}
IDS = BATCHES["one"]["input_ids"]


@pytest.fixture
def base():
    model = tiny_llama(num_hidden_layers=3)
    yield model
    specheads.unpatch(model)


@pytest.fixture(scope="module")
def small():
    return near(tiny_llama(num_hidden_layers=3))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("schedule", ["constant", "heuristic"])
@pytest.mark.sampled(3)
def test_an_assistant_gives_the_models_own_greedy_text(base, small, batch, schedule):
    expected = base.generate(**BATCHES[batch], **GREEDY)
    specheads.patch(base)
    out = base.generate(
        **BATCHES[batch], **GREEDY, assistant_model=small, num_assistant_tokens=4, assistant_confidence_threshold=0.2,
        num_assistant_tokens_schedule=schedule, return_dict_in_generate=True,
    )  # fmt: skip
    assert torch.equal(out.sequences, expected)
    assert out.lossless and out.statistics()["accepted_length"] > 1.2


def test_a_call_without_draft_arguments_is_the_models_own(base, monkeypatch):
    expected = base.generate(IDS, num_beams=3, max_new_tokens=5)
    specheads.patch(base)
    monkeypatch.setattr("specheads.decoding.generation.generate.generate", None)
    options = {"assistant_model": None, "fsd_div_threshold": None, "draft": None, "num_beams": 3}
    assert torch.equal(base.generate(IDS, GenerationConfig(max_new_tokens=5, num_beams=3, pad_token_id=0)), expected)
    assert torch.equal(base.generate(IDS, **options, max_new_tokens=5), expected)


def test_the_class_and_other_instances_stay_as_they_are(base, small):
    other, before = copy.deepcopy(base), type(base).generate
    specheads.patch(base)
    assert type(base).generate is before and "generate" not in vars(other)
    assert other.generate == before.__get__(other)


def test_unpatch_restores_the_bound_method_also_after_patching_twice(base):
    before = base.generate
    specheads.patch(base)
    patched = base.generate
    specheads.patch(base)
    assert base.generate is patched and patched != before
    specheads.unpatch(base)
    assert base.generate == before and "generate" not in vars(base)
    specheads.unpatch(base)
    assert base.generate == before


def test_a_generate_of_the_instance_itself_is_called_and_comes_back(base, small):
    calls = []

    def own(*args, **kwargs):
        calls.append(kwargs)
        return type(base).generate(base, *args, **kwargs)

    base.generate = own
    specheads.patch(base)
    base.generate(IDS, max_new_tokens=2)
    base.generate(IDS, max_new_tokens=2, assistant_model=small)
    assert len(calls) == 2
    specheads.unpatch(base)
    assert base.generate is own
    del base.generate


def test_the_block_of_a_with_statement_is_patched_and_no_more(base, small):
    before = base.generate

    def interrupted():
        with specheads.patch(base) as inside:
            assert inside is base
            with specheads.patch(base):
                pass
            base.generate(IDS, assistant_model=small, fsd_div_threshold=0.1, max_new_tokens=3)  # still patched
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert base.generate == before


def test_a_block_of_another_patch_ends_in_the_patch_around_it(base, small):
    before = base.generate
    with specheads.patch(base):
        outer = base.generate
        with patch_generation(base):
            assert base.generate is not outer
        assert base.generate is outer
        base.generate(IDS, assistant_model=small, fsd_div_threshold=0.1, max_new_tokens=3)
        with patch_generation(base):
            specheads.unpatch(base)
        assert base.generate == before, "taken back inside the block"
    assert base.generate == before and "generate" not in vars(base)


def test_a_patched_model_is_copied_pickled_and_saved(base, small, tmp_path):
    expected = base.generate(IDS, **GREEDY)
    specheads.patch(base)
    stored = io.BytesIO()
    torch.save(base, stored)
    stored.seek(0)
    for copied in (
        copy.deepcopy(base), pickle.loads(pickle.dumps(base)), torch.load(stored, weights_only=False),
    ):  # fmt: skip
        assert copied.generate.base is copied
        assert torch.equal(copied.generate(IDS, **GREEDY, assistant_model=small, accept=Exact()), expected)
        specheads.unpatch(copied)
        assert copied.generate == type(base).generate.__get__(copied)
    base.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path).generate(IDS, **GREEDY), expected)
    assert "generate" in vars(base)


def test_a_peft_model_drafts_with_its_adapters(small):
    adapted = with_adapter()
    expected = adapted.generate(input_ids=IDS, **GREEDY)
    with specheads.patch(adapted):
        out = adapted.generate(input_ids=IDS, **GREEDY, assistant_model=small, return_dict_in_generate=True)
    assert torch.equal(out.sequences, expected) and out.steps
    assert torch.equal(adapted.generate(input_ids=IDS, **GREEDY), expected)


# --- What the arguments mean ---


def plan_of(small, do_sample=False, **call):
    return draft_arguments({"assistant_model": small, **call})["draft"].default_plan(torch.device("cpu"), do_sample)


def test_lengths_come_from_the_call_its_config_the_assistant_and_transformers_in_this_order(small):
    small = copy.deepcopy(small)
    assert plan_of(small) == AdaptiveChain(20, 0.4) and plan_of(small, True) == AdaptiveChain(20, 0.4, sampled=True)
    small.generation_config.num_assistant_tokens = 7
    assert plan_of(small) == AdaptiveChain(7, 0.4)
    config = GenerationConfig(num_assistant_tokens=6, assistant_confidence_threshold=0.1)
    assert plan_of(small, generation_config=config) == AdaptiveChain(6, 0.1)
    assert plan_of(small, generation_config=config, num_assistant_tokens=5) == AdaptiveChain(5, 0.1)
    assert plan_of(small, assistant_confidence_threshold=0) == chain(7)
    assert plan_of(small, True, assistant_confidence_threshold=0) == SampledTree((1,) * 7)
    assert small.generation_config.num_assistant_tokens == 7


def test_the_heuristic_schedule_is_transformers_own(base, small):
    """Two more after a draft accepted whole, one fewer after any other, as in AssistedCandidateGenerator."""
    specheads.patch(base)
    for kind in ({}, {"fsd_div_threshold": 0.01}):
        out = base.generate(
            IDS, assistant_model=small, num_assistant_tokens=3, assistant_confidence_threshold=0, max_new_tokens=60,
            num_assistant_tokens_schedule="heuristic", eos_token_id=None, return_dict_in_generate=True, **kind,
        )  # fmt: skip
        wanted, seen, left = 3, [], 60 - 1
        for step in out.steps[1:]:
            assert step.drafted == [min(wanted, left - 1)]  # as transformers' own: no more than there is room for
            seen.append(step.accepted == step.drafted)
            left -= len(step.tokens[0])
            wanted = wanted + 2 if seen[-1] else max(1, wanted - 1)
        assert len(set(seen)) == 2, "drafts of one kind alone show little"
    assert max(3, *(step.drafted[0] for step in out.steps)) <= 20


@pytest.mark.parametrize(("new", "whole"), [([3, 3], True), ([3, 0], True), ([3, 2], False), ([1, 0], False)])
def test_a_batchs_draft_was_accepted_whole_if_it_was_in_each_unfinished_row(new, whole):
    assert accepted_whole(torch.tensor(new), torch.tensor([2, 2])) == whole


def test_fsd_arguments_are_the_fuzzy_rule(base, small):
    specheads.patch(base)
    options = {**GREEDY, "assistant_model": small, "return_dict_in_generate": True}
    exact = base.generate(IDS, **options, fsd_div_threshold=None, fsd_div_type="top_k_js_div")
    assert exact.lossless and torch.equal(exact.sequences, base.generate(IDS, **GREEDY))
    out = base.generate(IDS, **options, fsd_div_threshold=0.4, fsd_div_type="top_k_js_div")
    same = specheads.generate(
        base, IDS, **GREEDY, draft=specheads.DraftModel(small), tree=AdaptiveChain(),
        accept=Fuzzy(0.4, "top_k_js_paper"),
    )  # fmt: skip
    assert not out.lossless and torch.equal(out.sequences, same)
    given = {"assistant_model": small, "fsd_div_threshold": 0, "fsd_div_type": "kl_div"}
    assert draft_arguments(given)["accept"] == Fuzzy(0, "kl")
    assert draft_arguments({**given, "fsd_div_type": None})["accept"] == Fuzzy(0, "js_paper")


def test_prompt_lookup_is_asked_for_as_in_transformers(base):
    expected = base.generate(IDS, **GREEDY)
    specheads.patch(base)
    config = GenerationConfig(**GREEDY, prompt_lookup_num_tokens=4, max_matching_ngram_size=2, pad_token_id=0)
    for call in ({"prompt_lookup_num_tokens": 4, **GREEDY}, {"generation_config": config}):
        out = base.generate(IDS, **call, return_dict_in_generate=True)
        assert torch.equal(out.sequences, expected) and max(step.drafted[0] for step in out.steps) == 4
    assert draft_arguments({"generation_config": config, "prompt_lookup_num_tokens": 4})["draft"] == PromptLookup(
        4, max_ngram=2
    )


def test_an_assistant_of_another_vocabulary_drafts_through_text():
    target, own = (
        tiny_llama(num_hidden_layers=2, vocab_size=len(tokenizer), eos_token_id=None) for tokenizer in (TARGET, OWN)
    )
    inputs = TARGET(TEXT[:30], return_tensors="pt")
    expected = target.generate(**inputs, **GREEDY)
    with specheads.patch(target):
        call = {**inputs, **GREEDY, "assistant_model": own, "assistant_tokenizer": OWN, "return_dict_in_generate": True}
        out = target.generate(**call, tokenizer=TARGET)
        with pytest.raises(ValueError, match="also needs tokenizer="):
            target.generate(**call)
    assert torch.equal(out.sequences, expected) and out.statistics()["drafted"] > 0
    assert draft_arguments({**call, "tokenizer": TARGET})["draft"].through_text


def test_a_seed_governs_a_patched_call(base, small):
    specheads.patch(base)
    options = {"do_sample": True, "max_new_tokens": 20, "assistant_model": small}
    first, second, other = (base.generate(IDS, **options, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, second) and not torch.equal(first, other)


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_an_offloaded_target_is_drafted_for(base, small, offload, tmp_path):
    expected = base.generate(IDS, **GREEDY)
    specheads.patch(base)
    if offload == "cpu":
        cpu_offload(base, execution_device="cpu")
    else:
        disk_offload(base, tmp_path, execution_device="cpu")
    assert base.lm_head.weight.is_meta
    for drafts in ({"assistant_model": small}, {"prompt_lookup_num_tokens": 5}):
        assert torch.equal(base.generate(IDS, **GREEDY, **drafts), expected)
    sampled = {"do_sample": True, "max_new_tokens": 5, "seed": 0, "assistant_model": small}
    assert base.generate(IDS, **sampled).shape[1] == IDS.shape[1] + 5


# --- Bad input ---


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"fsd_div_threshold": 0.4}, "fsd_div_threshold= says which drafts to accept, but nothing drafts"),
        ({"fsd_div_type": "kl_div"}, "fsd_div_type= says which drafts to accept"),
        ({"assistant_model": "small", "prompt_lookup_num_tokens": 3}, "assistant_model= and prompt_lookup_num_tokens="),
        ({"assistant_model": "small", "fsd_div_threshold": 1, "accept": Exact()}, "fsd_div_threshold= and accept="),
        ({"assistant_model": "small", "fsd_div_threshold": -1}, "threshold=-1 must be"),
        ({"assistant_model": "small", "fsd_div_threshold": "1"}, "threshold='1' must be a number"),
        ({"assistant_model": "small", "fsd_div_threshold": True}, "threshold=True must be a number"),
        ({"assistant_model": "small", "fsd_div_threshold": 1, "fsd_div_type": "kld"}, "unknown fsd_div_type 'kld'"),
        ({"assistant_model": "small", "fsd_div_threshold": 1, "fsd_div_type": 5}, "unknown fsd_div_type '5'"),
        ({"assistant_model": "small", "fsd_div_logit_processor": 5}, "fsd_div_logit_processor=5 must name the call's"),
        ({"assistant_model": "small", "fsd_div_logit_processor": [[]]}, "fsd_div_logit_processor=[[]] must name"),
        ({"assistant_model": "small", "num_assistant_tokens": 0}, "num_assistant_tokens=0 "),
        ({"assistant_model": "small", "num_assistant_tokens": "3"}, "num_assistant_tokens='3' must be a number"),
        ({"assistant_model": "small", "assistant_confidence_threshold": "x"}, "threshold='x' must be a number"),
        ({"assistant_model": "small", "assistant_confidence_threshold": 2}, "assistant_confidence_threshold=2 must be"),
        ({"assistant_model": "small", "num_assistant_tokens_schedule": "up"}, "num_assistant_tokens_schedule='up'"),
        ({"assistant_model": "small", "tree": chain(2), "num_assistant_tokens": 3}, "num_assistant_tokens= is for"),
        ({"draft": PromptLookup(), "num_assistant_tokens": 3}, "num_assistant_tokens= is for assistant_model="),
        ({"tree": chain(2)}, "nothing drafts"),
    ],
    ids=str,
)
def test_contradictions_are_refused_in_one_line(base, small, call, message):
    call = {name: small if isinstance(value, str) and value == "small" else value for name, value in call.items()}
    specheads.patch(base)
    with pytest.raises((ValueError, TypeError)) as caught:
        base.generate(IDS, **call, max_new_tokens=3)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_what_has_no_generate_of_its_own_to_patch_is_refused(base):
    with pytest.raises(ValueError, match="drafts already"):
        specheads.patch(convert(base, "medusa"))
    with pytest.raises(TypeError, match=r"expected a transformers model, not .*from_pretrained"):
        specheads.patch(torch.nn.Linear(2, 2))


# --- transformers' own drafters are left to transformers ---


def dflash():
    module = pytest.importorskip("transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant")
    config = module.MuseGlimmerAssistantConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, target_layer_ids=[1], layer_types=["sliding_attention"],
    )  # fmt: skip
    return module.MuseGlimmerAssistantModel(config)


class SharedStates(LlamaForCausalLM):
    """Gemma 4's assistants have a language-model head, and read another model's states instead of ids."""

    def forward(self, inputs_embeds=None, shared_kv_states=None):
        raise AssertionError


def shared_states():
    return SharedStates(tiny_llama(num_hidden_layers=1).config)


@pytest.mark.parametrize("assistant", [dflash, shared_states])
def test_an_assistant_that_is_no_language_model_is_left_to_the_models_own_generate(base, assistant):
    calls, assistant = [], assistant()
    base.generate = lambda *args, **kwargs: calls.append(kwargs)
    with specheads.patch(base):
        base.generate(IDS, assistant_model=assistant, speculation_type="dflash", max_new_tokens=5)
        base.generate(IDS, assistant_model=assistant, max_new_tokens=5)
    assert [call["assistant_model"] is assistant for call in calls] == [True, True]
    assert calls[0]["speculation_type"] == "dflash"
    with pytest.raises(specheads.UnsupportedModel, match=r"goes to the model's own generate\(assistant_model="):
        specheads.DraftModel(assistant)


def test_a_language_model_without_its_head_is_still_told_how_to_load_it(base):
    with pytest.raises(specheads.UnsupportedModel, match="load it with AutoModelForCausalLM"):
        specheads.DraftModel(base.model)


@pytest.mark.parametrize(
    "options",
    [
        {"speculation_type": "dflash"},
        {"use_mtp": True},
        {"assistant_early_exit": 1},
        {"assistant_ensemble_weight": 0.5},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("in_config", [False, True])
def test_options_of_transformers_own_loop_reach_it_or_are_refused_by_name(base, small, options, in_config):
    calls = []
    call = {"generation_config": GenerationConfig(**options, max_new_tokens=5)} if in_config else dict(options)
    base.generate = lambda *args, **kwargs: calls.append(kwargs)
    with specheads.patch(base):
        base.generate(IDS, assistant_model=small, **call)
        assert calls[0]["assistant_model"] is small and calls[0].keys() >= call.keys()
        with pytest.raises(ValueError, match=f"{next(iter(options))}=.* does not combine with drafts"):
            base.generate(IDS, draft="lookup", **call)
