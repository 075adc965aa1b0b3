"""generate() and what shapes the distribution: every processor and truncation means what it means in Hugging Face."""

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from specheads import SampledTree
from tests.support.prompts import BATCHES, PAD, V
from tests.support.replay_drafter import assert_same


class NoEcho(LogitsProcessor):
    """Bans tokens by the last two of the prefix, its length, and the row's index in the batch."""

    def __call__(self, input_ids, scores):
        rows = torch.arange(len(input_ids)).unsqueeze(1)
        before = input_ids[:, -2:].sum(1, keepdim=True)
        banned = (before + input_ids.shape[1] + rows + torch.arange(0, V, 3)) % V
        return scores.scatter(1, banned, -torch.inf)


def allowed_by_prefix(batch_id, sent):
    """A third of the vocabulary, another one after each prefix and in each row."""
    return [token for token in range(3, V) if (token + batch_id + len(sent) + int(sent[-1])) % 3]


PREFIX_OPTIONS = {
    "repetition_penalty": {"repetition_penalty": 1.8},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[t] for t in range(10, 40)] + [[t, 58] for t in range(40, 90)]},
    "sequence_bias": {"sequence_bias": [[[t], 5.0] for t in range(20, 25)] + [[[22, t], -9.0] for t in range(3, 97)]},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": list(range(3, 30)), "pad_token_id": PAD},
    "min_length": {"min_length": 17, "eos_token_id": list(range(3, 30)), "pad_token_id": PAD},
    "suppress_tokens": {"suppress_tokens": list(range(0, V, 2))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(96))},
    "forced_eos_token_id": {"forced_eos_token_id": 2},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (4, 1.9)},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": allowed_by_prefix},
    "own processor": {"logits_processor": LogitsProcessorList([NoEcho()])},
    "several": {
        "logits_processor": LogitsProcessorList([NoEcho()]), "repetition_penalty": 1.3, "min_new_tokens": 5,
        "suppress_tokens": [7, 8, 9], "no_repeat_ngram_size": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("option", PREFIX_OPTIONS)
@pytest.mark.sampled(3)
def test_every_logits_processor_means_what_it_means_in_hugging_face(model, option, batch):
    inputs, options = BATCHES[batch], {"do_sample": False, "max_new_tokens": 24}
    plain = model.base.generate(**inputs, **options)
    changed = model.base.generate(**inputs, **options, **PREFIX_OPTIONS[option])
    # Otherwise the option changes nothing, and the test shows nothing (an EOS that never came is no change either).
    assert not torch.equal(plain, changed)
    ended_early = option in ("min_new_tokens", "min_length", "exponential_decay_length_penalty")
    assert_same(model, inputs, **PREFIX_OPTIONS[option], accepted=1.2 if ended_early else 1.5, reference=changed)


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"top_k": 3}, lambda p: p >= p.sort(-1).values[..., -3:-2]),
        ({"top_k": 0, "min_p": 0.3}, lambda p: p >= 0.3 * p.max(-1, keepdim=True).values),
        ({"top_k": 0, "top_p": 0.4}, lambda p: ((p.unsqueeze(-2) > p.unsqueeze(-1)) * p.unsqueeze(-2)).sum(-1) < 0.4),
    ],
    ids=["top_k", "min_p", "top_p"],
)
@pytest.mark.parametrize("tree", [None, SampledTree((2, 2, 1))], ids=["point mass", "sampled"])
def test_truncation_keeps_every_token_inside(model, options, allowed, tree):
    inputs = BATCHES["one"]
    columns = inputs["input_ids"].shape[1]
    out = model.generate(
        **inputs, do_sample=True, temperature=1.5, max_new_tokens=12, num_return_sequences=30, seed=0, tree=tree,
        suppress_tokens=[2], **options,
    )  # fmt: skip
    with torch.no_grad():
        logits = model.base(out).logits[:, columns - 1 : -1].double()
    logits[..., 2] = -torch.inf
    inside = allowed((logits / 1.5).softmax(-1) + 1e-9).gather(-1, out[:, columns:].unsqueeze(-1))
    assert inside.all()
    assert len({tuple(row) for row in out.tolist()}) > 20


def test_a_high_temperature_and_a_low_one_differ_as_they_should(model):
    """At temperature 1e-4 sampling is greedy."""
    inputs = BATCHES["ragged"]
    cold = model.generate(**inputs, do_sample=True, temperature=1e-4, top_k=0, max_new_tokens=12, seed=1)
    assert torch.equal(cold, model.base.generate(**inputs, do_sample=False, max_new_tokens=12))
    hot = model.generate(**inputs, do_sample=True, temperature=5.0, top_k=0, max_new_tokens=12, seed=1)
    assert not torch.equal(hot, cold)
