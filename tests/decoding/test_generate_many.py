"""generate_many(): each text is that of its prompt alone, whatever was in its row before and is beside it now."""

import itertools
import random

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import specheads
from specheads import (
    AdaptiveChain,
    Block,
    Cascade,
    DraftModel,
    DraftTree,
    MaxGram,
    NGram,
    NGramStorage,
    PromptLookup,
    SampledTree,
    UnsupportedModel,
    chain,
    convert,
    generate_many,
)
from specheads.decoding.drafters import AutoDrafter
from specheads.decoding.planner.by_cost import CostTable, Curve, StepCosts
from specheads.decoding.probs.randomness import row_seeds
from specheads.decoding.target.causal import Target
from tests.support.chat_tokenizer import build_tokenizer
from tests.support.families import FAMILIES, LENGTH_DEPENDENT, RECURRENT, build
from tests.support.seq2seq_models import MODELS, SOURCES
from tests.support.tiny_models import near, repetitive_model

COIN = random.Random(0)
LENGTHS = (5, 1, 30, 2, 9, 64, 17, 3, 1, 70, 8)
PROMPTS = [[COIN.randrange(3, 97) for _ in range(length)] for length in LENGTHS]
ENDS = {"eos_token_id": [10, 34, 37, 63, 76, 95], "pad_token_id": 0}
GREEDY = {"max_new_tokens": 24, "do_sample": False, **ENDS}
WARM = {"max_new_tokens": 16, "do_sample": True, "seed": 5, **ENDS}
BASE = repetitive_model("Llama")
HEADS = {
    "medusa": {"num_heads": 3}, "hydra": {"num_heads": 3, "prefix_layer": True}, "eagle": {}, "eagle3": {},
    "mtp": {"num_modules": 2},
    "parallel": {"block_size": 4}, "dflash": {"sample_from_anchor": False, "block_size": 5, "causal": False},
}  # fmt: skip


LINE = Curve(((1, 4.0), (64, 4.5)))
CHEAP = CostTable(None, {1: StepCosts(1, {64: LINE}, LINE, LINE, Curve(((1, 0.1),)), Curve(((1, 0.1),)))})


def head(name, base=BASE):
    """An untrained head, away from the base's own weights so that its drafts depend on all that it reads."""
    torch.manual_seed(1)
    own = convert(base, {"dflash": "parallel"}.get(name, name), **HEADS[name]).head
    for parameter in own.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return own


def small():
    return DraftModel(near(BASE, 0.05))


DRAFTERS = {
    "automatic": lambda: AutoDrafter(head("eagle3"), CHEAP), "automatic copies": lambda: AutoDrafter(None, CHEAP),
    "none": lambda: None, "lookup": lambda: PromptLookup(4), "n-grams": lambda: NGram(4, filler_top_k=2),
    "max-gram": lambda: MaxGram(4), "draft model": small,
    "cascade": lambda: Cascade([small(), MaxGram()], [[2, 3], [0, 3]]),
    "cascade with a head": lambda: Cascade([head("eagle3"), small(), NGram(3)], [[2, 2, 0], [0, 2, 2], [0, 0, 2]]),
    **{name: lambda name=name: head(name) for name in HEADS},
}  # fmt: skip


# Others' drafts decide whether a row's own pay, and n-grams help each other, so their steps depend on the batch.
SHARED = {"n-grams", "cascade with a head", "automatic", "automatic copies"}


def alone(result, base=BASE, **options):
    """The new tokens of each step of generate() for the prompt of a result by itself."""
    options = {**options, "seed": result.seed, "return_dict_in_generate": True}
    ids = torch.tensor([result.prompt])
    out = specheads.generate(base, ids, attention_mask=torch.ones_like(ids), **options)
    return [step.tokens[0] for step in out.steps]


def assert_as_alone(results, base=BASE, *, steps=True, **options):
    """steps: also that each step gave the same tokens, so that the drafts were the same too."""
    for one in results:
        wanted, found = alone(one, base, **options), [step.tokens[0] for step in one.steps]
        assert one.tokens == list(itertools.chain(*wanted)) == list(itertools.chain(*found)), one.index
        assert not steps or found == wanted, one.index


# --- Every drafter ---


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", DRAFTERS)
def test_each_greedy_text_is_that_of_its_prompt_alone(name):
    draft = DRAFTERS[name]()
    results = generate_many(BASE, PROMPTS, batch_size=3, draft=draft, **GREEDY)
    assert [one.index for one in results] == [*range(len(PROMPTS))]
    assert [one.prompt for one in results] == PROMPTS
    lengths = {len(one.tokens) for one in results}
    assert {1, 24} <= lengths and len(lengths) > 4, "rows end at their first token, at the limit and in between"
    assert_as_alone(results, steps=name not in SHARED, draft=draft, **GREEDY)


@pytest.mark.sampled(3)
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


def test_n_grams_learn_every_prompt_that_takes_a_row():
    storage = NGramStorage(2)
    results = generate_many(BASE, PROMPTS, batch_size=3, draft=NGram(4, storage=storage), **GREEDY)
    drafted_for = [one.prompt for one in results if len(one.steps) > 1]
    assert len(drafted_for) > 6
    for prompt in drafted_for:
        assert all(after in storage.followers([token], 97) for token, after in itertools.pairwise(prompt))


@pytest.mark.parametrize("batch_size", [1, 2, len(PROMPTS), 50])
def test_any_number_of_rows_gives_the_same_texts(batch_size):
    options = {**WARM, "draft": PromptLookup(4)}
    wanted = [one.tokens for one in generate_many(BASE, PROMPTS, batch_size=3, **options)]
    assert [one.tokens for one in generate_many(BASE, PROMPTS, batch_size=batch_size, **options)] == wanted


# --- Every kind of cache ---


KINDS = ["Llama", "Mistral", "Gemma-3", "DeepSeek-V3", "Llama-4", "GPT-2", "Qwen2-MoE"]


@pytest.mark.parametrize("name", [*KINDS, "Qwen3.5", "LFM2", "Falcon-H1", "Jamba"])
@pytest.mark.parametrize("drafts", ["eagle3", "medusa", None])
@pytest.mark.sampled(4)
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
    long = [COIN.randrange(3, 97) for _ in range(500)]
    options = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
    generate_many(BASE, [long, [7, 8], [9] * 600, [9]], batch_size=1, **options)
    assert [attended[i] for i in (4, 9, 14, 19)] == [507, 64, 607, 64] and len(set(map(id, caches))) == 1


# --- Options ---

PROCESSORS = {
    "penalty": {"repetition_penalty": 1.3},
    "at least": {"min_new_tokens": 7},
    "n-grams": {"no_repeat_ngram_size": 2, "temperature": 0.8},
    "length": {"exponential_decay_length_penalty": (3, 1.3)},
    "max_length": {"max_new_tokens": None, "max_length": 80},
    "warpers": {"top_k": 9, "top_p": 0.9, "temperature": 1.4},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("draft", [None, PromptLookup(4), "draft model"], ids=["plain", "lookup", "draft model"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_and_limits_are_those_of_each_prompt(name, draft):
    draft = small() if draft == "draft model" else draft
    options = {**WARM, **PROCESSORS[name], "draft": draft}
    assert_as_alone(generate_many(BASE, PROMPTS, batch_size=3, **options), **options)


@pytest.mark.parametrize("order", [(60, 5, 58), (5, 60, 7)])
def test_drafts_of_a_short_text_stay_inside_learned_positions_that_a_long_one_nearly_fills(order):
    base = build("GPT2Config", {"n_positions": 64, "max_position_embeddings": 64})
    prompts = [[(7 * i + n) % 90 + 3 for i in range(n)] for n in order]
    options = {"max_length": 64, "max_new_tokens": None, "draft": PromptLookup(6), "do_sample": False}
    together = specheads.generate_many(base, prompts, batch_size=2, **options)
    assert [one.tokens for one in together] == [
        specheads.generate_many(base, [prompt], batch_size=1, **options)[0].tokens for prompt in prompts
    ]


def test_a_stop_string_ends_each_text():
    tokenizer = build_tokenizer()
    wanted = generate_many(BASE, PROMPTS, tokenizer=tokenizer, **GREEDY)
    string = wanted[0].text[3]
    ended = 0
    for batch_size in (1, 3):
        results = generate_many(
            BASE, PROMPTS, batch_size=batch_size, tokenizer=tokenizer, stop_strings=[string], **GREEDY
        )
        for one, whole in zip(results, wanted, strict=True):
            assert one.tokens == whole.tokens[: len(one.tokens)] and string not in one.text[:-1]
            ended += len(one.tokens) < len(whole.tokens)
            assert (len(one.tokens) < len(whole.tokens)) <= (string == one.text[-1:])
    assert ended


def test_a_prefix_function_is_called_with_the_index_of_the_prompt():
    asked = {}

    def allowed(index, ids):
        asked.setdefault(index, []).append(ids.tolist())
        return [10 + index, 40 + index, 2]

    results = generate_many(BASE, PROMPTS, batch_size=3, prefix_allowed_tokens_fn=allowed, **GREEDY)
    for one in results:
        assert {*one.tokens} <= {10 + one.index, 40 + one.index, 2}
        assert all(ids[: len(one.prompt)] == one.prompt for ids in asked[one.index])


class Counting(LogitsProcessor):
    """Bans the token of its number of calls: whoever calls it too often has other texts."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        assert len(input_ids) == 1
        return scores.clone().index_fill_(1, torch.tensor([self.calls % 97]), -torch.inf)


def test_a_processor_that_may_keep_state_gets_one_prompt_at_a_time(hf_log):
    processor = Counting()
    results = generate_many(BASE, PROMPTS, logits_processor=LogitsProcessorList([processor]), draft="lookup", **GREEDY)
    assert processor.calls == sum(len(one.tokens) for one in results)
    assert "decoded 1 prompts at a time: Counting may keep state" in hf_log.text
    other = Counting()
    for one in results:
        ids, more = torch.tensor([one.prompt]), LogitsProcessorList([other])
        options = {**GREEDY, "logits_processor": more, "attention_mask": torch.ones_like(ids)}
        assert specheads.generate(BASE, ids, **options)[0, len(one.prompt) :].tolist() == one.tokens


class Forgetful:
    """A drafter of another's making, which says nothing of refilling."""

    layers = ()

    def default_plan(self, device, do_sample):
        return chain(2)

    def propose(self, context, sampler, plan):
        first = context.once("first", lambda: [history[-1] for history in context.history])
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


def test_no_prompts_give_no_texts():
    assert generate_many(BASE, [], **GREEDY) == []
    assert list(generate_many(BASE, iter([]), stream=True, **GREEDY)) == []


def test_statistics_are_those_of_the_prompt_alone():
    options = {**GREEDY, "draft": small(), "tree": chain(3)}
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


@pytest.mark.parametrize("sampled", [False, True])
def test_each_prompt_may_have_its_own_limit(sampled):
    limits = [COIN.randrange(1, 30) for _ in PROMPTS]
    options = {**(WARM if sampled else GREEDY), "eos_token_id": None, "draft": head("eagle3")}
    given = {**options, "max_new_tokens": limits}
    results = generate_many(BASE, PROMPTS, batch_size=3, **given)
    assert [len(one.tokens) for one in results] == limits
    for one, limit in zip(results, limits, strict=True):
        assert_as_alone([one], **{**options, "max_new_tokens": limit})
    with pytest.raises(ValueError, match=f"prompt {len(PROMPTS)}: max_new_tokens= has {len(PROMPTS)} numbers"):
        list(generate_many(BASE, iter([*PROMPTS, [5]]), stream=True, **given))


def test_without_a_seed_torchs_own_governs():
    options = {**WARM, "seed": None}
    texts = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        results = generate_many(BASE, PROMPTS, batch_size=3, **options)
        texts.append([one.tokens for one in results])
    assert texts[0] == texts[1] != texts[2]
    assert_as_alone(results, **options)
    own = [7 * i for i in range(len(PROMPTS))]
    results = generate_many(BASE, PROMPTS, batch_size=3, **{**WARM, "seed": own})
    assert [one.seed for one in results] == own
    assert_as_alone(results, **options)


@pytest.mark.parametrize(
    ("prompts", "options", "error", "message"),
    [
        ([[3], []], {}, ValueError, "prompt 1 has no tokens; give at least one"),
        ([[3], [4, 97]], {}, ValueError, "prompt 1 holds id 97, and the model has embeddings for 0 to 96"),
        ([[3], [4, -1]], {}, ValueError, "prompt 1 holds id -1"),
        ([[3], "text"], {}, TypeError, "prompt 1 is text, 'text'; give tokenizer= too, or its ids"),
        ([[3], 4], {}, TypeError, "prompt 1 must be a text or a list of ids, not 4"),
        ("text", {}, TypeError, "prompts='text' must be a list of prompts"),
        ([[3], [4] * 2200], {}, ValueError, "prompt 1 has 2200 tokens, and the base's max_position_embeddings=2200"),
        (
            [[3], [4] * 50], {"max_length": 50, "max_new_tokens": None}, ValueError,
            "prompt 1 has 50 tokens, and max_length=50 leaves no room for more; give a shorter one",
        ),
        ([[3]] * 3, {"seed": [1, 2], "do_sample": True}, ValueError, "seed= has 2 numbers for 3 prompts"),
        ([[3]] * 3, {"max_new_tokens": [1, 2]}, ValueError, "max_new_tokens= has 2 numbers for 3 prompts"),
        ([[3]] * 2, {"max_new_tokens": [1, 0]}, ValueError, "prompt 1: max_new_tokens=0 must be at least 1"),
        ([[3]], {"seed": [1.5], "do_sample": True}, TypeError, r"seed=\[1.5\] must be a whole number"),
        ([[3]], {"batch_size": 0}, ValueError, "batch_size=0 must be at least 1 prompt"),
        ([[3]], {"num_beams": 2}, ValueError, "beam search does not combine with refilled batches"),
        ([[3]], {"num_return_sequences": 2}, ValueError, r"generate_many\(\) takes no num_return_sequences="),
        ([[3]], {"tree": chain(2)}, ValueError, "nothing drafts"),
    ],
)  # fmt: skip
def test_what_cannot_be_decoded_is_refused_before_anything_runs(monkeypatch, prompts, options, error, message):
    monkeypatch.setattr(Target, "prefill", lambda *args, **kwargs: pytest.fail("a prompt ran"))
    with pytest.raises(error, match=message):
        generate_many(BASE, prompts, stream=True, **{**GREEDY, **options})


def test_an_error_of_generate_names_the_prompt():
    with pytest.raises(ValueError, match=r"prompt 0: .*no_such_option"):
        generate_many(BASE, PROMPTS, no_such_option=1, **GREEDY)


def test_a_base_that_cannot_be_served_says_so():
    base = repetitive_model("GPT-2")
    base.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedModel, match="needs attention"):
        generate_many(base, PROMPTS, **GREEDY)
