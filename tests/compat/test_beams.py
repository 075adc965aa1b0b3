"""Beam search under GNMT's length penalty, against every text there is, and against a beam search by hand."""

import itertools

import pytest
import torch

from specheads.compat import beam_search_generate
from tests.support.tiny_models import tiny_llama

PROMPT, END, LENGTH = (1, 0, 3), 2, 4
OPTIONS = {"max_gen_len": LENGTH, "eos_tokens_id": END, "pad_token_id": None}


def model_of(seed, vocab_size=4):
    base = tiny_llama(
        vocab_size=vocab_size, num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2,
        num_key_value_heads=1, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    for parameter in base.parameters():
        parameter.data.normal_(std=0.5)
    base.generation_config.update(repetition_penalty=1.7, do_sample=True, length_penalty=3.0)
    return base


class Scores:
    """log p of one text's tokens, by fresh forwards."""

    def __init__(self, base):
        self.base, self.known = base, {}

    @torch.no_grad()
    def after(self, text):
        if text not in self.known:
            logits = self.base(torch.tensor([[*PROMPT, *text]])).logits[0, -1]
            self.known[text] = logits.log_softmax(-1).tolist()
        return self.known[text]

    def of(self, text, min_length, alpha):
        total = sum(self.after(text[:i])[token] for i, token in enumerate(text))
        return total / ((min_length + len(text)) / (min_length + 1)) ** alpha


def texts(vocab_size):
    """Every text that ends with END or at LENGTH."""
    for length in range(1, LENGTH + 1):
        for text in itertools.product(range(vocab_size), repeat=length):
            if END not in text[:-1] and (text[-1] == END or length == LENGTH):
                yield text


@pytest.mark.parametrize(("min_length", "alpha"), [(5.0, 1.2), (0.0, 1.0), (0.0, 3.0), (1.0, 0.0)])
def test_enough_beams_find_the_best_of_all_texts(min_length, alpha):
    for seed in range(4):
        base = model_of(seed)
        scores = Scores(base)
        best = max(texts(4), key=lambda text: scores.of(text, min_length, alpha))
        options = {"num_beams": 4**3, "top_k": 4, "min_length": min_length, "alpha": alpha}
        assert beam_search_generate(list(PROMPT), base, **OPTIONS, **options) == list(best)


def test_the_penalty_decides_how_long_a_text_is():
    base = model_of(0)
    lengths = [
        len(beam_search_generate(list(PROMPT), base, **OPTIONS, num_beams=64, top_k=4, min_length=0, alpha=alpha))
        for alpha in (0, 1, 3)
    ]
    assert lengths[0] < lengths[-1], "the models of these tests would not show a wrong penalty"


def by_hand(scores, num_beams, top_k, min_length, alpha):
    """Each text gets its top_k likeliest tokens; the num_beams best continue, or are set aside if they end."""
    running, finished = {(): 0.0}, {}
    for length in range(1, LENGTH + 1):
        found = []
        for text, score in running.items():
            tokens = enumerate(scores.after(text))
            for token, more in sorted(tokens, key=lambda t: -t[1])[: num_beams if length == 1 else top_k]:
                found.append((score + more, (*text, token)))
        found.sort(reverse=True)
        ends = [(score, text) for score, text in found[:num_beams] if text[-1] == END or length == LENGTH]
        finished |= {text: score / ((min_length + length) / (min_length + 1)) ** alpha for score, text in ends}
        running = {text: score for score, text in [pair for pair in found if pair[1][-1] != END][:num_beams]}
    return list(max(finished, key=finished.get))


@pytest.mark.parametrize(("num_beams", "top_k"), [(2, 2), (3, 2), (2, 5), (1, 1)])
def test_few_beams_find_what_a_search_by_hand_finds(num_beams, top_k):
    for seed in range(4):
        base = model_of(seed, 8)
        for penalty in ({"min_length": 5.0, "alpha": 1.2}, {"min_length": 0.0, "alpha": 3.0}):
            expected = by_hand(Scores(base), num_beams, top_k, **penalty)
            options = {"num_beams": num_beams, "top_k": top_k, **penalty}
            assert beam_search_generate(list(PROMPT), base, **OPTIONS, **options) == expected


def test_the_pad_token_ends_a_text_too():
    found = []
    for seed in range(8):
        base = model_of(seed, 8)
        padded, ended, free = (
            beam_search_generate(list(PROMPT), base, **OPTIONS | ends)
            for ends in ({"pad_token_id": 0}, {"eos_tokens_id": [END, 0]}, {})
        )
        assert padded == ended and 0 not in padded[:-1]
        found.append(padded != free)
    assert any(found), "no text of these models has the pad token"


def test_bad_beams_are_refused():
    with pytest.raises(TypeError, match=r"^pad_token_id='0' must be the id of a token, or None"):
        beam_search_generate(list(PROMPT), model_of(0), **OPTIONS | {"pad_token_id": "0"})
    for name in ("min_length", "alpha"):
        with pytest.raises(TypeError, match=f"^{name}='1' must be a number$"):
            beam_search_generate(list(PROMPT), model_of(0), **OPTIONS, **{name: "1"})
    with pytest.raises(ValueError, match="hold id 4, and the model has embeddings for 0 to 3"):
        beam_search_generate([1, 4], model_of(0), **OPTIONS)
    for name, bad in (("num_beams", 0), ("top_k", 0), ("min_length", -1), ("alpha", -0.5)):
        with pytest.raises(ValueError, match=name):
            beam_search_generate(list(PROMPT), model_of(0), **OPTIONS, **{name: bad})
