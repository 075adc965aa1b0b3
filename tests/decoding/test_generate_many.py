"""generate_many(): each text is that of its prompt alone, whatever was in its row before and is beside it now."""

import itertools

import pytest
import torch

import specheads
from specheads import (
    AdaptiveChain,
    Block,
    DraftModel,
    DraftTree,
    DynamicTree,
    NGram,
    NGramStorage,
    PromptLookup,
    SampledTree,
    chain,
    convert,
    generate_many,
)
from specheads.decoding.probs.randomness import row_seeds
from specheads.decoding.verify.causal import Target
from tests.support.families import FAMILIES, LENGTH_DEPENDENT, RECURRENT, build
from tests.support.refilled import BASE, DRAFTERS, GREEDY, HEADS, PROMPTS, SHARED, WARM, assert_as_alone, head, small
from tests.support.seq2seq_models import MODELS, SOURCES
from tests.support.tiny_models import near

# --- Every drafter ---


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", DRAFTERS)
def test_each_greedy_text_is_that_of_its_prompt_alone(name):
    draft = DRAFTERS[name]()
    results = generate_many(BASE, PROMPTS, batch_size=3, draft=draft, **GREEDY)
    assert [one.index for one in results] == [*range(len(PROMPTS))]
    assert [one.prompt for one in results] == PROMPTS
    lengths = {len(one.tokens) for one in results}
    assert {1, 24} <= lengths and len(lengths) > 4, "rows end at their first token, at the limit and in between"
    assert_as_alone(results, steps=name not in SHARED, draft=draft, **GREEDY)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", DRAFTERS)
def test_each_sampled_text_is_that_of_its_prompt_alone_by_its_seed(name):
    draft = DRAFTERS[name]()
    results = generate_many(BASE, PROMPTS, batch_size=3, draft=draft, **WARM)
    assert [one.seed for one in results] == row_seeds(5, len(PROMPTS))
    assert_as_alone(results, steps=name not in SHARED, draft=draft, **WARM)


@pytest.mark.parametrize(
    ("tree", "rule"),
    [(SampledTree((1, 1, 1)), None), (SampledTree((2, 1)), None), (SampledTree((1, 1, 1)), Block())],
    ids=repr,
)
@pytest.mark.parametrize("name", ["draft model", *HEADS])
@pytest.mark.sampled(4)
def test_drafts_drawn_in_a_refilled_row_are_those_drawn_alone(name, tree, rule):
    """The text depends on the distributions that were drafted, and so on all that the drafter remembers of a row."""
    options = {**WARM, "draft": DRAFTERS[name](), "tree": tree, "accept": rule}
    results = generate_many(BASE, PROMPTS, batch_size=3, **options)
    assert_as_alone(results, **options)
    assert any(sum(step.accepted[0] for step in one.steps) for one in results[3:])


def test_a_sampled_adaptive_chain_ends_in_a_batch_where_it_ends_alone():
    options = {**WARM, "draft": small(), "tree": AdaptiveChain(6, 0.3, sampled=True)}
    assert_as_alone(generate_many(BASE, PROMPTS, batch_size=3, **options), **options)


def test_a_lossy_rules_text_in_a_batch_is_that_of_its_prompt_alone():
    """Where drafts decide the text, a row's must not depend on how long others go on drafting."""
    options = {**GREEDY, "eos_token_id": None, "draft": DraftModel(near(BASE, 0.3)), "accept": "typical:0.05:0.5"}
    assert_as_alone(generate_many(BASE, PROMPTS, batch_size=3, **options), **options)


def test_a_tree_near_its_rows_limit_is_chosen_among_what_the_row_has_room_for():
    """However deep others draft: the nodes are those drafted alone, and with them the text of a lossy rule."""
    for rule in ["topn:97:1.0", "topn:5:0.1"]:
        options = {**GREEDY, "eos_token_id": None, "accept": rule}
        options |= {"draft": DraftModel(near(BASE, 0.3)), "tree": DynamicTree(12, 4, 3)}
        limits = [24, 24, *[5] * 9]
        results = generate_many(BASE, PROMPTS, batch_size=11, **{**options, "max_new_tokens": limits})
        for one, limit in zip(results, limits, strict=True):
            assert_as_alone([one], **{**options, "max_new_tokens": limit})
            out = specheads.generate(
                BASE, torch.tensor([one.prompt]), return_dict_in_generate=True, **{**options, "max_new_tokens": limit}
            )
            assert [step.drafted for step in one.steps] == [step.drafted for step in out.steps]


def test_n_grams_learn_every_prompt_that_takes_a_row():
    storage = NGramStorage(2)
    results = generate_many(BASE, PROMPTS, batch_size=3, draft=NGram(4, storage=storage), **GREEDY)
    drafted_for = [one.prompt for one in results if len(one.steps) > 1]
    assert len(drafted_for) > 6
    for prompt in drafted_for:
        assert all(after in storage.followers([token], 97) for token, after in itertools.pairwise(prompt))


def test_any_number_of_rows_gives_the_same_texts():
    for batch_size in [1, 2, len(PROMPTS), 50]:
        options = {**WARM, "draft": PromptLookup(4)}
        wanted = [one.tokens for one in generate_many(BASE, PROMPTS, batch_size=3, **options)]
        assert [one.tokens for one in generate_many(BASE, PROMPTS, batch_size=batch_size, **options)] == wanted


# --- Every kind of cache ---


KINDS = ["Llama", "Mistral", "Gemma-3", "DeepSeek-V3", "Llama-4", "GPT-2", "Qwen2-MoE"]


@pytest.mark.parametrize("name", [*KINDS, "Qwen3.5", "LFM2", "Falcon-H1", "Jamba"])
@pytest.mark.parametrize("drafts", ["eagle3", "medusa", None])
@pytest.mark.sampled(9)
def test_every_kind_of_layer_is_refilled(name, drafts):
    base = build(*(FAMILIES | RECURRENT)[name])
    base.generation_config.eos_token_id = [*range(3, 12)]
    options = {"max_new_tokens": 20, "do_sample": True, "seed": 1, "draft": drafts and head(drafts, base)}
    if drafts:
        options["tree"] = SampledTree((1, 1))
    results = generate_many(base, PROMPTS, batch_size=3, **options)
    assert len({len(one.tokens) for one in results}) > 2
    assert_as_alone(results, base, **options)


@pytest.mark.parametrize("name", LENGTH_DEPENDENT)
def test_texts_that_may_reach_other_positions_run_alone(name, hf_log):
    """Up to the boundary of 24 tokens a batch is refilled; texts that may pass it would change one another."""
    base = build(*LENGTH_DEPENDENT[name])
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": [*range(3, 12)], "draft": head("eagle3", base)}
    prompts = [prompt for prompt in PROMPTS if len(prompt) < 20] + [PROMPTS[2][:22]]
    assert_as_alone(generate_many(base, prompts, batch_size=2, **options), base, **options)
    assert "the base's positions change at 24 tokens, and its text may have" in hf_log.text


class Fixed(PromptLookup):
    """A drafter that keeps its rows."""

    refillable = False


@pytest.mark.parametrize("name", LENGTH_DEPENDENT)
def test_so_they_do_where_batches_are_not_refilled(name, hf_log):
    base = build(*LENGTH_DEPENDENT[name])
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "draft": Fixed(4)}
    prompts = [prompt for prompt in PROMPTS if len(prompt) < 20] + [PROMPTS[2][:22]]
    assert_as_alone(generate_many(base, prompts, batch_size=2, **options), base, **options)
    assert "decoded 2 prompts at a time" in hf_log.text and "positions change at 24 tokens" in hf_log.text


@pytest.mark.sampled(4)
@pytest.mark.parametrize("draft", [None, "lookup", "draft model"])
@pytest.mark.parametrize("name", MODELS)
def test_encoder_decoders_are_decoded_batch_by_batch(name, draft, hf_log):
    base = MODELS[name]()
    own = DraftModel(near(base, 0.05)) if draft == "draft model" else draft
    sources = [*SOURCES, *[source[::-1] for source in SOURCES]]
    options = {"max_new_tokens": 12, "do_sample": True, "seed": 2, "draft": own}
    assert_as_alone(generate_many(base, sources, batch_size=4, **options), base, **options)
    assert f"decoded 4 prompts at a time: {type(base).__name__} is an encoder-decoder" in hf_log.text


def test_a_short_text_after_a_long_one_attends_few_slots(monkeypatch):
    attended, caches = [], []  # slots, at most as many as the longest text so far may take

    def verify(self, tree, plain=Target.verify):
        out = plain(self, tree)
        attended.append(self.cache.end - self.cache.scratch)
        caches.append(self.cache)
        return out

    monkeypatch.setattr(Target, "verify", verify)
    long = [3 + 7 * i % 94 for i in range(500)]
    options = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
    generate_many(BASE, [long, [7, 8], [9] * 600, [9]], batch_size=1, **options)
    assert [attended[i] for i in (4, 9, 14, 19)] == [507, 64, 607, 64] and len(set(map(id, caches))) == 1


# --- What runs alone, or batch by batch ---


def test_drafts_of_a_short_text_stay_inside_learned_positions_that_a_long_one_nearly_fills():
    for order in [(60, 5, 58), (5, 60, 7)]:
        base = build("GPT2Config", {"n_positions": 64, "max_position_embeddings": 64})
        prompts = [[(7 * i + n) % 90 + 3 for i in range(n)] for n in order]
        options = {"max_length": 64, "max_new_tokens": None, "draft": PromptLookup(6), "do_sample": False}
        together = specheads.generate_many(base, prompts, batch_size=2, **options)
        assert [one.tokens for one in together] == [
            specheads.generate_many(base, [prompt], batch_size=1, **options)[0].tokens for prompt in prompts
        ]


class Forgetful:
    """A drafter of another's making, which says nothing of refilling."""

    layers = ()

    def default_plan(self, device, do_sample):
        return chain(2)

    def propose(self, context, sampler, plan):
        first = context.memoize("first", lambda: [history[-1] for history in context.history])
        return DraftTree.chains(context.root, [[token, token][: plan.depth] for token in first])


def test_a_drafter_that_cannot_be_refilled_drafts_batch_by_batch(hf_log):
    results = generate_many(BASE, PROMPTS, batch_size=4, draft=Forgetful(), **WARM)
    assert_as_alone(results, draft=Forgetful(), **WARM)
    assert "decoded 4 prompts at a time: Forgetful cannot change the prompt of one row" in hf_log.text


def test_a_text_that_a_draft_model_cannot_read_runs_alone(hf_log):
    short = near(BASE, 0.05)
    short.config.max_position_embeddings = 40
    options = {**WARM, "max_new_tokens": 24, "draft": DraftModel(short), "tree": SampledTree((1, 1))}
    assert_as_alone(generate_many(BASE, [p for p in PROMPTS if len(p) < 40], batch_size=3, **options), **options)
    assert "prompts decoded alone: 2, such as prompt 2: the drafter reads 40 tokens" in hf_log.text


def test_a_model_with_a_head_drafts_with_it():
    model = convert(BASE, "medusa", num_heads=3)
    results = model.generate_many(PROMPTS, batch_size=3, **GREEDY)
    assert any(step.drafted[0] for one in results for step in one.steps)
    plain = model.generate_many(PROMPTS, batch_size=3, draft=False, **GREEDY)
    assert [one.tokens for one in plain] == [one.tokens for one in results]
    assert not any(step.drafted[0] for one in plain for step in one.steps)


# --- What comes and goes ---


def test_results_come_as_they_finish_and_prompts_are_read_as_rows_become_free():
    read, gained, reported = [], {}, []

    def prompts():
        for index, prompt in enumerate(PROMPTS):
            read.append(index)
            yield prompt

    def on_tokens(index, tokens):
        gained.setdefault(index, []).extend(tokens)

    results = generate_many(
        BASE, prompts(), batch_size=2, stream=True, on_tokens=on_tokens, draft=PromptLookup(4),
        report=lambda done, total: reported.append((done, total)), **GREEDY,
    )  # fmt: skip
    assert read == []
    order = []
    for one in results:
        order.append(one.index)
        assert len(read) <= len(order) + 1 and gained[one.index] == one.tokens
    assert sorted(order) == [*range(len(PROMPTS))] != order
    assert reported == [(n, None) for n in range(1, len(PROMPTS) + 1)]
    generate_many(BASE, PROMPTS, **GREEDY, report=lambda done, total: reported.append((done, total)))
    assert reported[-1] == (len(PROMPTS), len(PROMPTS))


def test_statistics_are_those_of_the_prompt_alone():
    for drafter in [small(), DraftModel(BASE)]:
        options = {**GREEDY, "draft": drafter, "tree": chain(3)}
        for one in generate_many(BASE, PROMPTS, batch_size=3, **options):
            out = specheads.generate(BASE, torch.tensor([one.prompt]), return_dict_in_generate=True, **options)
            wanted, found = out.statistics(), one.statistics()
            for name in ("tokens", "steps", "accepted", "accepted_length", "accepted_by_depth", "lossless"):
                assert found[name] == wanted[name], name


def test_texts_are_encoded_and_decoded():
    class Letters:
        pad_token_id = 0

        def __call__(self, text):
            return {"input_ids": [3 + ord(letter) % 90 for letter in text]}

        def decode(self, ids, skip_special_tokens):
            return "".join(chr(97 + i % 26) for i in ids)

    (one,) = generate_many(BASE, ["abc"], tokenizer=Letters(), **GREEDY)
    assert one.prompt == [10, 11, 12] and one.text == Letters().decode(one.tokens, True)
    assert generate_many(BASE, [one.prompt], **GREEDY)[0].text is None
