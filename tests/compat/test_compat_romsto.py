"""romsto's functions in specheads.compat: their signatures, texts, acceptance rates, processors and debug lines."""

import inspect
import re

import pytest
import torch
from transformers import LogitsProcessorList, TopKLogitsWarper

import specheads
from specheads import NoResidual, SampledTree, compat
from tests.reference.base_probs import BaseProbs, small_base
from tests.reference.enumeration import Table, distance, probs_of, step_probs
from tests.reference.greedy_replay import NEW, PROMPT, greedy_draft, make_draft_model, make_target, replayed
from tests.support.tiny_models import near, tiny_llama

PROCESSORS = {
    "greedy": compat.GreedyProcessor(), "warm": compat.MultinomialProcessor(0.8), "top k": compat.TopKProcessor(0.7, 5),
    "nucleus": compat.NucleusProcessor(0.6, 0.9), "both": compat.TopKNucleusProcessor(1.5, 10, 0.8),
}  # fmt: skip


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture(scope="module")
def small():
    return make_draft_model()


@pytest.mark.parametrize("gamma", [1, 4])
def test_greedy_text_and_acceptance_are_those_of_a_replay(target, small, gamma):
    ids, accepted, drafted = replayed(target, greedy_draft(small), gamma, NEW)
    assert ids == target.plain and 0 < accepted < drafted
    options = {"gamma": gamma, "max_gen_len": NEW, "eos_tokens_id": []}
    assert compat.speculative_generate(PROMPT, small, target, **options) == (ids, accepted / drafted)
    assert compat.autoregressive_generate(PROMPT, target, NEW, eos_tokens_id=[]) == ids


@pytest.mark.parametrize("storage", [compat.NGramStorage, compat.OneLevelNGramStorage])
def test_ngram_text_and_acceptance_are_those_of_a_replay(target, storage):
    prompt = PROMPT + target.plain  # which it then goes on with, as a model this small repeats itself
    known = storage(2, 97)
    known.initialize(prompt)
    twin, learnt = storage(2, 97), 1

    def draft(ids, count):
        nonlocal learnt
        twin.initialize(ids, learnt)
        learnt, drafted = len(ids), []
        while len(drafted) < count:
            token, found = twin.next_token([*ids, *drafted])
            if not found:
                break
            drafted.append(token)
        return drafted

    ids, accepted, drafted = replayed(target, draft, 3, NEW)
    given = storage(2, 97)
    options = {"gamma": 3, "filler_top_k": 1, "max_gen_len": NEW, "eos_tokens_id": [], "stop_if_unknown": True}
    assert compat.ngram_assisted_speculative_generate(PROMPT, given, target, **options) == (ids, accepted / drafted)
    assert ids == target.plain and drafted
    again, alpha = compat.ngram_assisted_speculative_generate(PROMPT, given, target, **options)
    assert again == ids and alpha > accepted / drafted, "what was learnt stays from call to call"
    guessing = {**options, "stop_if_unknown": False, "filler_top_k": 3}
    assert compat.ngram_assisted_speculative_generate(PROMPT, storage(3, 97), target, **guessing)[0] == ids


def test_the_earliest_of_several_end_tokens_ends_the_text(target, small):
    plain = target.plain
    late, early = plain[9], plain[5]
    first = next(place for place, token in enumerate(plain) if token in (late, early))
    for ends in ([late, early], [early, late]):
        expected = plain[: first + 1]
        for gamma in (1, 6):
            options = {"gamma": gamma, "max_gen_len": NEW, "eos_tokens_id": ends}
            assert compat.speculative_generate(PROMPT, small, target, **options)[0] == expected
        assert compat.autoregressive_generate(PROMPT, target, NEW, eos_tokens_id=ends) == expected
        storage = compat.NGramStorage(3, 97)
        assert compat.ngram_assisted_speculative_generate(PROMPT, storage, target, **options)[0] == expected


def test_one_token_is_enough_and_has_no_acceptance_rate(target, small):
    options = {"max_gen_len": 1, "first_target": False, "use_cache": True}
    assert compat.speculative_generate(PROMPT, small, target, **options) == (target.plain[:1], 0.0)
    storage = compat.OneLevelNGramStorage(2, 97)
    assert compat.ngram_assisted_speculative_generate(PROMPT, storage, target, **options) == (target.plain[:1], 0.0)
    assert compat.autoregressive_generate(PROMPT, target, 1) == target.plain[:1]


def test_a_text_ends_where_the_positions_do(small):
    target = tiny_llama(num_hidden_layers=1, max_position_embeddings=16, eos_token_id=None)
    assert len(compat.speculative_generate(PROMPT, target, target, eos_tokens_id=[])[0]) == 16 - len(PROMPT)
    with pytest.raises(ValueError, match="positions for 16"):
        compat.autoregressive_generate(PROMPT * 3, target)


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


TOKENS = {"accepted": r"\{\+([\d ]+)\+\}", "refused": r"\[-([\d ]+)-\]"}


def printed(out):
    """Of each line its accepted, refused and own tokens."""

    def numbers(text):
        return [int(token) for token in text.split()]

    rows = []
    for line in out.splitlines():
        parts = line.split(":", 1)[1]
        found = {name: re.findall(TOKENS[name], parts) for name in ("accepted", "refused")}
        rest = re.sub("|".join((TOKENS["accepted"], TOKENS["refused"])), "", parts)
        rows.append((*(numbers(" ".join(found[name])) for name in ("accepted", "refused")), numbers(rest)))
    return rows


def test_debug_shows_accepted_and_refused_drafts_and_the_targets_own(target, small, capsys):
    options = {"max_gen_len": NEW, "eos_tokens_id": []}
    ids, alpha = compat.speculative_generate(PROMPT, small, target, gamma=4, debug=True, **options)
    rows, text, draft = printed(capsys.readouterr().out), [], greedy_draft(small)
    for number, (accepted, refused, own) in enumerate(rows):
        assert number == 0 or accepted + refused == draft(PROMPT + text, min(4, NEW - len(text) - 1))
        assert len(own) == 1
        text += accepted + own
    assert text == ids
    kept, lost = (sum(len(row[i]) for row in rows) for i in (0, 1))
    assert kept and lost and alpha == kept / (kept + lost)

    storage = compat.NGramStorage(3, 97)
    ids, alpha = compat.ngram_assisted_speculative_generate(PROMPT * 3, storage, target, debug=True, **options)
    rows = printed(capsys.readouterr().out)
    assert [token for accepted, _, own in rows for token in accepted + own] == ids and any(row[1] for row in rows)


def test_debug_shows_a_text_without_drafts_and_its_end_token(target, capsys):
    end = target.plain[5]
    ids = compat.autoregressive_generate(PROMPT, target, NEW, end_tokens_id=end, debug=True)
    *rows, last = capsys.readouterr().out.splitlines()
    assert rows == [f"token {i}: {token}" for i, token in enumerate(ids)]
    assert last == f"end token {end} found at position {len(ids) - 1}"


def test_debug_colours_on_a_terminal(target, small, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    compat.speculative_generate(PROMPT, small, target, gamma=4, max_gen_len=NEW, eos_tokens_id=[], debug=True)
    out = capsys.readouterr().out
    assert all(code in out for code in ("\x1b[32m", "\x1b[9;31m", "\x1b[34m"))  # green, red, blue


def test_debug_shows_the_candidates_of_each_step_of_a_beam_search(target, capsys):
    options = {"max_gen_len": 5, "num_beams": 3, "top_k": 2, "min_length": 2.0, "alpha": 0.7, "end_tokens_id": []}
    found = compat.beam_search_generate(PROMPT, target, debug=True, **options)
    steps = capsys.readouterr().out.split("candidates for token ")[1:]
    assert len(steps) == len(found) == 5
    for length, step in enumerate(steps, 1):
        rows = [line.split() for line in step.splitlines()[1:]]
        scores = [float(row[1]) for row in rows]
        assert len(rows) == (3 if length == 1 else 6) and scores == sorted(scores, reverse=True)
        for _, score, *text in rows:
            ids = torch.tensor([PROMPT + [int(token) for token in text]])
            with torch.no_grad():
                log_p = target(ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
            total = log_p.gather(1, ids[0, len(PROMPT) :].unsqueeze(1)).sum()
            assert float(score) == pytest.approx(float(total) / ((2 + length) / 3) ** 0.7, abs=2e-3)
    assert [int(token) for token in rows[0][2:]] == found


def test_skipping_the_adjustment_emits_what_its_docstring_says():
    """A refusal followed by a draw from p: min(p, q) + (1 − Σ min(p, q)) p, whatever the draft."""
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
        patch.setattr(
            "specheads.decoding.generation.generate._run", lambda *args, **kwargs: asked.update(kwargs) or 1 / 0
        )
        with pytest.raises(ZeroDivisionError):
            compat.speculative_generate(PROMPT, small, target, logits_processor=PROCESSORS["warm"], **options)
    assert asked["accept"].rule == NoResidual() and asked["plan"] == SampledTree((1, 1))


# --- Signatures and bad input ---

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


def every_function(target, small):
    """Each function of decoder-only models, with its models given: (ids, options) → new ids."""
    return {
        "plain": lambda ids, **o: compat.autoregressive_generate(ids, target, **o),
        "speculative": lambda ids, **o: compat.speculative_generate(ids, small, target, **o)[0],
        "n-gram": lambda ids, **o: compat.ngram_assisted_speculative_generate(
            ids, compat.NGramStorage(3, 97), target, **o
        )[0],
        "beams": lambda ids, **o: compat.beam_search_generate(ids, target, num_beams=1, **o),
    }


def test_end_tokens_have_two_names(target, small):
    end, other = target.plain[5], target.plain[9]
    expected = target.plain[: target.plain.index(end) + 1]
    for generate in every_function(target, small).values():
        for given in (end, [end], (other, end)):
            wanted = expected if given != (other, end) else target.plain[: min(map(target.plain.index, given)) + 1]
            assert generate(PROMPT, max_gen_len=NEW, end_tokens_id=given, pad_token_id=None) == wanted
            assert generate(PROMPT, max_gen_len=NEW, eos_tokens_id=given) == wanted
        with pytest.raises(ValueError, match=r"^eos_tokens_id and end_tokens_id are two names of one"):
            generate(PROMPT, eos_tokens_id=[5], end_tokens_id=[6])


def test_of_a_draft_with_an_end_token_in_it_all_tokens_count(target, small):
    """As theirs counts: n accepted of γ, wherever the end token stands."""
    end = target.plain[3]
    assert end not in target.plain[:3]
    options = {"max_gen_len": NEW, "end_tokens_id": end}
    assert compat.speculative_generate(PROMPT, target, target, gamma=5, **options) == (target.plain[:4], 1.0)
    ids, accepted, drafted = replayed(target, greedy_draft(small), 5, NEW, [end])
    assert compat.speculative_generate(PROMPT, small, target, gamma=5, **options) == (ids, accepted / drafted)


def test_a_storage_takes_tensors_and_answers_with_tensors():
    row, other = [5, 6, 7, 8, 5, 6, 7, 9, 5, 6], list(range(20, 30))
    for kind in (compat.NGramStorage, compat.OneLevelNGramStorage):
        of_lists, of_tensors = kind(3, 97), kind(3, 97)
        of_lists.initialize(row)
        of_tensors.initialize(torch.tensor([row]))
        tokens, known = of_tensors.next_token(torch.tensor([row, other]))
        assert tokens[0] == of_lists.next_token(row)[0] == 7 and known.tolist() == [True, False]
        of_tensors.update(torch.tensor([other]), torch.tensor([[11, 12]]))
        token, known = of_tensors.next_token(torch.tensor([other]))
        assert token.tolist() == [12] and known.all(), "of equals the latest"
        assert of_tensors.has_gram(torch.tensor([6, 7, 9])) and not of_tensors.has_gram(torch.tensor([6, 7, 5]))
        of_tensors.reset()
        assert not of_tensors.has_gram(torch.tensor([6, 7, 9]))


class Called(compat.MultinomialProcessor):
    def __call__(self, logits):
        return logits.softmax(-1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 0}, "gamma=0 must be at least 1"),
        ({"max_gen_len": 0}, "max_gen_len=0 must be at least 1"),
        ({"logits_processor": LogitsProcessorList([])}, "must be one of specheads.compat's"),
        ({"logits_processor": print}, "must be one of specheads.compat's"),
        ({"gamma": "4"}, "gamma='4' must be a whole number"),
        ({"max_gen_len": 4.5}, "max_gen_len=4.5 must be a whole number"),
        ({"eos_tokens_id": None}, "eos_tokens_id=None must be an id or a list of ids"),
        ({"end_tokens_id": [2, None]}, "end_tokens_id=[2, None] must be an id or a list of ids"),
        ({"target": "llama"}, "target='llama' must be a model"),
        ({"drafter": None}, "drafter=None must be a model"),
        ({"inputs": "def main("}, "inputs must be a list of ids, tokenizer(text).input_ids say, not 'def main('"),
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
