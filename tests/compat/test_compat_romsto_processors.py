"""romsto's processors and those of a user: what they filter, what is drawn under them, and the skipped adjustment."""

import pytest
import torch
from transformers import LogitsProcessorList, TopKLogitsWarper

import specheads
from specheads import NoResidual, SampledTree, compat
from tests.reference.base_probs import BaseProbs, small_base
from tests.reference.enumeration import Table, distance, probs_of, step_probs
from tests.reference.greedy_replay import NEW, PROMPT
from tests.support.tiny_models import near

PROCESSORS = {
    "greedy": compat.GreedyProcessor(), "warm": compat.MultinomialProcessor(0.8), "top k": compat.TopKProcessor(0.7, 5),
    "nucleus": compat.NucleusProcessor(0.6, 0.9), "both": compat.TopKNucleusProcessor(1.5, 10, 0.8),
}  # fmt: skip


@pytest.mark.parametrize("name", PROCESSORS)
def test_sampled_text_repeats_under_a_seed_and_stays_within_the_processors_tokens(target, small, name):
    processor = PROCESSORS[name]
    texts = []
    for _ in range(2):
        torch.manual_seed(4)
        ids, alpha = compat.speculative_generate(
            PROMPT, small, target, gamma=3, logits_processor=processor, max_gen_len=12, eos_tokens_id=[]
        )
        texts.append(ids)
        assert 0 <= alpha <= 1
    assert texts[0] == texts[1] and len(ids) == 12
    with torch.no_grad():
        logits = target(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1]
    assert all(processor(logits)[range(12), ids] > 0)


def filtered(logits, top_k, top_p, temperature):
    """The distribution in romsto's order, token by token: top-k, the nucleus at temperature 1, then the temperature."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])[:top_k]
    weights = torch.tensor([logits[i] for i in order]).softmax(0).tolist()
    kept, mass = [], 0.0
    for token, weight in zip(order, weights, strict=True):
        kept.append(token)
        mass += weight
        if mass > top_p:
            break
    probs = torch.zeros(len(logits), dtype=torch.float64)
    probs[kept] = torch.tensor([logits[i] / temperature for i in kept], dtype=torch.float64).softmax(0)
    return probs


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_processors_filter_before_the_temperature(temperature):
    torch.manual_seed(0)
    differs = 0
    for logits in torch.randn(20, 30, dtype=torch.float64) * 2:
        for kind, numbers, top_k, top_p in (
            (compat.MultinomialProcessor, (), 30, 1.0), (compat.TopKProcessor, (7,), 7, 1.0),
            (compat.NucleusProcessor, (0.6,), 30, 0.6), (compat.TopKNucleusProcessor, (9, 0.7), 9, 0.7),
        ):  # fmt: skip
            probs = kind(temperature, *numbers)(logits)
            torch.testing.assert_close(probs, filtered(logits.tolist(), top_k, top_p, temperature), atol=1e-9, rtol=0)
            differs += not torch.allclose(probs, kind(1.0, *numbers)(logits / temperature))
    assert bool(differs) == (temperature != 1)


@pytest.mark.parametrize("shape", [(13,), (3, 13), (1, 4, 13)], ids=str)
def test_a_processor_gives_probs_of_logits_and_samples_from_them(shape):
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3
    before = logits.clone()
    for processor in (*PROCESSORS.values(), Floor(0.7, 0.5)):
        probs = processor(logits)
        assert torch.equal(logits, before), "theirs, and a user's own, may change them in place"
        assert probs.shape == shape and torch.allclose(probs.sum(-1), torch.ones(shape[:-1]))
        if len(shape) < 3:
            token = processor.sample(probs)
            assert token.shape == (*shape[:-1], 1) and bool((probs.gather(-1, token) > 0).all())
    assert torch.equal(PROCESSORS["greedy"].sample(probs).squeeze(-1), logits.argmax(-1))
    assert (PROCESSORS["top k"].temperature, PROCESSORS["top k"].top_k, PROCESSORS["nucleus"].top_p) == (0.7, 5, 0.9)


def test_generate_takes_a_processor_as_it_is(target):
    options = {"do_sample": True, "top_k": 0, "repetition_penalty": 1.0, "max_new_tokens": 8, "seed": 3}
    options["no_repeat_ngram_size"] = 0
    processor, warper = compat.TopKProcessor(1.0, 5), LogitsProcessorList([TopKLogitsWarper(5)])
    ids = torch.tensor([PROMPT])
    ours, theirs = (specheads.generate(target, ids, logits_processor=p, **options) for p in (processor, warper))
    assert torch.equal(ours, theirs)


class Floor(compat.MultinomialProcessor):
    """A filter of a user's own, which works in place as theirs may."""

    def __init__(self, temperature, most):
        super().__init__(temperature)
        self.most = most

    def _process(self, logits):
        logits[logits < logits.amax(-1, keepdim=True) - self.most] = -1e20
        return logits


def output_probs_under(monkeypatch, make, target, small, gamma, length):
    """The distribution of the text under the processor that make(sampler) gives, all draws enumerated."""

    def run(sampler):
        def adopt(processors, *, do_sample, **kwargs):
            sampler.processors, sampler.needs_prefix, sampler.do_sample = list(processors), False, do_sample
            return sampler

        monkeypatch.setattr("specheads.decoding.generation.generate.Sampler", adopt)
        options = {"gamma": gamma, "max_gen_len": length, "eos_tokens_id": [], "logits_processor": make(sampler)}
        return tuple(compat.speculative_generate([1, 0, 1], small, target, **options)[0])

    return probs_of(run)


@pytest.mark.parametrize(("gamma", "length"), [(1, 4), (2, 4)])
def test_a_users_own_filter_gives_the_targets_filtered_distribution(monkeypatch, gamma, length):
    target, small = small_base(3), near(small_base(3), 0.3)
    processor = Floor(0.7, 0.5)
    probs = output_probs_under(monkeypatch, lambda sampler: processor, target, small, gamma, length)
    wanted = BaseProbs(target, lambda logits: processor(logits).log())
    assert any(p == 0 for prefix in ((1, 0, 1), (1, 0, 1, 0)) for p in wanted(prefix)), "the filter must bite"
    assert distance(probs, wanted.joint((1, 0, 1), length)) < 1e-12


@pytest.mark.parametrize("processor", [PROCESSORS["both"], Floor(0.7, 0.5)], ids=["theirs", "a user's"])
def test_drafts_are_sampled_under_the_processor_too(target, processor):
    """So that a model accepts all that it drafted for itself, as in theirs."""
    torch.manual_seed(1)
    options = {"gamma": 4, "max_gen_len": NEW, "eos_tokens_id": [], "logits_processor": processor}
    assert compat.speculative_generate(PROMPT, target, target, **options)[1] == 1.0


@pytest.mark.parametrize("stateless", [False, True])
def test_a_users_own_sample_is_drawn_from_once_a_token(monkeypatch, stateless):
    target, small = small_base(2), near(small_base(2), 0.3)

    def make(sampler):
        class Sharper(compat.LogitsProcessor):
            depends_on_prefix_only = stateless  # else nothing is drafted in the first step, which watches for state

            def _process(self, logits):
                return logits

            def sample(self, probs):
                return sampler.draw(probs.square()).unsqueeze(-1)

        return Sharper(1.0)

    probs = output_probs_under(monkeypatch, make, target, small, 2, 3 if stateless else 4)
    wanted = BaseProbs(target, lambda logits: 2 * logits)
    assert distance(probs, wanted.joint((1, 0, 1), 3 if stateless else 4)) < 1e-12


def test_a_sample_that_is_no_draw_gives_its_own_text_and_accepts_its_own_drafts(target, small):
    class Second(compat.GreedyProcessor):
        depends_on_prefix_only = True

        def sample(self, probs):
            return probs.topk(2, -1).indices[..., 1:]

    ids = list(PROMPT)
    for _ in range(10):
        with torch.no_grad():
            ids.append(int(target(torch.tensor([ids])).logits[0, -1].topk(2).indices[1]))
    options = {"max_gen_len": 10, "eos_tokens_id": [], "logits_processor": Second()}
    assert compat.speculative_generate(PROMPT, small, target, gamma=3, **options)[0] == ids[len(PROMPT) :]
    assert compat.autoregressive_generate(PROMPT, target, **options) == ids[len(PROMPT) :]


def test_a_subclass_that_keeps_state_is_asked_once_a_token_without_drafts(target, small, hf_log):
    class Counting(compat.MultinomialProcessor):
        calls = 0

        def _process(self, logits):
            self.calls += 1
            return logits

    processor = Counting(1.0)
    ids, alpha = compat.speculative_generate(
        PROMPT, small, target, max_gen_len=6, eos_tokens_id=[], logits_processor=processor
    )
    assert len(ids) == processor.calls == 6 and alpha == 0 and "Counting keeps state" in hf_log.text


def test_skipping_the_adjustment_emits_what_its_docstring_says():
    """A rejection followed by a draw from p: min(p, q) + (1 − Σ min(p, q)) p, whatever the draft."""
    target, draft, prompt = Table(3, 1), Table(3, 2), (1, 0)
    probs = step_probs(target, draft, SampledTree((1,)), NoResidual(), prompt)
    first = {}
    for tokens, chance in probs.items():
        first[tokens[0]] = first.get(tokens[0], 0.0) + chance
    p, q = (table(prompt).softmax(-1) for table in (target, draft))
    both = torch.minimum(p, q)
    expected = dict(enumerate((both + (1 - both.sum()) * p).tolist()))
    assert distance(first, expected) < 1e-12
    assert distance(first, dict(enumerate(p.tolist()))) > 0.01 and not NoResidual().lossless


def test_skipping_the_adjustment_is_asked_for_by_its_name(target, small):
    asked = {}
    options = {"gamma": 2, "max_gen_len": 4, "skip_sample_adjustment": True, "eos_tokens_id": []}
    assert compat.speculative_generate(PROMPT, small, target, **options)[0] == target.plain[:4]
    with pytest.MonkeyPatch.context() as patch:
        run = "specheads.decoding.generation.generate._Run"
        patch.setattr(run, lambda decoding, *others: asked.update(decoding=decoding) or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            compat.speculative_generate(PROMPT, small, target, logits_processor=PROCESSORS["warm"], **options)
    decoding = asked["decoding"]
    assert decoding.accept.rule == NoResidual() and decoding.plan == SampledTree((1, 1))
