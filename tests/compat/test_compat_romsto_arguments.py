"""romsto's functions: names, order and defaults of their arguments, and bad ones."""

import inspect
import re

import pytest
import torch
from transformers import LogitsProcessorList

from specheads import compat
from tests.reference.greedy_replay import PROMPT

MODELS = {"inputs": None, "drafter": None, "target": None, "model": None, "ngramstorage": None}
DECODING = {"max_gen_len": 40, "logits_processor": None, "eos_tokens_id": 1, "pad_token_id": 0, "use_cache": False}
AUTOREGRESSIVE = ["inputs", "model", *DECODING, "debug"]
SPECULATIVE = [
    "inputs", "drafter", "target", "tokenizer", "gamma", "logits_processor", "max_gen_len", "eos_tokens_id",
    "pad_token_id", "use_cache", "skip_sample_adjustment", "first_target", "debug",
]  # fmt: skip
NGRAM = [
    "inputs", "ngramstorage", "target", "tokenizer", "gamma", "filler_top_k", "logits_processor", "max_gen_len",
    "eos_tokens_id", "pad_token_id", "use_cache", "first_target", "stop_if_unknown", "debug",
]  # fmt: skip
BEAMS = [
    "inputs", "model", "max_gen_len", "num_beams", "top_k", "min_length", "alpha", "eos_tokens_id", "pad_token_id",
    "debug", "tokenizer",
]  # fmt: skip
DEFAULTS = {
    **DECODING, "debug": False, "tokenizer": None, "gamma": 5, "skip_sample_adjustment": False, "first_target": True,
    "filler_top_k": 3, "stop_if_unknown": False, "num_beams": 4, "top_k": 3, "min_length": 5.0, "alpha": 1.2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("autoregressive_generate", AUTOREGRESSIVE), ("autoregressive_generate_encoder_decoder", AUTOREGRESSIVE),
        ("speculative_generate", SPECULATIVE), ("speculative_generate_encoder_decoder", SPECULATIVE),
        ("ngram_assisted_speculative_generate", NGRAM), ("beam_search_generate", BEAMS),
    ],
)  # fmt: skip
def test_names_order_and_defaults_of_the_arguments_are_theirs(name, order):
    ours = [p for p in inspect.signature(getattr(compat, name)).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    assert [p.name for p in ours] == order
    empty = inspect.Parameter.empty
    assert [p.default for p in ours] == [empty if p.name in MODELS else DEFAULTS[p.name] for p in ours]


class Called(compat.MultinomialProcessor):
    def __call__(self, logits):
        return logits.softmax(-1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 0}, "gamma=0 "),
        ({"max_gen_len": 0}, "max_gen_len=0 "),
        ({"logits_processor": LogitsProcessorList([])}, "must be one of specheads.compat's"),
        ({"logits_processor": print}, "must be one of specheads.compat's"),
        ({"gamma": "4"}, "gamma='4' "),
        ({"max_gen_len": 4.5}, "max_gen_len=4.5 "),
        ({"eos_tokens_id": None}, "eos_tokens_id=None must be an id or a list of ids"),
        ({"end_tokens_id": [2, None]}, "end_tokens_id=[2, None] must be an id or a list of ids"),
        ({"target": "llama"}, "target='llama' must be a model"),
        ({"drafter": None}, "drafter=None must be a model"),
        ({"inputs": "def main("}, "inputs must be a list of ids, such as tokenizer(text).input_ids, not 'def main('"),
        ({"inputs": torch.tensor([PROMPT])}, "not a tensor (1, 6)"),
        ({"inputs": []}, "inputs=[] has nothing to continue"),
        ({"logits_processor": Called(1.0)}, "Called has its own __call__"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_bad_arguments_are_refused_in_one_line(target, small, options, message):
    with pytest.raises((ValueError, TypeError)) as caught:
        compat.speculative_generate(**{"inputs": PROMPT, "drafter": small, "target": target, **options})
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_bad_filler_top_k_is_refused_by_name(target):
    storage = compat.NGramStorage(3, target.config.vocab_size)
    with pytest.raises(TypeError, match=r"^filler_top_k='3' must be a whole number"):
        compat.ngram_assisted_speculative_generate(PROMPT, storage, target, filler_top_k="3")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: compat.GreedyProcessor(0), "temperature=0 must be above 0"),
        (lambda: compat.MultinomialProcessor("warm"), "temperature='warm' must be a number"),
        (lambda: compat.TopKProcessor(1.0, 0), "top_k=0 must be at least 1"),
        (lambda: compat.TopKProcessor(1.0, 2.5), "top_k=2.5 must be a whole number"),
        (lambda: compat.NucleusProcessor(1.0, 90), "top_p=90 must be 0 to 1"),
        (lambda: compat.TopKNucleusProcessor(1.0, 5, -0.1), "top_p=-0.1 must be 0 to 1"),
    ],
    ids=range(6),
)
def test_a_processors_bad_numbers_are_refused_in_one_line(make, message):
    with pytest.raises((ValueError, TypeError), match=f"^{re.escape(message)}$"):
        make()
