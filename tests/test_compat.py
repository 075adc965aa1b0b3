"""specheads.compat: the reference repositories' functions, against what those would give where they are right."""

import json

import pytest
import torch
from conftest import tiny_llama
from enumeration import Table, distance, law_of, step_law
from test_draft_model import near
from test_exactness import BaseLaw, small_base
from transformers import LogitsProcessorList

import specheads
from specheads import SampledTree, SpecModel, Unadjusted, compat
from specheads.compat import modelopt

PROMPT = [27, 42, 22, 85, 13, 36]
NEW = 24
PROCESSORS = {
    "greedy": compat.GreedyProcessor(), "warm": compat.MultinomialProcessor(0.8), "top k": compat.TopKProcessor(0.7, 5),
    "nucleus": compat.NucleusProcessor(0.6, 0.9), "both": compat.TopKNucleusProcessor(1.5, 10, 0.8),
}  # fmt: skip


@pytest.fixture(scope="module")
def target():
    """Its generation config asks for what the reference functions know nothing of."""
    model = tiny_llama(num_hidden_layers=3)
    plain = model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    model.plain = plain[0, len(PROMPT) :].tolist()
    model.generation_config.update(repetition_penalty=1.9, do_sample=True, top_k=3, no_repeat_ngram_size=2)
    return model


@pytest.fixture(scope="module")
def small():
    return near(tiny_llama(num_hidden_layers=3))


@torch.no_grad()
def likeliest(model, ids):
    return int(model(torch.tensor([ids])).logits[0, -1].argmax())


def replayed(target, draft, gamma, length):
    """Speculative decoding by fresh forwards: (new ids, accepted, drafted). A draft leaves room for the target's own
    token, as in the reference. draft(ids, count) → ids."""
    ids, accepted, drafted = [*PROMPT, likeliest(target, PROMPT)], 0, 0
    while (room := len(PROMPT) + length - len(ids)) > 0:
        tokens = draft(ids, min(gamma, room - 1))
        drafted += len(tokens)
        for token in [*tokens, None]:
            ids.append(likeliest(target, ids))
            if ids[-1] != token:
                break
            accepted += 1
    return ids[len(PROMPT) :], accepted, drafted


def greedy_draft(small):
    def draft(ids, count):
        ids = list(ids)
        for _ in range(count):
            ids.append(likeliest(small, ids))
        return ids[len(ids) - count :] if count else []

    return draft


# --- romsto ---


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
    assert all(processor(None, logits).softmax(-1)[range(12), ids] > 0)


def filtered(logits, top_k, top_p, temperature):
    """The law of romsto's order, token by token: top-k, then the nucleus at temperature 1, then the temperature."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])[:top_k]
    weights = torch.tensor([logits[i] for i in order]).softmax(0).tolist()
    kept, mass = [], 0.0
    for token, weight in zip(order, weights, strict=True):
        kept.append(token)
        mass += weight
        if mass > top_p:
            break
    law = torch.zeros(len(logits), dtype=torch.float64)
    law[kept] = torch.tensor([logits[i] / temperature for i in kept], dtype=torch.float64).softmax(0)
    return law


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_processors_filter_before_the_temperature(temperature):
    torch.manual_seed(0)
    differs = 0
    for logits in torch.randn(20, 30, dtype=torch.float64) * 2:
        for made, top_k, top_p in (
            (compat.MultinomialProcessor(temperature), 30, 1.0), (compat.TopKProcessor(temperature, 7), 7, 1.0),
            (compat.NucleusProcessor(temperature, 0.6), 30, 0.6),
            (compat.TopKNucleusProcessor(temperature, 9, 0.7), 9, 0.7),
        ):  # fmt: skip
            own = made(None, logits.unsqueeze(0)).softmax(-1)[0]
            torch.testing.assert_close(own, filtered(logits.tolist(), top_k, top_p, temperature), atol=1e-9, rtol=0)
            other = LogitsProcessorList([made[-1], *made[:-1]])(None, logits.unsqueeze(0)).softmax(-1)[0]
            differs += not torch.allclose(own, other)
    assert bool(differs) == (temperature != 1)


def test_debug_prints_each_step(target, small, capsys):
    ids, _ = compat.speculative_generate(PROMPT, small, target, gamma=4, max_gen_len=9, eos_tokens_id=[], debug=True)
    lines = capsys.readouterr().out.splitlines()
    assert [int(token) for line in lines for token in line.rsplit(":")[-1].split()] == ids
    assert lines[0] == f"step 0: 0 of 0 drafts accepted: {ids[0]}"


def test_skipping_the_adjustment_emits_what_its_docstring_says():
    """A refusal followed by a draw from p: min(p, q) + (1 − Σ min(p, q)) p, whatever the draft."""
    target, draft, prompt = Table(3, 1), Table(3, 2), (1, 0)
    law = step_law(target, draft, SampledTree((1,)), Unadjusted(), prompt)
    first = {}
    for tokens, chance in law.items():
        first[tokens[0]] = first.get(tokens[0], 0.0) + chance
    p, q = (table(prompt).softmax(-1) for table in (target, draft))
    both = torch.minimum(p, q)
    expected = dict(enumerate((both + (1 - both.sum()) * p).tolist()))
    assert distance(first, expected) < 1e-12
    assert distance(first, dict(enumerate(p.tolist()))) > 0.01 and not Unadjusted().lossless


def test_skipping_the_adjustment_is_asked_for_by_its_name(target, small):
    asked = {}
    options = {"gamma": 2, "max_gen_len": 4, "skip_sample_adjustment": True, "eos_tokens_id": []}
    assert compat.speculative_generate(PROMPT, small, target, **options)[0] == target.plain[:4]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specheads.generation._run", lambda *args, **kwargs: asked.update(kwargs) or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            compat.speculative_generate(PROMPT, small, target, logits_processor=PROCESSORS["warm"], **options)
    assert asked["accept"] == Unadjusted() and asked["plan"] == SampledTree((1, 1))


# --- The notebook ---


def test_topk_probas_keep_k_tokens_and_sum_to_one():
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 9)
    law = compat.get_topk_probas(logits, 4)
    best = logits.topk(4, dim=-1)
    torch.testing.assert_close(law.gather(-1, best.indices), best.values.softmax(-1))
    assert (law > 0).sum(-1).eq(4).all()


def test_a_draft_carries_the_laws_it_was_drawn_from(small):
    torch.manual_seed(1)
    ids, laws = compat.generate_draft(torch.tensor([PROMPT]), small, 4, 3)
    with torch.no_grad():
        logits = small(ids).logits[:, len(PROMPT) - 1 : -1]
    torch.testing.assert_close(laws, compat.get_topk_probas(logits, 3), atol=1e-5, rtol=1e-4)
    assert ids.shape == (1, len(PROMPT) + 4) and laws.gather(2, ids[:, len(PROMPT) :].unsqueeze(2)).min() > 0
    greedy, ones = compat.generate_draft(torch.tensor([PROMPT]), small, 3, 1)
    assert greedy[0, len(PROMPT) :].tolist() == greedy_draft(small)(PROMPT, 3) and ones.max() == 1


def test_speculative_decode_with_k_1_is_greedy_and_counts_what_it_kept(target, small):
    target.generation_config.eos_token_id = None
    ids, kept = compat.speculative_decode(torch.tensor([PROMPT]), target, small, max_tokens=NEW, gamma=5, k=1)
    target.generation_config.eos_token_id = 2
    expected, accepted, _ = replayed(target, greedy_draft(small), 5, NEW)
    assert ids[0].tolist() == PROMPT + expected and kept == accepted


@pytest.mark.parametrize(("k", "gamma", "length"), [(2, 1, 3), (2, 2, 2), (3, 1, 2)])
def test_speculative_decode_has_the_law_of_the_targets_k_likeliest(monkeypatch, k, gamma, length):
    base = small_base(4)
    small = near(small_base(4), 0.3)
    prompt = (1, 0, 1)

    def run(sampler):
        def adopt(processors, **kwargs):
            sampler.processors, sampler.needs_prefix = processors, False
            return sampler

        monkeypatch.setattr("specheads.generation.Sampler", adopt)
        ids, _ = compat.speculative_decode(torch.tensor([prompt]), base, small, length, gamma, k)
        return tuple(ids[0, len(prompt) :].tolist())

    def topk(logits):
        return logits.masked_fill(logits < logits.sort().values[..., -k], -torch.inf)

    assert distance(law_of(run), BaseLaw(base, topk).joint(prompt, length)) < 1e-12


# --- ModelOpt ---


def test_modelopts_ways_of_naming_a_head_convert_save_and_restore(tmp_path):
    base = tiny_llama()
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1}
    for mode in ([("medusa", config)], {"algorithm": "medusa", "config": config}):
        model = modelopt.convert(base, mode)
        assert isinstance(model, SpecModel) and model.head.config.num_heads == 2
    assert modelopt.convert(base, "eagle").head.config.kind == "eagle3"
    assert modelopt.convert(base, [("eagle1", {"eagle_num_layers": 1})]).head.config.kind == "eagle"
    modelopt.enable_huggingface_checkpointing()
    modelopt.save(model, tmp_path)
    restored = modelopt.restore(base, tmp_path)
    for name, tensor in model.head_state_dict().items():
        assert torch.equal(restored.head_state_dict()[name], tensor)
    for bad in ("hydra", [("medusa", {}), ("eagle", {})], {"mode": "medusa"}):
        with pytest.raises(ValueError):
            modelopt.convert(base, bad)


# --- Bad input ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 0}, "gamma=0 must be at least 1"),
        ({"max_gen_len": 0}, "max_gen_len=0 must be at least 1"),
        ({"logits_processor": LogitsProcessorList([])}, "must be one of specheads.compat's"),
        ({"logits_processor": print}, "must be one of specheads.compat's"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_in_one_line(target, small, options, message):
    with pytest.raises((ValueError, TypeError)) as caught:
        compat.speculative_generate(PROMPT, small, target, **options)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_bigram_file_of_another_vocabulary_is_refused(target, tmp_path):
    (tmp_path / "bigrams.json").write_text(json.dumps([0] * 96))
    mag = compat.get_mag_model(tmp_path / "bigrams.json").cuda(0)
    with pytest.raises(ValueError, match="has 96 entries"):
        specheads.generate(target, torch.tensor([PROMPT]), drafter=mag, max_new_tokens=4)
