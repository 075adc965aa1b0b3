"""Top-k and what follows it, over a shortlist of columns: the same tokens as over the whole vocabulary."""

import pytest
import torch
from transformers.generation import logits_process as hf

from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.probs.shortlist import shortlist, warp, warp_shortlist

VOCAB = 70_003  # no multiple of a block
TEMPERATURE, TOP_K, TOP_P, MIN_P = (
    hf.TemperatureLogitsWarper,
    hf.TopKLogitsWarper,
    hf.TopPLogitsWarper,
    hf.MinPLogitsWarper,
)
CHAINS = {
    "top-k": [TOP_K(50)],
    "temperature, top-k, top-p": [TEMPERATURE(0.7), TOP_K(20), TOP_P(0.8)],
    "temperature, top-k, temperature, min-p": [TEMPERATURE(1.3), TOP_K(40), TEMPERATURE(0.5), MIN_P(0.05)],
    "a processor after it that reads all columns": [
        TOP_K(30),
        hf.SuppressTokensLogitsProcessor([3, 69_999]),
        TOP_P(0.9),
    ],
    "at least two tokens": [TOP_K(1, min_tokens_to_keep=2), TOP_P(0.01, min_tokens_to_keep=2)],
}


def by_transformers(processors, logits):
    scores = logits.float()
    for processor in processors:
        scores = processor(None, scores)
    return scores


def logits_of(dtype, rows=5):
    return (4 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows))).to(dtype)


@pytest.mark.parametrize("chain", CHAINS)
def test_float32_scores_are_those_of_transformers(chain):
    logits = logits_of(torch.float32)
    assert warp_shortlist(CHAINS[chain], logits) is not None
    torch.testing.assert_close(warp(CHAINS[chain], logits), by_transformers(CHAINS[chain], logits), rtol=0, atol=0)


@pytest.mark.parametrize("chain", CHAINS)
def test_of_bfloat16_scores_with_many_ties_as_many_and_as_high_ones_are_kept(chain):
    logits = logits_of(torch.bfloat16)
    assert warp_shortlist(CHAINS[chain], logits) is not None
    ours, theirs = warp(CHAINS[chain], logits), by_transformers(CHAINS[chain], logits)
    assert torch.equal(ours.sort(1).values, theirs.sort(1).values)
    kept = ours.isfinite()
    assert torch.equal(ours[kept], by_transformers([p for p in CHAINS[chain] if type(p) is TEMPERATURE], logits)[kept])


@pytest.mark.parametrize("chain", ["top-k", "temperature, top-k, top-p"])
def test_a_row_has_the_same_scores_whatever_is_beside_it(chain):
    logits = logits_of(torch.bfloat16, rows=16)
    together = warp(CHAINS[chain], logits)
    for row in range(16):
        assert torch.equal(together[row], warp(CHAINS[chain], logits[row : row + 1])[0])


def test_ties_beyond_the_first_blocks_are_kept_and_too_many_leave_it_to_transformers():
    few, all_equal = torch.zeros(2, VOCAB), torch.zeros(1, VOCAB)
    few[:, ::1500] = 1.0  # 47 of them, in 47 blocks
    assert shortlist(few, 5).shape[1] >= 47
    assert torch.equal(warp([TOP_K(5)], few), by_transformers([TOP_K(5)], few))
    assert shortlist(all_equal, 5) is None
    assert torch.equal(warp([TOP_K(5)], all_equal), all_equal)


def test_a_shortlist_is_not_made_where_transformers_is_quicker_or_drops_to_another_value():
    assert shortlist(torch.randn(2, 1000), 50) is None
    assert warp_shortlist([TOP_K(50, filter_value=-1e4)], logits_of(torch.float32)) is None
    assert warp_shortlist([TOP_P(0.9), TOP_K(50)], logits_of(torch.float32)) is None


def test_tokens_are_drawn_as_from_the_whole_distribution():
    logits = logits_of(torch.bfloat16, rows=64)
    sampler = Sampler(CHAINS["temperature, top-k, top-p"], do_sample=True)
    numbers = torch.rand(64, dtype=torch.float64)
    token, finite = sampler.draw_from_logits(logits, numbers)
    assert finite.all() and torch.equal(token, sampler.draw(sampler.probs(logits), numbers))


@pytest.mark.parametrize("chain", CHAINS)
def test_not_a_number_is_noticed(chain):
    logits = logits_of(torch.float32)
    logits[2, 12_345] = torch.nan
    _, finite = Sampler(CHAINS[chain], do_sample=True).draw_from_logits(logits)
    assert finite.tolist() == [True, True, False, True, True]
    logits[:1] = torch.nan  # of all columns
    assert not Sampler(CHAINS[chain], do_sample=True).draw_from_logits(logits[:1])[1].any()
