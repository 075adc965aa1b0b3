"""generate_many(): limits, processors, seeds and stop strings are those of each prompt, and bad input is refused."""

import time

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

import specheads
from specheads import PromptLookup, UnsupportedModel, chain, generate_many
from specheads.decoding.verify.causal import Target
from tests.support.chat_tokenizer import build_tokenizer
from tests.support.refilled import BASE, DRAFTERS, GREEDY, HEADS, PROMPTS, WARM, assert_as_alone, head, small
from tests.support.tiny_models import repetitive_model, tiny_llama

PROCESSORS = {
    "penalty": {"repetition_penalty": 1.3},
    "at least": {"min_new_tokens": 7},
    "n-grams": {"no_repeat_ngram_size": 2, "temperature": 0.8},
    "length": {"exponential_decay_length_penalty": (3, 1.3)},
    "max_length": {"max_new_tokens": None, "max_length": 80},
    "warpers": {"top_k": 9, "top_p": 0.9, "temperature": 1.4},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("draft", [None, PromptLookup(4), "draft model"], ids=["plain", "lookup", "draft model"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_and_limits_are_those_of_each_prompt(name, draft):
    draft = small() if draft == "draft model" else draft
    options = {**WARM, **PROCESSORS[name], "draft": draft}
    assert_as_alone(generate_many(BASE, PROMPTS, batch_size=3, **options), **options)


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


def test_no_prompts_give_no_texts():
    assert generate_many(BASE, [], **GREEDY) == []
    assert list(generate_many(BASE, iter([]), stream=True, **GREEDY)) == []


def test_each_prompt_may_have_its_own_limit():
    for sampled in [False, True]:
        limits = [1 + 11 * i % 29 for i in range(len(PROMPTS))]
        options = {**(WARM if sampled else GREEDY), "eos_token_id": None, "draft": head("eagle3")}
        given = {**options, "max_new_tokens": limits}
        results = generate_many(BASE, PROMPTS, batch_size=3, **given)
        assert [len(one.tokens) for one in results] == limits
        for one, limit in zip(results, limits, strict=True):
            assert_as_alone([one], **{**options, "max_new_tokens": limit})
        with pytest.raises(ValueError, match=f"prompt {len(PROMPTS)}: max_new_tokens= has {len(PROMPTS)} numbers"):
            list(generate_many(BASE, iter([*PROMPTS, [5]]), stream=True, **given))


def test_a_long_text_may_follow_short_ones():
    """A drafter's cache has room for the whole plan, however little the first texts let it draft."""
    for name in ["draft model", *HEADS]:
        options = {**GREEDY, "eos_token_id": None, "draft": DRAFTERS[name]()}
        if name in ("draft model", "eagle", "eagle3", "mtp"):
            options["tree"] = chain(5)
        limits = [3, 3, 20, 20]
        results = generate_many(BASE, PROMPTS[:4], batch_size=2, **{**options, "max_new_tokens": limits})
        for one, limit in zip(results, limits, strict=True):
            assert_as_alone([one], **{**options, "max_new_tokens": limit})


def test_a_short_prompt_may_follow_one_that_nearly_fills_max_length():
    options = {**GREEDY, "eos_token_id": None, "max_new_tokens": None, "max_length": 20, "draft": head("eagle3")}
    prompts = [[*range(3, 20)], [*range(20, 37)], [5, 6, 7], [8, 9, 10]]
    results = generate_many(BASE, prompts, batch_size=2, **options)
    assert [len(one.tokens) for one in results] == [3, 3, 17, 17]
    assert_as_alone(results, **options)


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
        ([[3]] * 2, {"max_new_tokens": [1, None]}, TypeError, "prompt 1: max_new_tokens=None must be a number"),
        ([[3]], {"seed": [1.5], "do_sample": True}, TypeError, r"seed=\[1.5\] must be a whole number"),
        ([[3]], {"batch_size": 0}, ValueError, "batch_size=0 must be at least 1 prompt"),
        ([[3]], {"batch_size": 2.5}, TypeError, "batch_size=2.5 must be a whole number"),
        ([[3]], {"batch_size": "8"}, TypeError, "batch_size='8' must be a whole number"),
        ([[3]], {"batch_size": True}, TypeError, "batch_size=True must be a whole number"),
        ([[3]], {"max_new_tokens": "8"}, TypeError, "max_new_tokens='8' must be a number"),
        ([[3]] * 2, {"seed": "8"}, TypeError, "seed='8' must be a whole number"),
        ([[3]], {"num_beams": 2}, ValueError, "beam search does not combine with refilled batches"),
        ([[3]], {"num_return_sequences": 2}, ValueError, "one text for each prompt, not num_return_sequences=2"),
        (
            [[3]], {"generation_config": GenerationConfig(num_return_sequences=3, do_sample=True)}, ValueError,
            "not num_return_sequences=3; give num_return_sequences=1",
        ),
        ([[3]], {"output_scores": True}, ValueError, "takes no output_scores=True"),
        ([[3]], {"output_logits": True}, ValueError, "takes no output_logits=True"),
        ([[3]], {"return_dict_in_generate": True}, ValueError, "takes no return_dict_in_generate=True"),
        ([[3]], {"input_ids": torch.ones(1, 2)}, ValueError, r"takes no input_ids=tensor\("),
        ([[3]], {"attention_mask": torch.ones(1, 2)}, ValueError, r"takes no attention_mask=tensor\("),
        ([[3]], {"tree": chain(2)}, ValueError, "nothing drafts"),
    ],
)  # fmt: skip
def test_what_cannot_be_decoded_is_refused_before_anything_runs(monkeypatch, prompts, options, error, message):
    monkeypatch.setattr(Target, "prefill", lambda *args, **kwargs: pytest.fail("a prompt ran"))
    with pytest.raises(error, match=message):
        generate_many(BASE, prompts, stream=True, **{**GREEDY, **options})


def test_options_that_ask_for_no_more_than_one_text_a_prompt_are_taken():
    usual = {"num_return_sequences": 1, "return_dict_in_generate": False, "output_scores": None}
    (one,), (other,) = generate_many(BASE, [[3]], **GREEDY, **usual), generate_many(BASE, [[3]], **GREEDY)
    assert one.tokens == other.tokens


def test_the_time_of_a_prompt_that_waits_to_run_alone_begins_when_it_runs():
    base = tiny_llama(
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}, max_position_embeddings=24,
        eos_token_id=None,
    )  # fmt: skip
    options = {"do_sample": False, "max_new_tokens": 8, "max_time": 1.0}
    began = time.perf_counter()
    first, *_ = generate_many(
        base, [[5] * 20] + [[6, 7]] * 4, batch_size=2, on_tokens=lambda *_: time.sleep(0.1), **options
    )
    assert time.perf_counter() - began > 1 and len(first.tokens) > 1


def test_an_error_of_generate_names_the_prompt():
    with pytest.raises(ValueError, match=r"prompt 0: .*no_such_option"):
        generate_many(BASE, PROMPTS, no_such_option=1, **GREEDY)


def test_a_base_that_cannot_be_served_says_so():
    base = repetitive_model("GPT-2")
    base.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedModel, match="needs attention"):
        generate_many(base, PROMPTS, **GREEDY)
