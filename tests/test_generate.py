"""generate()'s contract: every option means what it means in Hugging Face's own generate(), drafts or no drafts."""

import copy
import itertools
import json
import string

import pytest
import torch
from conftest import tiny_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)

from specheads import DraftTree, SampledTree, StaticTree, convert
from specheads.generation import step_record

V, PAD = 97, 0
PROMPTS = ([27, 42, 22, 85, 13, 36], [44], [5, 5, 81, 62, 30, 7, 12, 90, 17])


def padded(rows, side="left"):
    longest = max(map(len, rows))
    fill = [[PAD] * (longest - len(row)) for row in rows]
    blank = [[0] * len(more) for more in fill]
    real = [[1] * len(row) for row in rows]
    if side == "right":
        fill, rows, blank, real = rows, fill, real, blank
    ids = torch.tensor([[*a, *b] for a, b in zip(fill, rows, strict=True)])
    mask = torch.tensor([[*a, *b] for a, b in zip(blank, real, strict=True)])
    return {"input_ids": ids, "attention_mask": mask}


BATCHES = {"one": padded(PROMPTS[:1]), "ragged": padded(PROMPTS)}


@pytest.fixture(scope="module")
def model(base):
    torch.manual_seed(0)
    return convert(base, "eagle3")


class Replay:
    """Drafts a known text, each right token behind a wrong sibling, and a wrong path in every fifth place.

    So drafts of every length from 0 to 3 are accepted, whatever options the text was made with.
    """

    layers = ()
    plan = StaticTree(((0,), (1,), (1, 0), (1, 1), (1, 1, 0), (1, 1, 1)))

    def __init__(self, inputs, sequences):
        columns = inputs["input_ids"].shape[1]
        mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
        self.texts = [
            ids[own].tolist() + row[columns:].tolist()
            for ids, own, row in zip(inputs["input_ids"], mask, sequences, strict=True)
        ]

    def default_plan(self, device, do_sample):
        return self.plan

    def propose(self, context, sampler, plan):
        tokens = []
        for text, history in zip(self.texts, context.history, strict=True):
            row = [int(context.root[len(tokens)])]
            for place in range(len(history), len(history) + 3):
                right = text[place] if place < len(text) else 3
                wrong = 3 + (right + 1) % 90
                row += [wrong, right if place % 5 else 3 + (right + 2) % 90]
            tokens.append(row)
        parents = torch.tensor([[-1, 0, 0, 2, 2, 4, 4]]).expand(len(tokens), -1)
        return DraftTree(torch.tensor(tokens), parents, 3)


def assert_same(model, inputs, *, accepted=1.5, reference=None, **options):
    """model.generate gives base.generate's text, and got there by accepting drafts."""
    options = {"do_sample": False, "max_new_tokens": 24, **options}
    expected = model.base.generate(**inputs, **options) if reference is None else reference
    out = model.generate(**inputs, **options, draft=Replay(inputs, expected), return_dict_in_generate=True)
    assert torch.equal(out.sequences, expected)
    assert out.statistics()["accepted_length"] > accepted
    assert torch.equal(model.generate(**inputs, **options), expected)
    return out


# --- Logits processors: each node sees its own prefix ---


class NoEcho(LogitsProcessor):
    """Bans tokens by the last two of the prefix, its length, and the row's place in the batch."""

    def __call__(self, input_ids, scores):
        rows = torch.arange(len(input_ids)).unsqueeze(1)
        before = input_ids[:, -2:].sum(1, keepdim=True)
        banned = (before + input_ids.shape[1] + rows + torch.arange(0, V, 3)) % V
        return scores.scatter(1, banned, -torch.inf)


def allowed_by_prefix(batch_id, sent):
    """A third of the vocabulary, another one behind each prefix and in each row."""
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
def test_every_logits_processor_means_what_it_means_in_hugging_face(model, option, batch):
    inputs, options = BATCHES[batch], {"do_sample": False, "max_new_tokens": 24}
    plain = model.base.generate(**inputs, **options)
    changed = model.base.generate(**inputs, **options, **PREFIX_OPTIONS[option])
    # Otherwise the option bites in no place, and the test shows nothing (an EOS that never came is no change either).
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


# --- Stopping ---


@pytest.fixture(scope="module")
def tokenizer():
    """97 tokens: three special ones, 60 characters, 34 pairs of them."""
    pairs = [(a, b) for a in "ABCDEF" for b in "UVWXYZ"][:34]
    words = ["<pad>", "<s>", "</s>", *string.ascii_letters, *"12345678", *map("".join, pairs)]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


@pytest.mark.parametrize("batch", BATCHES)
def test_stop_strings_end_each_row_where_hugging_face_does(model, tokenizer, batch):
    inputs = BATCHES[batch]
    columns = inputs["input_ids"].shape[1]
    text = model.base.generate(**inputs, do_sample=False, max_new_tokens=24)[0, columns:].tolist()
    for place in (1, 7):
        # Begins inside the token before, where that has two characters.
        stop = tokenizer.decode([text[place - 1]])[-1] + tokenizer.decode([text[place]])
        out = assert_same(model, inputs, stop_strings=stop, tokenizer=tokenizer, accepted=0.9)
        if batch == "one":
            assert out.sequences.shape[1] <= columns + place + 1 < columns + 24
        options = {"do_sample": False, "max_new_tokens": 24, "tokenizer": tokenizer}
        assert torch.equal(model.generate(**inputs, **options, stop_strings=["ne ver", stop]), out.sequences)
        config = copy.deepcopy(model.generation_config)
        config.update(stop_strings=[stop], max_new_tokens=24, do_sample=False)
        drafted = model.generate(**inputs, generation_config=config, tokenizer=tokenizer)
        assert torch.equal(drafted, out.sequences)
        assert config.stop_strings == [stop], "the caller's config was changed"


def test_stop_strings_without_a_tokenizer_are_refused(model):
    with pytest.raises(ValueError, match="stop_strings needs tokenizer="):
        model.generate(**BATCHES["one"], stop_strings="x", max_new_tokens=4)


class EndsOnMultiple(StoppingCriteria):
    """Of all it is given: the row's prompt, its padding and what was generated."""

    def __init__(self, of):
        self.of = of

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids.sum(1) + input_ids.shape[1]) % self.of == 0


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("of", [3, 7, 11])
def test_stopping_criteria_are_asked_after_each_token(model, batch, of):
    criteria = StoppingCriteriaList([EndsOnMultiple(of)])
    assert_same(model, BATCHES[batch], stopping_criteria=criteria, pad_token_id=PAD, accepted=0.9)


def test_a_time_limit_that_has_passed_leaves_one_token(model):
    inputs = BATCHES["ragged"]
    out = model.generate(**inputs, do_sample=False, max_new_tokens=24, max_time=1e-9)
    assert torch.equal(out, model.base.generate(**inputs, do_sample=False, max_new_tokens=24, max_time=1e-9))
    assert out.shape[1] == inputs["input_ids"].shape[1] + 1


@pytest.mark.parametrize("batch", BATCHES)
def test_every_limit_and_every_eos_cuts_drafts_where_hugging_face_stops(model, batch):
    inputs = BATCHES[batch]
    columns = inputs["input_ids"].shape[1]
    whole = model.base.generate(**inputs, do_sample=False, max_new_tokens=12)
    for limit in range(1, 12):
        options = {"do_sample": False, "max_new_tokens": limit}
        expected = model.base.generate(**inputs, **options)
        assert torch.equal(model.generate(**inputs, **options, draft=Replay(inputs, whole)), expected)
        options = {"do_sample": False, "max_length": columns + limit}
        assert torch.equal(model.generate(**inputs, **options, draft=Replay(inputs, whole)), expected)
    for first, second in itertools.pairwise(whole[0, columns:].tolist()):
        options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": [second, first], "pad_token_id": PAD}
        expected = model.base.generate(**inputs, **options)
        assert torch.equal(model.generate(**inputs, **options, draft=Replay(inputs, whole)), expected)


# --- Streaming ---


class Capture:
    def __init__(self):
        self.pieces, self.ended = [], 0

    def put(self, value):
        assert not self.ended
        self.pieces.append(value.tolist())

    def end(self):
        self.ended += 1


def test_a_streamer_is_given_the_prompt_then_exactly_the_new_tokens(model):
    inputs = BATCHES["one"]
    expected = model.base.generate(**inputs, do_sample=False, max_new_tokens=11)
    stream = Capture()
    out = model.generate(
        **inputs, do_sample=False, max_new_tokens=11, streamer=stream, draft=Replay(inputs, expected)
    )  # fmt: skip
    assert torch.equal(out, expected)
    prompt, *pieces = stream.pieces
    assert prompt == inputs["input_ids"].tolist() and stream.ended == 1
    assert [token for piece in pieces for token in piece] == out[0, inputs["input_ids"].shape[1] :].tolist()
    assert len(pieces) < 11, "no step gave several tokens"


def test_a_text_streamer_spells_the_text(model, tokenizer):
    class Spelling(TextStreamer):
        spelt = ""

        def on_finalized_text(self, text, stream_end=False):
            self.spelt += text

    inputs = BATCHES["one"]
    streams = [Spelling(tokenizer, skip_prompt=True) for _ in range(2)]
    model.generate(**inputs, do_sample=False, max_new_tokens=11, streamer=streams[0])
    model.base.generate(**inputs, do_sample=False, max_new_tokens=11, streamer=streams[1])
    assert streams[0].spelt == streams[1].spelt != ""


def test_a_streamer_and_a_batch_are_refused(model, tokenizer):
    for stream in (Capture(), TextStreamer(tokenizer)):
        with pytest.raises(ValueError, match=r"a streamer takes one sequence|only supports batch size 1"):
            model.generate(**BATCHES["ragged"], max_new_tokens=4, streamer=stream)


# --- Outputs ---


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    "options", [{}, {"repetition_penalty": 1.4, "suppress_tokens": [5, 6]}], ids=["raw", "processed"]
)
def test_scores_and_logits_are_hugging_faces(model, batch, options):
    inputs = BATCHES[batch]
    columns = inputs["input_ids"].shape[1]
    options = {
        **options, "do_sample": False, "max_new_tokens": 15, "return_dict_in_generate": True, "output_scores": True,
        "output_logits": True, "eos_token_id": list(range(80, 90)), "pad_token_id": PAD,
    }  # fmt: skip
    theirs = model.base.generate(**inputs, **options)
    out = model.generate(**inputs, **options, draft=Replay(inputs, theirs.sequences))
    assert torch.equal(out.sequences, theirs.sequences)
    assert len(out.scores) == len(theirs.scores) == len(out.logits) == out.sequences.shape[1] - columns
    for row, ids in enumerate(out.sequences[:, columns:].tolist()):
        length = next((i + 1 for i, token in enumerate(ids) if 80 <= token < 90), len(ids))
        for own, other in ((out.scores, theirs.scores), (out.logits, theirs.logits)):
            for position in range(length):
                torch.testing.assert_close(own[position][row], other[position][row], atol=1e-3, rtol=1e-4)
    assert model.generate(**inputs, **{**options, "output_scores": False}).scores is None


def test_scores_and_logits_are_float32_for_a_bfloat16_model():
    half = convert(tiny_llama(num_hidden_layers=2).to(torch.bfloat16), "medusa")
    options = {"do_sample": False, "max_new_tokens": 3, "return_dict_in_generate": True}
    options |= {"output_scores": True, "output_logits": True}
    for out in (half.generate(**BATCHES["one"], **options), half.base.generate(**BATCHES["one"], **options)):
        assert out.scores[0].dtype == out.logits[0].dtype == torch.float32


@pytest.mark.parametrize("limit", [13, 14, 15, 16])
@pytest.mark.parametrize("do_sample", [False, True])
def test_statistics_add_up(model, do_sample, limit):
    inputs = BATCHES["ragged"]
    columns = inputs["input_ids"].shape[1]
    expected = model.base.generate(**inputs, do_sample=False, max_new_tokens=20, eos_token_id=96, pad_token_id=PAD)
    out = model.generate(
        **inputs, do_sample=do_sample, max_new_tokens=limit, eos_token_id=96, pad_token_id=PAD, seed=3,
        return_dict_in_generate=True, draft=Replay(inputs, expected),
    )  # fmt: skip
    made = out.statistics()
    lengths = [(row != PAD).sum().item() for row in out.sequences[:, columns:]]
    assert made["tokens"] == sum(lengths)
    assert made["steps"] == len(out.steps) - 1
    rows = [list(itertools.chain.from_iterable(step.tokens[b] for step in out.steps)) for b in range(3)]
    assert [len(row) for row in rows] == lengths
    taken = sum(bool(row) for step in out.steps[1:] for row in step.tokens)
    assert made["drafted"] == 6 * taken
    assert made["accepted"] == sum(map(sum, (step.accepted for step in out.steps)))
    assert made["accepted_length"] == pytest.approx((sum(lengths) - 3) / taken)
    assert sum(made["accepted_by_depth"]) == pytest.approx(made["accepted"] / taken)
    assert made["accepted_by_depth"] == sorted(made["accepted_by_depth"], reverse=True)
    assert made["lossless"] is True
    for step in out.steps[1:]:
        assert step.drafted == [6 if row else 0 for row in step.tokens]
        for tokens, accepted, ranks in zip(step.tokens, step.accepted, step.ranks, strict=True):
            assert len(ranks) == accepted <= len(tokens) <= accepted + 1
            assert all(rank == 1 for rank in ranks), "the right token is always drafted second"
    if not do_sample:
        assert 0 < made["accepted"] < made["tokens"]


def test_a_step_becomes_plain_json(model):
    out = model.generate(**BATCHES["ragged"], do_sample=False, max_new_tokens=5, return_dict_in_generate=True)
    records = [json.loads(json.dumps(step_record(step))) for step in out.steps]
    assert records[0]["tokens"] == [[int(row)] for row in out.sequences[:, BATCHES["ragged"]["input_ids"].shape[1]]]


# --- Randomness ---


def test_a_seed_reproduces_and_leaves_the_global_generator_alone(model):
    options = {**BATCHES["ragged"], "do_sample": True, "top_k": 0, "temperature": 2.0, "max_new_tokens": 10}
    for tree in (None, SampledTree((2, 1))):
        before = torch.get_rng_state()
        first, again, other = (model.generate(**options, tree=tree, seed=seed) for seed in (5, 5, 6))
        assert torch.equal(before, torch.get_rng_state())
        assert torch.equal(first, again) and not torch.equal(first, other)


def test_torch_manual_seed_governs_generation(model):
    options = {**BATCHES["ragged"], "do_sample": True, "top_k": 0, "temperature": 2.0, "max_new_tokens": 10}
    texts = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        texts.append(model.generate(**options))
        texts.append(model.generate(**options))
    assert torch.equal(texts[0], texts[2]) and torch.equal(texts[1], texts[3])
    assert not torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[4])


def test_greedy_decoding_draws_nothing(model):
    before = torch.get_rng_state()
    model.generate(**BATCHES["ragged"], do_sample=False, max_new_tokens=6)
    model.generate(**BATCHES["ragged"], do_sample=False, max_new_tokens=6, tree=SampledTree((2, 1)))
    assert torch.equal(before, torch.get_rng_state())


def test_num_return_sequences_gives_so_many_rows_a_prompt(model):
    inputs = BATCHES["ragged"]
    out = model.generate(
        **inputs, do_sample=True, top_k=0, temperature=2.0, max_new_tokens=8, num_return_sequences=3, seed=0
    )
    assert len(out) == 9
    columns = inputs["input_ids"].shape[1]
    assert torch.equal(out[:, :columns], inputs["input_ids"].repeat_interleave(3, 0))
    assert len({tuple(row) for row in out.tolist()}) == 9


# --- Where options may come from, and which are refused ---


def test_a_generation_config_counts_as_given_and_is_not_changed(model):
    inputs = BATCHES["ragged"]
    config = GenerationConfig(
        max_new_tokens=9, repetition_penalty=1.7, do_sample=False, eos_token_id=2, pad_token_id=PAD, bos_token_id=1
    )
    before = config.to_dict()
    expected = model.base.generate(**inputs, generation_config=config)
    assert torch.equal(model.generate(**inputs, generation_config=config), expected)
    out = model.generate(**inputs, generation_config=config, max_new_tokens=4)
    assert torch.equal(out, model.base.generate(**inputs, generation_config=config, max_new_tokens=4))
    assert config.to_dict() == before


def test_the_models_own_generation_config_is_the_default():
    own = convert(tiny_llama(num_hidden_layers=2), "medusa")
    own.generation_config = GenerationConfig(
        max_new_tokens=7, repetition_penalty=1.9, eos_token_id=2, pad_token_id=PAD, bos_token_id=1
    )
    out = own.generate(**BATCHES["ragged"])
    assert torch.equal(out, own.base.generate(**BATCHES["ragged"]))
    assert out.shape[1] == BATCHES["ragged"]["input_ids"].shape[1] + 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "beam search does not combine with drafts"),
        ({"generation_config": GenerationConfig(num_beams=3, max_new_tokens=3)}, "beam search"),
        ({"assistant_model": object()}, "no assistant_model="),
        ({"prompt_lookup_num_tokens": 3}, "no prompt_lookup_num_tokens="),
        ({"inputs_embeds": torch.zeros(1, 2, 32)}, "no inputs_embeds="),
        ({"past_key_values": DynamicCache()}, "no past_key_values="),
        ({"custom_generate": lambda *args: None}, "no custom_generate="),
        ({"output_attentions": True}, "output_attentions=True is not kept"),
        ({"output_hidden_states": True}, "output_hidden_states=True is not kept"),
        ({"generation_config": GenerationConfig(output_attentions=True)}, "output_attentions=True is not kept"),
        ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor keeps state"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_combine_with_drafts_is_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        model.generate(**BATCHES["one"], **{"max_new_tokens": 3, **options})


def test_one_beam_and_false_flags_are_no_reason_to_refuse(model):
    model.generate(**BATCHES["one"], max_new_tokens=3, num_beams=1, output_attentions=False, assistant_model=None)


def test_an_unknown_option_is_refused_by_name(model):
    with pytest.raises(ValueError, match="max_new_token"):
        model.generate(**BATCHES["one"], max_new_token=3)


# --- Prompts ---


def test_an_empty_prompt_is_refused(model):
    with pytest.raises(ValueError, match="an empty prompt has nothing to continue"):
        model.generate(torch.zeros(1, 0, dtype=torch.long), max_new_tokens=3)


def test_a_row_of_padding_is_refused_by_its_number(model):
    inputs = {name: value.clone() for name, value in BATCHES["ragged"].items()}
    inputs["attention_mask"][1] = 0
    with pytest.raises(ValueError, match="row 1 of the batch is all padding"):
        model.generate(**inputs, max_new_tokens=3)


def test_no_prompt_at_all_starts_from_bos(model):
    assert torch.equal(
        model.generate(do_sample=False, max_new_tokens=6), model.base.generate(do_sample=False, max_new_tokens=6)
    )


def test_right_padding_is_continued_from_the_last_real_token(model):
    """Where Hugging Face would continue from the padding."""
    left, right = padded(PROMPTS), padded(PROMPTS, side="right")
    columns = left["input_ids"].shape[1]
    out = model.generate(**right, do_sample=False, max_new_tokens=12)
    expected = model.base.generate(**left, do_sample=False, max_new_tokens=12)
    assert torch.equal(out[:, columns:], expected[:, columns:])
    assert torch.equal(out[:, :columns], right["input_ids"])


def test_a_hole_in_the_mask_is_skipped_as_hugging_face_skips_it(model):
    inputs = {name: value.clone() for name, value in BATCHES["ragged"].items()}
    inputs["attention_mask"][2, 4:6] = 0
    assert_same(model, inputs)


def test_padding_without_a_mask_is_found_as_hugging_face_finds_it(model):
    ids = BATCHES["ragged"]["input_ids"]
    out = model.generate(ids, do_sample=False, max_new_tokens=12)
    assert torch.equal(out, model.base.generate(ids, do_sample=False, max_new_tokens=12))
    assert torch.equal(out, model.base.generate(**BATCHES["ragged"], do_sample=False, max_new_tokens=12))


# --- Transfers ---


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("tree", [None, SampledTree((3, 2, 1))], ids=["default", "sampled"])
def test_no_vocabulary_wide_tensor_goes_to_the_host(model, monkeypatch, do_sample, tree):
    """Of what is copied, nothing is as large as one row's laws; each step copies once."""
    sizes = {name: [] for name in ("tolist", "cpu", "numpy")}

    def recording(name):
        original = getattr(torch.Tensor, name)

        def method(tensor, *args, **kwargs):
            sizes[name].append(tensor.numel())
            return original(tensor, *args, **kwargs)

        return method

    with monkeypatch.context() as patch:
        for name in sizes:
            patch.setattr(torch.Tensor, name, recording(name))
        out = model.generate(
            **BATCHES["ragged"], do_sample=do_sample, max_new_tokens=30, seed=0, tree=tree, return_dict_in_generate=True
        )
    assert max(itertools.chain.from_iterable(sizes.values())) < V
    assert len(out.steps) <= len(sizes["tolist"]) <= len(out.steps) + 16
