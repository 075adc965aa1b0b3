"""Claims about specheads/audit/checks.py and bets.py: each statistic has the null that it states."""

import math
from dataclasses import replace

import pytest
import torch

from specheads.audit import checks
from specheads.audit.bets import BET_NAMES, EarlierAnswers, bet
from specheads.audit.logprobs import LogprobWatch
from specheads.audit.scoring import ScoredText, rounding
from specheads.audit.settings import Settings, process
from specheads.audit.verdict import Verdict

V = 8


def every_token(scores, shift=0.0):
    """One text a token of the vocabulary, all after the same prefix."""
    for token in range(len(scores)):
        row = scores.unsqueeze(0)
        yield ScoredText(
            (1,), torch.tensor([token]), torch.tensor([2]), row + 0.5, row * 1.1, row, 0.0, torch.tensor([shift])
        )


def test_the_mean_of_every_bet_is_at_most_1_under_p():
    """Over the whole vocabulary, exactly; ranks are averaged over a fine grid of uniforms."""
    scores = 2 * torch.randn(V, generator=torch.Generator().manual_seed(0))
    scores[3] = -math.inf
    p, grid = scores.double().softmax(-1), (torch.arange(64, dtype=torch.float64) + 0.5) / 64
    earlier = EarlierAnswers()
    for token in (0, 0, 1, 5):
        earlier.ratios((1,), [token], p.unsqueeze(0))
    before = {key: counts.copy() for key, counts in earlier.counts.items()}
    mean = torch.zeros(len(BET_NAMES), dtype=torch.float64)
    for text, weight in zip(every_token(scores), p.tolist(), strict=True):
        for uniform in grid:
            earlier.counts.update({key: counts.copy() for key, counts in before.items()})
            mean += weight / len(grid) * bet(text, uniform.unsqueeze(0), earlier)[0][0].exp().nan_to_num(0)
    assert float(mean.max()) < 1 + 1e-3 and float(mean.min()) > 0.4  # below 1 where a ratio is limited


def test_the_robust_bet_holds_for_the_worst_distribution_within_the_shift():
    """Moving a mass of `shift` from the token that pays least to the one that pays most keeps the mean at most 1."""
    scores, shift = torch.randn(V, generator=torch.Generator().manual_seed(1)), 0.02
    p = scores.double().softmax(-1)
    uniform = torch.tensor([0.5], dtype=torch.float64)
    pairs = [bet(text, uniform, EarlierAnswers()) for text in every_token(scores, shift)]
    exact, robust = (torch.cat(logs).exp() for logs in zip(*pairs, strict=True))  # (V, K)
    for k, name in enumerate(BET_NAMES):
        q = p.clone()
        q[exact[:, k].argmax()] += shift
        q[exact[:, k].argmin()] -= min(shift, float(p[exact[:, k].argmin()]))
        excess = float((p * exact[:, k]).sum()) - 1  # of ranks at one uniform alone
        assert float((q / q.sum() * robust[:, k]).sum()) <= 1 + max(0.0, excess) + 1e-6, name


def test_random_ranks_are_uniform():
    scores = torch.randn(5000, V, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    tokens = torch.multinomial(scores.softmax(-1), 1, generator=generator).squeeze(-1)
    ranks = checks.random_ranks(scores, tokens, torch.rand(5000, generator=generator, dtype=torch.float64))
    assert checks.uniform_distance(ranks) < 1.95 / math.sqrt(5000)  # false alarm: 1 in 1,000
    assert checks.uniform_distance(ranks.sqrt()) > 1.95 / math.sqrt(5000)


def test_z_is_standard_normal_for_a_right_server_and_below_for_one_that_is_too_hot():
    generator = torch.Generator().manual_seed(1)
    scores = 2 * torch.randn(40_000, V, generator=generator)

    def z_of(temperature):
        tokens = torch.multinomial((scores / temperature).softmax(-1), 1, generator=generator).squeeze(-1)
        return [checks.likelihood_z(*(part[i::100] for part in checks.likelihood(scores, tokens))) for i in range(100)]

    right = torch.tensor(z_of(1.0))
    assert abs(right.mean()) < 0.4 and 0.7 < right.std() < 1.3 and right.abs().max() < 4.5
    assert torch.tensor(z_of(1.3)).mean() < -2


def test_likelihood_has_its_exact_mean_and_variance():
    scores = torch.randn(1, V, generator=torch.Generator().manual_seed(0)).expand(V, V).clone()
    scores[:, 2] = -math.inf
    logp, mean, variance = checks.likelihood(scores, torch.arange(V))
    p, keep = scores[0].double().softmax(-1), torch.arange(V) != 2
    expected = (p * logp)[keep].sum()
    assert torch.allclose(mean[0], expected)
    assert torch.allclose(variance[0], (p * (logp - expected).square())[keep].sum())


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([], "no token"),
        ([4, 2, 5], "1 tokens after the end token 2"),
        ([4, 5, 4, 5, 4], "5 tokens where max_tokens is 4"),
        ([4, 5, 4], "3 tokens and no end token"),
        ([4, 5, 2], None),
        ([4, 5, 4, 2], None),
        ([4, 5, 4, 5], None),
    ],
)
def test_a_text_ends_at_the_first_eos_or_at_max_tokens(tokens, words):
    fault = checks.end_fault(tokens, Settings(max_tokens=4, eos=frozenset({2})))
    assert (fault is None) if words is None else words in fault.words


@pytest.mark.parametrize(
    ("tokens", "text", "words"),
    [
        ("abcd", None, None),  # as long as it may be
        ("ab", None, "without a stop string"),
        ("axy", None, None),
        ("axyb", None, "1 tokens after the stop string 'xy'"),
        ("axyb", "a", None),  # tokens of the draft that nobody reads
        ("axyb", "axy", None),
        ("axyb", "axyb", "does not end at the stop string 'xy'"),
        ("az", "", "does not end at the stop string 'z'"),
        ("azxy", "a", None),  # the first of two
        ("a!", None, None),  # the end token
    ],
)
def test_a_text_ends_with_the_token_that_completes_its_first_stop_string(tokens, text, words):
    settings = Settings(max_tokens=4, eos=frozenset({ord("!")}), stop=("xy", "z"))
    fault = checks.stop_fault([*map(ord, tokens)], settings, lambda ids: "".join(map(chr, ids)), text)
    assert (fault is None) if words is None else words in fault.words


def test_a_token_that_is_cut_is_impossible_unless_rounding_explains_it():
    uncut = torch.tensor([[3.0, 2.0, 1.999, 0.0]]).expand(4, 4)
    scores = process(uncut, [0], [0] * 4, Settings(top_k=2))
    tokens = torch.arange(4)
    assert checks.impossible(scores, uncut, tokens, 0.0, top_p=False).tolist() == [False, False, True, True]
    assert checks.impossible(scores, uncut, tokens, 0.01, top_p=False).tolist() == [False, False, False, True]
    assert checks.impossible(scores, uncut, tokens, 0.0, top_p=True).tolist() == [False, False, False, True]


def test_the_edge_of_a_cut_counts_as_rounding_only_where_it_may_move():
    uncut = torch.tensor([[3.0, 2.0, 1.999, 0.0], [3.0, 2.0, 1.0, 0.0]])
    settings = Settings(top_k=2)
    mass = checks.edge_mass(process(uncut, [0], [0, 0], settings), uncut, settings, 0.01, 0.001)
    assert mass[0] > 0.2 and mass[1] == 0


def test_each_position_is_processed_after_its_own_prefix():
    logits = torch.ones(3, V)
    scores = process(logits, [1], [4, 5, 6], Settings(repetition_penalty=2.0))
    assert [(row == 0.5).nonzero().flatten().tolist() for row in scores] == [[1], [1, 4], [1, 4, 5]]


def test_penalties_count_the_tokens_of_the_text_and_in_llama_cpp_of_the_prompt_too():
    """Token 1 is in the prompt; of the ids before the first score, 4 and 5 are of the text, and 4 is written next."""
    settings = Settings(presence_penalty=0.5, frequency_penalty=0.25)
    for counts_prompt, of_prompt in ((False, 0.0), (True, 0.75)):
        scores = process(torch.zeros(2, V), [1, 4, 5], [4, 6], replace(settings, count_prompt=counts_prompt), written=2)
        assert scores[:, 1].tolist() == [-of_prompt] * 2 and scores[:, 4].tolist() == [-0.75, -1.0]


def test_reported_log_probabilities_are_read_by_the_definition_that_fits():
    """Of raw logits or after the samplers; a value that fits neither is a fault, NaN too."""
    settings = Settings(0.5, logprobs=True)
    raw, tokens = torch.randn(4, V, generator=torch.Generator().manual_seed(0)), torch.arange(4)
    text = ScoredText((1,), tokens, tokens, raw, raw / 0.5, raw / 0.5, 0.01, torch.zeros(4))
    rows = torch.arange(4)
    for scores, words in ((raw, "raw logits"), (raw / 0.5, "after the samplers")):
        watch = LogprobWatch(settings, 0.6, 5)
        values = scores.log_softmax(-1)[rows, tokens].tolist()
        watch.add(text, values[:3])  # without that of the end token
        assert watch.result().verdict is Verdict.UNDECIDED and watch.result().more_tokens
        watch.add(text, values)
        assert watch.result().verdict is Verdict.LOSSLESS and words in str(watch.result())
        watch.add(text, [*values[:2], values[2] + 0.2, math.nan])
        result = watch.result()
        assert result.verdict is Verdict.NOT_LOSSLESS and result.figures["wrong"] == 2 and words in str(result)
        assert "text 3, token 3" in str(result)
    watch.add(text, None)
    assert "1 of 4 texts came without any" in str(watch.result())


def test_two_passes_that_sum_alike_still_leave_room_for_a_few_roundings():
    scores = torch.randn(3, 50, dtype=torch.float32) * 10
    margin, shift = rounding(scores, scores.clone())
    assert 1e-6 * scores.abs().max() < margin < 1e-5 * scores.abs().max() and shift == 0
    scores[0, 0] = -torch.inf
    assert rounding(scores, scores + 1.0)[0] >= 4.0


def test_settings_refuse_what_has_no_meaning():
    with pytest.raises(ValueError, match="top_p"):
        Settings(top_p=0.0)
