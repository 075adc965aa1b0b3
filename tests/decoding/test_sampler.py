"""Sampler: the distribution generate() draws from, each processor with the prefix it asks for; a G-test end to end."""

import itertools
import math

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

from specheads import Exact, SampledTree, Sampler, convert
from specheads.decoding.probs.sampler import likeliest
from tests.support.tiny_models import tiny_llama

# --- The distribution ---


def test_greedy_is_a_one_hot_distribution():
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, -1.0, -2.0]])
    assert Sampler().probs(logits).tolist() == [[0, 1, 0], [1, 0, 0]]


def test_sampling_without_processors_is_the_softmax():
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(Sampler(do_sample=True).probs(logits), logits.softmax(-1))


def test_probs_are_float32_unless_the_model_is_finer():
    for given, kept in [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ]:
        logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(0)).to(given)
        sampler = Sampler(LogitsProcessorList([hf.TemperatureLogitsWarper(0.5)]), do_sample=True)
        assert sampler.probs(logits).dtype == kept and sampler.draft_probs(logits).dtype == kept
        torch.testing.assert_close(sampler.probs(logits), (logits.to(kept) / 0.5).softmax(-1))
        penalty = Sampler(LogitsProcessorList([hf.RepetitionPenaltyLogitsProcessor(3.0)]))
        assert penalty.scores(logits, lambda: [[1], [2, 3]]).dtype == kept


def test_draft_probs_are_truncated_like_the_targets():
    logits = torch.randn(6, 20, generator=torch.Generator().manual_seed(1))
    processors = [hf.TemperatureLogitsWarper(1.7), hf.TopKLogitsWarper(7), hf.TopPLogitsWarper(0.8)]
    sampler = Sampler(LogitsProcessorList(processors), do_sample=True)
    assert not sampler.needs_prefix
    torch.testing.assert_close(sampler.draft_probs(logits), sampler.probs(logits))
    assert (sampler.probs(logits) > 0).sum(-1).max() <= 7


def test_a_processor_of_the_prefix_stays_out_of_the_draft_probs():
    sampler = Sampler(LogitsProcessorList([hf.RepetitionPenaltyLogitsProcessor(3.0)]), do_sample=True)
    logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(sampler.draft_probs(logits), logits.softmax(-1))
    seen = sampler.probs(logits, lambda: [[0, 1, 2, 3, 4], [2]])
    assert not torch.allclose(seen, logits.softmax(-1))
    own = Recording()
    Sampler(LogitsProcessorList([own]), do_sample=True).draft_probs(logits)
    assert own.calls == []  # one that needs no ids to change something


class Recording(LogitsProcessor):
    """Bans the last token of each row's ids, and keeps the ids it was given."""

    def __init__(self):
        self.calls = []

    def __call__(self, input_ids, scores):
        self.calls.append(input_ids.tolist())
        scores.scatter_(1, input_ids[:, -1:], -torch.inf)  # in place, as users write them
        return scores


def test_each_row_is_processed_with_its_own_padded_prefix():
    """As the caller has them, with the caller's padding wherever it is; all rows in every call, so that a row may be
    known by its index; and no row with ids that no row has."""
    own = Recording()
    prompts, lengths = [[1, 2, 3], [8, 8, 4], [0, 6, 7]], [3, 1, 2]
    sampler = Sampler(LogitsProcessorList([own]), do_sample=True, prompts=prompts, lengths=lengths, pad_token_id=9)
    logits = torch.zeros(3, 10)
    probs = sampler.probs(logits, lambda: [[1, 2, 3], [4, 5], [6, 7]])
    assert probs.argmin(-1).tolist() == [3, 5, 7] and (probs == 0).sum() == 3
    assert torch.equal(logits, torch.zeros(3, 10)), "the caller's logits were changed"
    assert sorted(map(len, (call[0] for call in own.calls))) == [3, 4]
    assert all(len(call) == 3 for call in own.calls)
    short, long = sorted(own.calls, key=lambda call: len(call[0]))
    assert short == [[1, 2, 3], [8, 8, 4], [0, 6, 7]]
    assert long == [[8, 8, 4, 5]] * 3


def test_each_row_is_asked_for_its_own_allowed_tokens():
    own = hf.PrefixConstrainedLogitsProcessor(lambda row, ids: [row, int(ids[-1])], 1)
    scores = Sampler(LogitsProcessorList([own])).scores(torch.zeros(3, 9), lambda: [[6], [4, 7], [8]])
    assert scores.isfinite().nonzero().tolist() == [[0, 0], [0, 6], [1, 1], [1, 7], [2, 2], [2, 8]]


def test_no_processor_is_called_for_a_row_that_has_ended():
    own = Recording()
    sampler = Sampler(LogitsProcessorList([own]), prompts=[[1], [2]], lengths=[1, 1], pad_token_id=9)
    logits = torch.randn(2, 10, generator=torch.Generator().manual_seed(0))
    scores = sampler.scores(logits, lambda: [[1, 3, 4], [2, 5]], [False, True])
    assert own.calls == [[[1, 3, 4], [2, 5, 9]]]  # padded as Hugging Face pads what has ended
    assert torch.equal(scores[1], logits[1]) and scores[0, 4] == -torch.inf
    sampler.scores(logits, lambda: [[1, 3], [2]], [True, True])
    assert len(own.calls) == 1
    as_long = sampler.scores(logits, lambda: [[1, 3], [2, 5]], [False, True])
    assert torch.equal(as_long[1], logits[1]) and as_long[0, 3] == -torch.inf


def test_a_subclass_of_a_prefix_free_processor_is_given_its_prefix():
    class Cooling(hf.TemperatureLogitsWarper):
        def __call__(self, input_ids, scores):
            return scores / (1 + input_ids.shape[1])

    sampler = Sampler(LogitsProcessorList([Cooling(1.0)]), do_sample=True)
    logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    probs = sampler.probs(logits, lambda: [[1], [1, 2, 3]])
    torch.testing.assert_close(probs, (logits / torch.tensor([[2.0], [4.0]])).softmax(-1))


def test_processors_that_keep_state_are_refused_by_name():
    watermark = hf.SynthIDTextWatermarkLogitsProcessor(
        ngram_len=5, keys=[1, 2, 3], sampling_table_size=16, sampling_table_seed=0, context_history_size=8, device="cpu"
    )
    with pytest.raises(ValueError, match="SynthIDTextWatermarkLogitsProcessor keeps state"):
        Sampler(LogitsProcessorList([watermark]))


# --- The draws ---


def test_a_generator_governs_every_draw():
    p = torch.rand(50, 7, generator=torch.Generator().manual_seed(0))
    p = p / p.sum(-1, keepdim=True)
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(len(draws))
        sampler = Sampler(do_sample=True, generator=torch.Generator().manual_seed(seed))
        draws.append((sampler.draw(p).tolist(), sampler.bernoulli(p).tolist()))
    assert draws[0] == draws[1] != draws[2]


def test_a_certain_coin_is_certain_and_greedy_coins_are_thresholds():
    for sampler in (Sampler(do_sample=True, generator=torch.Generator().manual_seed(0)), Sampler()):
        assert all(sampler.bernoulli(torch.ones(1, 1000))[0]) and not any(sampler.bernoulli(torch.zeros(1, 1000))[0])
    assert Sampler().bernoulli(torch.tensor([[0.49, 0.5, 0.51]])).tolist() == [[False, False, True]]


def test_a_token_of_probability_0_is_not_drawn_by_the_first_or_last_number():
    """Over one block and over several, the chance in the first, in the last and in one between."""
    for number, size in itertools.product([0.0, 1 - 2**-53], [3, 128, 129, 1000]):
        for token in {0, 1, size // 2, size - 2, size - 1}:
            p = torch.zeros(1, size).index_fill(1, torch.tensor(token), 0.7)
            assert Sampler(do_sample=True).draw(p, torch.full((1,), number, dtype=torch.float64)).tolist() == [token]


def test_a_block_whose_sum_is_rounded_up_gives_no_token_of_probability_0():
    """The last number aims at the first weight, from the end of its block, whose sum was rounded in float32."""
    p = torch.rand(64, 128, generator=torch.Generator().manual_seed(0))
    p[:, 0] = 0
    index = Sampler(do_sample=True).draw(p, torch.full((64,), 1 - 2**-53, dtype=torch.float64))
    assert (p.gather(1, index.unsqueeze(1)) > 0).all()


def test_a_draw_is_the_index_at_which_the_running_sum_passes_the_number():
    """Against running sums over all of V, and with chances down to 1e-9 of the whole."""
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(40, 700, generator=generator, dtype=torch.float64).mul(4).softmax(-1)
    p[:, ::7] = 0
    numbers = torch.rand(40, generator=generator, dtype=torch.float64)
    below = p.cumsum(-1)
    wanted = torch.searchsorted(below, (1 - numbers).unsqueeze(1) * below[:, -1:]).squeeze(1)
    assert torch.equal(Sampler(do_sample=True).draw(p, numbers), wanted)
    assert torch.equal(Sampler(do_sample=True).draw(p.view(8, 5, 700), numbers.view(8, 5)), wanted.view(8, 5))


def test_a_distribution_without_a_finite_sum_is_remembered():
    for p in [[0.0, 0.0], [torch.nan, 1.0], [torch.inf, 1.0]]:
        sampler = Sampler(do_sample=True)
        sampler.draw(torch.tensor([[0.5, 0.5]]))
        assert sampler.finite
        sampler.draw(torch.tensor([p]))
        sampler.draw(torch.tensor([[0.5, 0.5]]))
        assert not sampler.finite


def test_the_index_drawn_from_nan_is_inside_the_vocabulary():
    for size in (3, 128, 300):
        drawn = Sampler(do_sample=True).draw(torch.full((4, size), torch.nan))
        assert drawn.min() >= 0 and drawn.max() < size


# --- Statistics of generate() ---


def truncated(logits, temperature, top_k, top_p):
    """Logits (V,) → the distribution as the three options define it, in plain Python."""
    p = (logits.double() / temperature).softmax(-1).tolist()
    ranked = sorted(range(len(p)), key=lambda token: -p[token])[:top_k]
    total = sum(p[token] for token in ranked)
    probs, mass = {}, 0.0
    for token in ranked:
        if mass >= top_p:
            break
        probs[token] = p[token] / total
        mass += probs[token]
    return {token: chance / mass for token, chance in probs.items()}


@torch.no_grad()
def joint(base, prompt, length, **options):
    probs = {(): 1.0}
    for _ in range(length):
        paths = list(probs)
        logits = base(torch.tensor([[*prompt, *path] for path in paths])).logits[:, -1]
        probs = {
            (*path, token): probs[path] * p
            for path, row in zip(paths, logits, strict=True)
            for token, p in truncated(row, **options).items()
        }
    return probs


def g_test(samples, probs):
    """The chance of counts at least as unlike `probs` as these: G = 2 Σ O ln(O / E) against χ², rare cells pooled."""
    observed = {}
    for sample in samples:
        observed[sample] = observed.get(sample, 0) + 1
    assert observed.keys() <= probs.keys(), f"drew what has no chance: {observed.keys() - probs.keys()}"
    cells, rare = [], [0, 0.0]
    for key, p in probs.items():
        expected = p * len(samples)
        if expected < 10:
            rare[0] += observed.get(key, 0)
            rare[1] += expected
        else:
            cells.append((observed.get(key, 0), expected))
    cells.append(rare)
    cells = [(seen, expected) for seen, expected in cells if expected]
    g = 2 * sum(seen * math.log(seen / expected) for seen, expected in cells if seen)
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(g / 2, dtype=torch.float64)))


@pytest.fixture(scope="module")
def tiny():
    return tiny_llama(
        vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip


OPTIONS = {"temperature": 1.4, "top_k": 6, "top_p": 0.9}
PROMPT = (3, 1, 4, 1)


def draws_of(model, rows, **options):
    ids = torch.tensor([PROMPT]).expand(rows, -1)
    out = model.generate(ids, do_sample=True, max_new_tokens=3, **OPTIONS, **options)
    return [tuple(row) for row in out[:, len(PROMPT) :].tolist()]


def pairs(probs, start):
    """The marginal probs of tokens start and start + 1."""
    marginal = {}
    for path, p in probs.items():
        key = path[start : start + 2]
        marginal[key] = marginal.get(key, 0.0) + p
    return marginal


@pytest.mark.sampled(7)
@pytest.mark.parametrize("head", ["medusa", "hydra", "eagle", "eagle3", "parallel"])
@pytest.mark.parametrize("plan", [None, SampledTree((2, 1)), SampledTree((1, 1, 1))], ids=["default", "tree", "chain"])
def test_generate_draws_pairs_with_the_bases_chances(tiny, head, plan):
    """8,000 texts of 3 tokens. False-alarm probability 1e-6 over all 30 marginals (Bonferroni), were seeds free."""
    torch.manual_seed(5)
    model = convert(tiny, head)
    probs = joint(tiny, PROMPT, 3, **OPTIONS)
    samples = [text for seed in range(2) for text in draws_of(model, 4000, seed=seed, tree=plan)]
    for start in range(2):
        chance = g_test([text[start : start + 2] for text in samples], pairs(probs, start))
        assert chance > 1e-6 / 30


def test_the_g_test_notices_a_residual_that_returns_p(tiny, monkeypatch):
    monkeypatch.setattr("specheads.decoding.acceptance.exact.residual", lambda p, q: p)
    torch.manual_seed(5)
    model = convert(tiny, "eagle3")
    probs = joint(tiny, PROMPT, 3, **OPTIONS)
    samples = draws_of(model, 4000, seed=0, tree=SampledTree((2, 1)), accept=Exact())
    assert g_test([text[1:3] for text in samples], pairs(probs, 1)) < 1e-12


def test_the_likeliest_token_found_by_blocks_is_argmax():
    for shape in [(3, 8192), (2, 5, 4096), (1, 128 * 300), (2, 4097), (0, 8192), (2, 128)]:
        logits = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(2).round()  # many are alike
        logits[..., 5:9] = -torch.inf
        assert torch.equal(likeliest(logits), logits.argmax(-1))
        logits[..., 77] = torch.nan
        assert torch.equal(likeliest(logits), logits.argmax(-1))
