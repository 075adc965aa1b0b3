"""generate() on encoder-decoders: Hugging Face's own text, token for token, under its own options."""

import copy

import numpy
import pytest
import torch
from transformers import TextIteratorStreamer
from transformers.generation import GenerateEncoderDecoderOutput, StoppingCriteria

import specheads
from specheads import (
    AdaptiveChain,
    Block,
    Cascade,
    DraftModel,
    Fuzzy,
    Lenient,
    MaxGram,
    NGram,
    NGramStorage,
    OneLevelNGramStorage,
    PromptLookup,
    SampledTree,
    Typical,
    chain,
)
from tests.support.seq2seq_models import (
    BATCHES,
    EOS,
    MODELS,
    PAD,
    SOURCES,
    START,
    Known,
    V,
    tiny_bart,
    tiny_marian,
    tiny_t5,
)


@pytest.fixture(scope="module", params=MODELS)
def pair(request):
    """A model, and one like it whose weights are a little off."""
    base = MODELS[request.param]()
    small = copy.deepcopy(base)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in small.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return base, small


DRAFTERS = {
    "lookup": lambda small: {"draft": PromptLookup()},
    "maxgram": lambda small: {"draft": MaxGram(bigrams=[0] * 3 + list(range(4, V)) + [3])},
    "ngram": lambda small: {"draft": NGram(storage=NGramStorage(3, V))},
    "one level": lambda small: {"draft": NGram(storage=OneLevelNGramStorage(2, V), stop_if_unknown=False)},
    "model": lambda small: {"draft": DraftModel(small), "tree": AdaptiveChain(6)},
    "model, chain": lambda small: {"draft": DraftModel(small), "tree": chain(3)},
    "model, sampled": lambda small: {"draft": DraftModel(small), "tree": SampledTree((1, 1, 1))},
    "cascade": lambda small: {"draft": Cascade([DraftModel(small), MaxGram()], [[4, 3], [0, 3]], leniency=2)},
    "nothing": lambda small: {"draft": None},
}


@pytest.mark.parametrize(
    ("drafter", "batch"), [*((name, "ragged") for name in DRAFTERS), ("lookup", "one"), ("model, chain", "one")]
)
@pytest.mark.sampled(3)
def test_every_drafter_matches_greedy(pair, drafter, batch):
    base, small = pair
    expected = base.generate(**BATCHES[batch], max_new_tokens=20, do_sample=False)
    options = DRAFTERS[drafter](small)
    out = specheads.generate(
        base, **BATCHES[batch], max_new_tokens=20, do_sample=False, return_dict_in_generate=True, **options
    )
    assert torch.equal(out.sequences, expected)
    assert drafter == "nothing" or out.statistics()["drafted"]


def test_each_row_accepts_its_own_length_and_gains_by_it(pair):
    base, _ = pair
    expected = base.generate(**BATCHES["ragged"], max_new_tokens=30, min_new_tokens=30)
    options = {"max_new_tokens": 30, "min_new_tokens": 30, "return_dict_in_generate": True}
    out = specheads.generate(base, **BATCHES["ragged"], draft=Known(expected), **options)
    assert torch.equal(out.sequences, expected)
    assert len({tuple(accepted) for accepted in zip(*(step.accepted for step in out.steps[1:]), strict=True)}) == 3
    assert out.statistics()["accepted_length"] > 2 and out.lossless
    out = specheads.generate(base, **BATCHES["ragged"], draft=DraftModel(base), tree=chain(4), **options)
    assert out.statistics()["accepted_length"] > 4  # a draft model that is the target has every token accepted


def test_ids_of_another_vocabulary_are_not_copied_from_the_source():
    """Marian's encoder and decoder may have a vocabulary each; id 95 follows the decoder's text in the source."""
    for draft in ["lookup", "maxgram", "ngram"]:
        base = tiny_marian(decoder_vocab_size=60)
        options = {"inputs": torch.tensor([[10, START, 7, 95, 94, 1]]), "max_new_tokens": 6, "do_sample": False}
        options["suppress_tokens"] = [token for token in range(60) if token != 7]
        assert torch.equal(specheads.generate(base, **options, draft=draft), base.generate(**options))


CHANGES = {
    "forced_bos": {"forced_bos_token_id": 9},
    "forced_eos": {"forced_eos_token_id": EOS},
    "start": {"decoder_start_token_id": 5},
    "min length": {"min_new_tokens": 9, "eos_token_id": [EOS, *range(60, 97)]},
    "repetition": {"repetition_penalty": 1.8, "no_repeat_ngram_size": 2},
    "encoder ngrams": {"encoder_no_repeat_ngram_size": 1, "encoder_repetition_penalty": 1.5},
    "bad words": {"bad_words_ids": [[30], [41, 87]]},
    "max_length": {"max_length": 12, "max_new_tokens": None},
    "several eos": {"eos_token_id": list(range(80, 97))},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", CHANGES)
def test_options_mean_what_they_mean_in_transformers(pair, change):
    base, small = pair
    options = {**BATCHES["ragged"], "max_new_tokens": 14, "do_sample": False, **CHANGES[change]}
    expected = base.generate(**options)
    for drafter in (Known(expected), DraftModel(small)):
        assert torch.equal(specheads.generate(base, **options, draft=drafter, tree=chain(3)), expected)


def test_a_limit_and_an_eos_inside_a_draft_end_the_row_there(pair):
    for limit in [1, 2, 4, 7]:
        base, _ = pair
        inputs = BATCHES["ragged"]
        text = base.generate(**inputs, max_new_tokens=8, min_new_tokens=8)
        out = specheads.generate(base, **inputs, draft=DraftModel(base), tree=chain(5), max_new_tokens=limit)
        assert torch.equal(out, base.generate(**inputs, max_new_tokens=limit))
        eos = int(text[0, limit])
        expected = base.generate(**inputs, max_new_tokens=12, eos_token_id=eos)
        out = specheads.generate(
            base, **inputs, draft=DraftModel(base), tree=chain(5), max_new_tokens=12, eos_token_id=eos
        )
        assert torch.equal(out, expected)


PROMPTS = {
    "with start": torch.tensor([[START, 30, 41], [START, 12, 50], [START, 61, 60]]),
    "without start": torch.tensor([[30, 41], [12, 50], [61, 60]]),
}


def test_a_source_of_another_vocabulary_is_refused(pair):
    for token in (V, -1):
        with pytest.raises(ValueError, match=f"hold id {token}, and the model has embeddings for 0 to {V - 1}"):
            specheads.generate(pair[0], torch.tensor([[5, token]]), max_new_tokens=3)


def test_decoder_input_ids_are_continued_as_in_transformers(pair):
    for prompt in PROMPTS:
        base, small = pair
        options = {**BATCHES["ragged"], "decoder_input_ids": PROMPTS[prompt], "max_new_tokens": 12}
        expected = base.generate(**options)
        for drafter in (Known(expected), DraftModel(small)):
            assert torch.equal(specheads.generate(base, **options, draft=drafter, tree=chain(3)), expected)


def test_padding_in_a_decoders_prompt_counts_as_it_does_in_transformers(pair):
    """BART's positions count it and T5's need not; both hide it."""
    base, small = pair
    ids = torch.tensor([[PAD, START, 30], [START, 12, 50], [PAD, PAD, START]])
    options = {
        **BATCHES["ragged"], "decoder_input_ids": ids, "decoder_attention_mask": (ids != PAD).long(),
        "max_new_tokens": 12,
    }  # fmt: skip
    expected = base.generate(**options)
    for drafter in (Known(expected), DraftModel(small)):
        assert torch.equal(specheads.generate(base, **options, draft=drafter, tree=chain(3)), expected)


def test_the_padding_of_sources_is_not_seen(pair):
    base, _ = pair
    together = specheads.generate(base, **BATCHES["ragged"], draft=PromptLookup(), max_new_tokens=15)
    for row, source in enumerate(SOURCES):
        alone = base.generate(input_ids=torch.tensor([source]), max_new_tokens=15)
        assert together[row, : alone.shape[1]].tolist() == alone[0].tolist()


def test_learnt_positions_serve_to_their_last():
    base = tiny_bart(max_position_embeddings=16)
    expected = base.generate(**BATCHES["ragged"], max_length=16, min_length=16)
    for drafter in (Known(expected, depth=9), DraftModel(tiny_bart(1, max_position_embeddings=12)), DraftModel(base)):
        out = specheads.generate(base, **BATCHES["ragged"], draft=drafter, max_length=16, min_length=16)
        assert torch.equal(out, expected)


def test_encoder_outputs_may_be_given(pair):
    base, _ = pair
    expected = base.generate(**BATCHES["ragged"], max_new_tokens=15)
    encoded = base.get_encoder()(**BATCHES["ragged"])
    out = specheads.generate(
        base, encoder_outputs=encoded, attention_mask=BATCHES["ragged"]["attention_mask"], max_new_tokens=15,
        draft=PromptLookup(),
    )  # fmt: skip
    assert torch.equal(out, expected)


def test_a_dict_holds_scores_and_steps_of_an_encoder_decoder(pair):
    base, _ = pair
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "return_dict_in_generate": True, "output_scores": True}
    expected = base.generate(**BATCHES["ragged"], **options, output_logits=True)
    out = specheads.generate(base, **BATCHES["ragged"], **options, output_logits=True, draft=Known(expected.sequences))
    assert isinstance(out, GenerateEncoderDecoderOutput) and isinstance(out, specheads.SpecSeq2SeqOutput)
    assert torch.equal(out.sequences, expected.sequences)
    for name in ("scores", "logits"):
        for mine, theirs in zip(out[name], expected[name], strict=True):
            assert torch.allclose(mine, theirs, atol=1e-3)
    assert out.statistics()["tokens"] == 36


class Words:
    """A tokenizer of numbers."""

    def decode(self, ids, **kwargs):
        return " ".join(map(str, ids))


def test_a_streamer_gets_the_text_in_order(pair):
    base, _ = pair
    expected = base.generate(**BATCHES["one"], max_new_tokens=12)
    streamer = TextIteratorStreamer(Words())
    specheads.generate(base, **BATCHES["one"], draft=Known(expected), max_new_tokens=12, streamer=streamer)
    assert "".join(streamer).split() == [str(token) for token in expected[0].tolist()]


class Length(StoppingCriteria):
    """Stops a row whose text is so long, start token included, and even."""

    def __call__(self, ids, scores, **kwargs):
        return (ids[:, -1] % 2 == 0) & (ids.shape[1] > 5)


def test_stopping_criteria_end_each_row_on_its_own(pair):
    base, _ = pair
    options = {**BATCHES["ragged"], "max_new_tokens": 15, "stopping_criteria": [Length()]}
    expected = base.generate(**options)
    assert torch.equal(specheads.generate(base, **options, draft=Known(expected)), expected)


def test_num_return_sequences_encodes_each_source_once_and_drafts_for_its_own(pair):
    base, _ = pair
    calls = []
    handle = base.get_encoder().register_forward_hook(lambda module, args, out: calls.append(len(out[0])))
    sampling = {"do_sample": True, "top_k": 0, "temperature": 0.05, "num_return_sequences": 2, "seed": 0}
    out = specheads.generate(
        base, **BATCHES["ragged"], **sampling, max_new_tokens=12, min_new_tokens=12, return_dict_in_generate=True,
        draft=PromptLookup(),
    )  # fmt: skip
    handle.remove()
    assert calls == [3] and len(out.sequences) == 6
    # A draft model that is the target, given each row's own source, drafts what the target says.
    out = specheads.generate(
        base, **BATCHES["ragged"], **sampling, max_new_tokens=12, min_new_tokens=12, return_dict_in_generate=True,
        draft=DraftModel(base), tree=SampledTree((1,) * 4),
    )  # fmt: skip
    assert out.statistics()["accepted_length"] > 3.5


def test_a_seed_reproduces_sampled_text_whatever_the_rule(pair):
    base, small = pair
    options = {**BATCHES["ragged"], "do_sample": True, "top_k": 0, "max_new_tokens": 6}
    plans = [(SampledTree((1, 1, 1)), Block()), (AdaptiveChain(5, 0.2, sampled=True), None), (chain(3), Typical())]
    plans += [(chain(3), Lenient(0.5)), (chain(3), Fuzzy(0.5, "kl"))]
    for tree, accept in plans:
        first, again, other = (
            specheads.generate(base, **options, draft=DraftModel(small), tree=tree, accept=accept, seed=seed)
            for seed in (5, 5, 6)
        )
        assert torch.equal(first, again) and not torch.equal(first, other)


# --- The source is part of what n-grams are looked for in ---


def test_n_grams_are_found_in_the_source():
    for drafter in [PromptLookup(num_tokens=3), MaxGram(3), NGram(3, storage=NGramStorage(3, V))]:
        from specheads.decoding.drafters import Context
        from specheads.decoding.probs.sampler import Sampler
        from specheads.decoding.verify.seq2seq import Seq2SeqTarget, Source

        base = tiny_t5()
        source = Source.encode(base, [[50, 51, 52, 53, 54, 1], [60, 61, 62, 1]])
        target = Seq2SeqTarget(base, source)
        context = Context.start(
            target, torch.tensor([[START], [START]]), torch.tensor([1, 1]), torch.zeros(2, 1, 0), torch.tensor([51, 60])
        )
        tree = drafter.propose(context, Sampler(), chain(3))
        assert tree.tokens.tolist() == [[51, 52, 53, 54], [60, 61, 62, 1]]


# --- Beam search ---


def test_beam_search_without_a_drafter_is_the_bases_own(pair, base, model):
    for penalty in [0.2, 2.0]:
        beams = {"num_beams": 4, "length_penalty": penalty, "max_new_tokens": 12, "num_return_sequences": 2}
        beams["eos_token_id"] = list(range(60, 97))
        for own in (pair[0], base):
            expected = own.generate(**BATCHES["ragged"], **beams)
            assert torch.equal(specheads.generate(own, **BATCHES["ragged"], **beams), expected)
        assert torch.equal(model.generate(**BATCHES["ragged"], draft=False, **beams), expected)


def test_sampled_beams_follow_the_seed_and_leave_the_global_generator_alone(pair):
    beams = {"num_beams": 3, "do_sample": True, "top_k": 0, "temperature": 3.0, "max_new_tokens": 10}
    before = torch.get_rng_state()
    seeds = (1, numpy.int64(1), 2)  # a whole number of any kind, as where nothing beams
    first, again, other = (specheads.generate(pair[0], **BATCHES["one"], **beams, seed=seed) for seed in seeds)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_beams_that_were_to_be_compiled_are_not_and_the_log_says_so(pair, hf_log):
    beams = {"num_beams": 2, "max_new_tokens": 3}
    expected = pair[0].generate(**BATCHES["one"], **beams)
    assert torch.equal(specheads.generate(pair[0], **BATCHES["one"], **beams, compile=True), expected)
    assert "its steps are not compiled" in hf_log.text


def test_beams_and_drafts_are_refused_together(pair):
    for options in ({"draft": PromptLookup()}, {"accept": Typical()}):
        with pytest.raises(ValueError, match="num_beams=1"):
            specheads.generate(pair[0], **BATCHES["one"], num_beams=2, max_new_tokens=3, **options)
