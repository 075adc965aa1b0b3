"""generate()'s contract: every option means what it means in Hugging Face's own generate(), drafts or no drafts."""

import importlib
import itertools
import re
from functools import partial

import pytest
import torch
from transformers import GenerationConfig

import specheads
from specheads import (
    DynamicTree,
    Fuzzy,
    MaxGram,
    NGram,
    NGramStorage,
    PromptLookup,
    SampledTree,
    Typical,
    chain,
    convert,
)
from specheads.decoding.planner import as_plan, default_static
from tests.support.prompts import BATCHES, PAD, PROMPTS, padded
from tests.support.replay_drafter import assert_same
from tests.support.tiny_models import tiny_llama

# --- Randomness ---


def test_a_seed_reproduces_and_leaves_the_global_generator_alone(model):
    options = {**BATCHES["ragged"], "do_sample": True, "top_k": 0, "temperature": 2.0, "max_new_tokens": 10}
    for tree in (None, SampledTree((2, 1))):
        before = torch.get_rng_state()
        first, again, other = (model.generate(**options, tree=tree, seed=seed) for seed in (5, 5, 6))
        assert torch.equal(before, torch.get_rng_state())
        assert torch.equal(first, again) and not torch.equal(first, other)


def test_torch_manual_seed_governs_generation(model):
    options = {**BATCHES["ragged"], "do_sample": True, "top_k": 0, "temperature": 2.0, "max_new_tokens": 10}
    texts = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        texts.append(model.generate(**options))
        texts.append(model.generate(**options))
    assert torch.equal(texts[0], texts[2]) and torch.equal(texts[1], texts[3])
    assert not torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[4])


def test_greedy_decoding_draws_nothing(model):
    before = torch.get_rng_state()
    model.generate(**BATCHES["ragged"], do_sample=False, max_new_tokens=6)
    model.generate(**BATCHES["ragged"], do_sample=False, max_new_tokens=6, tree=SampledTree((2, 1)))
    assert torch.equal(before, torch.get_rng_state())


def test_num_return_sequences_gives_so_many_rows_a_prompt(model):
    inputs = BATCHES["ragged"]
    out = model.generate(
        **inputs, do_sample=True, top_k=0, temperature=2.0, max_new_tokens=8, num_return_sequences=3, seed=0
    )
    assert len(out) == 9
    columns = inputs["input_ids"].shape[1]
    assert torch.equal(out[:, :columns], inputs["input_ids"].repeat_interleave(3, 0))
    assert len({tuple(row) for row in out.tolist()}) == 9


# --- Where options may come from, and which are refused ---


def test_a_generation_config_counts_as_given_and_is_not_changed(model):
    inputs = BATCHES["ragged"]
    config = GenerationConfig(
        max_new_tokens=9, repetition_penalty=1.7, do_sample=False, eos_token_id=2, pad_token_id=PAD, bos_token_id=1
    )
    before = config.to_dict()
    expected = model.base.generate(**inputs, generation_config=config)
    assert torch.equal(model.generate(**inputs, generation_config=config), expected)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    for drafted in (model.generate(ids, config, attention_mask=mask),
                    specheads.generate(model.base, ids, config, draft="lookup", attention_mask=mask)):  # fmt: skip
        assert torch.equal(drafted, expected), "as the second positional argument"
    out = model.generate(**inputs, generation_config=config, max_new_tokens=4)
    assert torch.equal(out, model.base.generate(**inputs, generation_config=config, max_new_tokens=4))
    assert config.to_dict() == before


def test_the_models_own_generation_config_is_the_default():
    own = convert(tiny_llama(num_hidden_layers=2), "medusa")
    own.generation_config = GenerationConfig(
        max_new_tokens=7, repetition_penalty=1.9, eos_token_id=2, pad_token_id=PAD, bos_token_id=1
    )
    out = own.generate(**BATCHES["ragged"])
    assert torch.equal(out, own.base.generate(**BATCHES["ragged"]))
    assert out.shape[1] == BATCHES["ragged"]["input_ids"].shape[1] + 7


def test_what_a_config_leaves_open_is_the_models_own():
    """As transformers fills it: the own beams are searched, or refused where something drafts, and so is the rest."""
    base, config = tiny_llama(num_hidden_layers=2), GenerationConfig(max_new_tokens=5)
    inputs = BATCHES["one"]
    base.generation_config.num_beams = 4
    expected = base.generate(**inputs, generation_config=config)
    assert torch.equal(specheads.generate(base, **inputs, generation_config=config), expected)
    greedy = base.generate(**inputs, generation_config=config, num_beams=1)
    assert torch.equal(
        specheads.generate(base, **inputs, draft="lookup", generation_config=config, num_beams=1), greedy
    )
    prompts = inputs["input_ids"].tolist()
    for name, value in (("num_beams", 4), ("num_return_sequences", 3), ("penalty_alpha", 0.6)):
        base.generation_config = GenerationConfig(do_sample=name == "num_return_sequences", **{name: value})
        with pytest.raises(ValueError, match=r"beam search|num_return_sequences=3|penalty_alpha=0.6"):
            specheads.generate_many(base, prompts, generation_config=config)
        if name != "num_return_sequences":
            with pytest.raises(ValueError, match="does not combine with drafts"):
                specheads.generate(base, **inputs, draft="lookup", generation_config=config)


def test_what_does_not_combine_with_drafts_is_refused(model):
    for options, message in [
        ({"num_beams": 2}, "beam search does not combine with drafts"),
        ({"generation_config": GenerationConfig(num_beams=3, max_new_tokens=3)}, "beam search"),
        ({"assistant_model": object()}, r"no assistant_model=; give draft=DraftModel\(small\)"),
        ({"prompt_lookup_num_tokens": 3}, 'no prompt_lookup_num_tokens=; give draft="lookup:N"'),
        ({"inputs_embeds": torch.zeros(1, 2, 32)}, "no inputs_embeds=; drafts continue ids"),
        ({"speculation_type": "dflash"}, "speculation_type='dflash' does not combine with drafts"),
        ({"assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight=0.5 does not combine"),
        ({"custom_generate": lambda *args: None}, "no custom_generate="),
        ({"output_attentions": True}, "output_attentions=True is not kept"),
        ({"output_hidden_states": True}, "output_hidden_states=True is not kept"),
        ({"generation_config": GenerationConfig(output_attentions=True)}, "output_attentions=True is not kept"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=0.6 does not combine with drafts"),
        ({"dola_layers": "low"}, "dola_layers='low' does not combine with drafts"),
        ({"force_words_ids": [[50]]}, r"force_words_ids=\[\[50\]\] does not combine with drafts"),
        ({"token_healing": True, "tokenizer": object()}, "token_healing=True does not combine with drafts"),
        ({"cache_implementation": "paged"}, "cache_implementation='paged' does not combine with drafts"),
        ({"constraints": [object()]}, "constraints=.* does not combine with drafts"),
        ({"draft": False, "tree": chain(2)}, "nothing drafts"),
        ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor keeps state"),
    ]:
        with pytest.raises(ValueError, match=message):
            model.generate(**BATCHES["one"], **{"max_new_tokens": 3, **options})


# --- What drafts, which tree, which rule: objects, or the words of the command line ---


def steps_of(generate, **options):
    """What a greedy call emitted and drafted, step by step."""
    inputs = {**BATCHES["one"], "do_sample": False, "max_new_tokens": 12, "return_dict_in_generate": True}
    return [(step.tokens, step.drafted) for step in generate(**inputs, **options).steps]


def test_a_drafters_name_drafts_what_the_drafter_does_in_both_generates(model):
    for name, drafter in [
        ("lookup", PromptLookup()),
        ("ngram", NGram(storage=NGramStorage(3, 97))),
        ("maxgram", MaxGram()),
        (False, None),
    ]:
        plain = partial(specheads.generate, model.base)
        told = steps_of(plain, draft=drafter)
        for call in (model.generate, plain):
            assert steps_of(call, draft=name) == told
            assert not name or steps_of(call, draft=drafter) == told


def test_head_and_true_are_the_models_own_head_and_a_base_alone_has_none(model):
    told = steps_of(model.generate, draft="head")
    assert any(drafted > [0] for _, drafted in told)
    assert steps_of(model.generate, draft=True) == told
    assert steps_of(partial(specheads.generate, model.base), draft=model.head) == told
    for draft in ("head", True):
        with pytest.raises(ValueError, match=f"^draft={draft!r}: this model has no head to draft with"):
            specheads.generate(model.base, **BATCHES["one"], draft=draft)


def test_a_patched_model_takes_the_same_words(model):
    expected = steps_of(model.generate, draft="lookup", tree="chain:2", accept="typical")
    with specheads.patch(model.base) as base:
        assert steps_of(base.generate, draft="lookup", tree="chain:2", accept="typical") == expected


def test_a_rules_text_is_the_rule(model):
    for text, rule in [("typical", Typical()), ("fuzzy:js:0.2", Fuzzy(0.2)), ("block", specheads.Block())]:
        options = {**BATCHES["one"], "do_sample": True, "seed": 3, "max_new_tokens": 12, "temperature": 2.0}
        told = model.generate(**options, accept=rule)
        assert torch.equal(model.generate(**options, accept=text), told)
        assert torch.equal(specheads.generate(model.base, **options, draft=model.head, accept=text), told)


def test_a_trees_text_is_the_tree(model):
    for text, tree in [("chain:3", chain(3)), ("dynamic:12,3,4", DynamicTree(12, 3, 4))]:
        assert steps_of(model.generate, tree=text) == steps_of(model.generate, tree=tree) != steps_of(model.generate)


def test_a_static_trees_text_is_as_deep_as_the_head_drafts():
    for depth in (2, 3):
        head = convert(tiny_llama(num_hidden_layers=2), "medusa", num_heads=depth).head
        assert as_plan("static:12", head) == default_static(12, depth)


def test_what_is_no_drafter_plan_or_rule_is_refused(model):
    importlib.import_module("specheads.models.named")  # it loads checkpoints
    for options, error, message in [
        ({"draft": "heed"}, ValueError, "draft='heed': unknown drafter 'heed'; did you mean 'head'"),
        ({"draft": "out/eagle3"}, OSError, "no such folder: out/eagle3"),
        ({"draft": 3}, TypeError, "draft=int cannot propose trees"),
        ({"draft": PromptLookup}, TypeError, r"draft=PromptLookup is the class of a drafter; .*draft=PromptLookup\(\)"),
        ({"tree": "chains:4"}, ValueError, "'chains:4': unknown tree 'chains'; did you mean 'chain'?"),
        ({"tree": 4}, TypeError, "tree=4 is no plan; give 'chain:4'"),
        ({"tree": DynamicTree}, TypeError, r"tree=DynamicTree is the class of a plan; .*tree=DynamicTree\(\)"),
        ({"accept": "typicl"}, ValueError, "did you mean 'typical'"),
        ({"accept": 0.2}, TypeError, "accept=0.2 is no acceptance rule"),
        ({"accept": Typical}, TypeError, r"accept=Typical is the class of a rule; .*: accept=Typical\(\)$"),
        ({"accept": Fuzzy}, TypeError, r"accept=Fuzzy is the class of a rule; .*: accept=Fuzzy\(threshold\)$"),
    ]:
        for call in (model.generate, partial(specheads.generate, model.base)):
            with pytest.raises(error, match=message):
                call(**BATCHES["one"], max_new_tokens=3, **{"draft": "lookup", **options})


def test_a_length_that_is_no_number_is_refused(model):
    for limit in ["8", True, [8]]:
        for name in ("max_new_tokens", "max_length"):
            with pytest.raises(TypeError, match=f"^{name}={re.escape(repr(limit))} must be a number$"):
                model.generate(**BATCHES["one"], **{name: limit})


def test_text_as_a_prompt_is_told_how_it_becomes_ids(model):
    for prompt in ("def main(", ["def main("]):
        with pytest.raises(TypeError, match=r"is text; .*\*\*tokenizer\(text, return_tensors='pt'\)"):
            specheads.generate(model.base, prompt, max_new_tokens=3)


def test_one_beam_and_false_flags_are_no_reason_to_refuse(model):
    model.generate(**BATCHES["one"], max_new_tokens=3, num_beams=1, output_attentions=False, assistant_model=None)


def test_an_unknown_option_is_refused_by_name(model):
    for name in ["max_new_token", "plan", "stream", "divergences", "compiled", "source_ids"]:
        with pytest.raises(ValueError, match=f"not used by the model: .'{name}'"):
            model.generate(**BATCHES["one"], **{name: 3}, draft="lookup", max_new_tokens=3)


# --- Prompts ---


def test_an_empty_prompt_is_refused(model):
    with pytest.raises(ValueError, match="an empty prompt has nothing to continue"):
        model.generate(torch.zeros(1, 0, dtype=torch.long), max_new_tokens=3)


def test_a_row_of_padding_is_refused_by_its_number(model):
    inputs = {name: value.clone() for name, value in BATCHES["ragged"].items()}
    inputs["attention_mask"][1] = 0
    with pytest.raises(ValueError, match="row 1 of the batch is all padding"):
        model.generate(**inputs, max_new_tokens=3)


def test_no_prompt_at_all_starts_from_bos(model):
    assert torch.equal(
        model.generate(do_sample=False, max_new_tokens=6), model.base.generate(do_sample=False, max_new_tokens=6)
    )


def test_right_padding_is_continued_from_the_last_real_token(model):
    """Where Hugging Face would continue from the padding."""
    left, right = padded(PROMPTS), padded(PROMPTS, side="right")
    columns = left["input_ids"].shape[1]
    out = model.generate(**right, do_sample=False, max_new_tokens=12)
    expected = model.base.generate(**left, do_sample=False, max_new_tokens=12)
    assert torch.equal(out[:, columns:], expected[:, columns:])
    assert torch.equal(out[:, :columns], right["input_ids"])


def test_a_hole_in_the_mask_is_skipped_as_hugging_face_skips_it(model):
    inputs = {name: value.clone() for name, value in BATCHES["ragged"].items()}
    inputs["attention_mask"][2, 4:6] = 0
    assert_same(model, inputs)


def test_padding_without_a_mask_is_found_as_hugging_face_finds_it(model):
    ids = BATCHES["ragged"]["input_ids"]
    out = model.generate(ids, do_sample=False, max_new_tokens=12)
    assert torch.equal(out, model.base.generate(ids, do_sample=False, max_new_tokens=12))
    assert torch.equal(out, model.base.generate(**BATCHES["ragged"], do_sample=False, max_new_tokens=12))


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (torch.tensor([5, 6, 7]), ValueError, r"not \(3,\) of torch.int64; for one prompt give ids.unsqueeze\(0\)"),
        (torch.zeros(1, 2, 3, dtype=torch.long), ValueError, r"ids \(B, T\), whole numbers, not \(1, 2, 3\)"),
        (torch.tensor([[5.0, 6.0]]), ValueError, "torch.float32"),
        (torch.empty(1, 0, dtype=torch.long), ValueError, r"an empty prompt has nothing to continue: \(1, 0\)"),
        (torch.empty(2, 0, dtype=torch.long), ValueError, r"an empty prompt has nothing to continue: \(2, 0\)"),
        (torch.empty(0, 3, dtype=torch.long), ValueError, r"an empty prompt has nothing to continue: \(0, 3\)"),
        (torch.tensor([[5, 97]]), ValueError, "hold id 97, and the model has embeddings for 0 to 96"),
        (torch.tensor([[5, -1]]), ValueError, "hold id -1, and"),
        ([[5, 6]], TypeError, "not list; give"),
        ("def f", TypeError, "is text; give its ids"),
    ],
    ids=str,
)  # fmt: skip
def test_prompts_that_are_none_are_refused_with_what_they_should_be(model, ids, error, message):
    for call in (model.generate, lambda *args, **options: specheads.generate(model.base, *args, **options)):
        for given in ((ids,), ()):
            with pytest.raises(error, match=message):
                call(*given, **({} if given else {"input_ids": ids}), max_new_tokens=3)


def test_right_padding_is_said_once_and_decoded_as_left_padding(model, hf_log):
    right, left = padded(PROMPTS, "right"), padded(PROMPTS)
    options = {"do_sample": False, "max_new_tokens": 8}
    out, expected = model.generate(**right, **options), model.base.generate(**left, **options)
    assert torch.equal(out[:, right["input_ids"].shape[1] :], expected[:, left["input_ids"].shape[1] :])
    said = [record.message for record in hf_log.records if "row 0 is padded on the right" in record.message]
    assert len(said) == 1
    hf_log.clear()
    model.generate(**left, **options)
    assert "padded on the right" not in hf_log.text


@pytest.mark.parametrize("wrap", ["decorator", pytest.param("compile", marks=pytest.mark.slow)])
def test_a_wrapped_forward_is_known_by_its_class(wrap):
    base = tiny_llama()
    ids, options = torch.tensor([[5, 6, 7]]), {"do_sample": False, "max_new_tokens": 12}
    expected, own, calls = base.generate(ids, **options), base.forward, []

    def any_forward(*args, **kwargs):
        calls.append(1)
        return own(*args, **kwargs)

    base.forward = any_forward if wrap == "decorator" else torch.compile(own, backend="eager")
    for head in ("medusa", "eagle3"):
        assert torch.equal(convert(base, head).generate(ids, **options), expected)
    assert torch.equal(specheads.generate(base, ids, draft=specheads.DraftModel(base), **options), expected)
    assert calls or wrap == "compile"


def test_a_draft_model_may_be_a_peft_model(base):
    from tests.support.tiny_models import with_adapter

    adapted = with_adapter()
    ids, options = torch.tensor([[5, 6, 7]]), {"do_sample": False, "max_new_tokens": 12}
    out = specheads.generate(base, ids, draft=specheads.DraftModel(adapted), **options)
    assert torch.equal(out, base.generate(ids, **options))
    expected = adapted.generate(input_ids=ids, **options)
    assert not torch.equal(expected, out)
    assert torch.equal(specheads.generate(adapted, ids, draft=specheads.DraftModel(adapted), **options), expected)


def test_logits_that_are_no_numbers_end_greedy_text_in_an_error():
    """From the token on whose embedding is NaN; none is written as token 0."""
    for compile, draft in itertools.product([False, "eager"], [False, "lookup"]):
        broken = tiny_llama(num_hidden_layers=2)
        options = {"do_sample": False, "eos_token_id": None, "draft": draft, "compile": compile}
        ids = torch.tensor([[5, 9, 11], [9, 11, 60]])
        text = specheads.generate(broken, ids, max_new_tokens=12, **options)
        place = next(i for i in range(5, 15) if text[0, i] not in text[:, :i] and text[0, i] not in text[1])
        with torch.no_grad():
            broken.model.embed_tokens.weight[text[0, place]] = torch.nan
        same = specheads.generate(broken, ids, max_new_tokens=place - 2, **options)  # it is written, and not yet read
        assert torch.equal(same, text[:, : place + 1])
        with pytest.raises(ValueError, match="NaN"):
            specheads.generate(broken, ids, max_new_tokens=12, **options)
        with pytest.raises(ValueError, match="NaN"):
            specheads.generate(broken, text[:1, : place + 1], max_new_tokens=1, **options)
