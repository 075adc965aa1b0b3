"""generate() step by step: where each row ends, and what a streamer is given."""

import copy
import itertools
import math
import string

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)  # fmt: skip
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from tests.support.prompts import BATCHES, PAD
from tests.support.replay_drafter import Replay, assert_same


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


def test_stop_strings_end_each_row_where_hugging_face_does(model, tokenizer):
    for batch in BATCHES:
        inputs = BATCHES[batch]
        columns = inputs["input_ids"].shape[1]
        text = model.base.generate(**inputs, do_sample=False, max_new_tokens=24)[0, columns:].tolist()
        for index in (1, 7):
            # Begins inside the token before, where that has two characters.
            stop = tokenizer.decode([text[index - 1]])[-1] + tokenizer.decode([text[index]])
            out = assert_same(model, inputs, stop_strings=stop, tokenizer=tokenizer, accepted=0.9)
            if batch == "one":
                assert out.sequences.shape[1] <= columns + index + 1 < columns + 24
            options = {"do_sample": False, "max_new_tokens": 24, "tokenizer": tokenizer}
            assert torch.equal(model.generate(**inputs, **options, stop_strings=["ne ver", stop]), out.sequences)
            config = copy.deepcopy(model.generation_config)
            config.update(stop_strings=[stop], max_new_tokens=24, do_sample=False)
            drafted = model.generate(**inputs, generation_config=config, tokenizer=tokenizer)
            assert torch.equal(drafted, out.sequences)
            assert config.stop_strings == [stop], "the caller's config was changed"


@pytest.mark.parametrize("config", [None, GenerationConfig(do_sample=False), GenerationConfig(stop_strings=["ne ver"])])
def test_stop_strings_of_the_models_own_config_count(model, tokenizer, config, monkeypatch):
    inputs, options = BATCHES["one"], {"do_sample": False, "max_new_tokens": 24, "tokenizer": tokenizer}
    columns = inputs["input_ids"].shape[1]
    whole = model.base.generate(**inputs, do_sample=False, max_new_tokens=24)
    own = copy.deepcopy(model.generation_config)
    own.stop_strings = [tokenizer.decode(whole[0, columns + 3 : columns + 5])]
    monkeypatch.setattr(model.base, "generation_config", own)
    expected = model.base.generate(**inputs, **options, generation_config=config)
    assert torch.equal(model.generate(**inputs, **options, generation_config=config), expected)
    (many,) = model.generate_many(inputs["input_ids"].tolist(), **options, generation_config=config)
    assert many.tokens == expected[0, columns:].tolist()
    assert (len(many.tokens) < 24) == (config is None or config.stop_strings is None)


def test_stop_strings_without_a_tokenizer_are_refused(model):
    with pytest.raises(ValueError, match="stop_strings needs tokenizer="):
        model.generate(**BATCHES["one"], stop_strings="x", max_new_tokens=4)


class EndsOnMultiple(StoppingCriteria):
    """Of all it is given: the row's prompt, its padding and what was generated."""

    def __init__(self, of):
        self.of = of

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids.sum(1) + input_ids.shape[1]) % self.of == 0


def test_stopping_criteria_are_asked_after_each_token(model):
    for batch, of in itertools.product(BATCHES, [3, 7, 11]):
        criteria = StoppingCriteriaList([EndsOnMultiple(of)])
        assert_same(model, BATCHES[batch], stopping_criteria=criteria, pad_token_id=PAD, accepted=0.9)


class EndsOn(EndsOnMultiple):
    """Says so by a Python bool, as many recipes for stop tokens do; asked with one row alone."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[0, -1].item() % self.of == 0


def test_a_stopping_criterion_may_return_a_bool(model):
    for of in [3, 7]:
        out = assert_same(model, BATCHES["one"], stopping_criteria=[EndsOn(of)], pad_token_id=PAD, accepted=0.9)
        (many,) = model.generate_many(
            BATCHES["one"]["input_ids"].tolist(), stopping_criteria=[EndsOn(of)], do_sample=False, max_new_tokens=24
        )
        assert many.tokens == out.sequences[0, BATCHES["one"]["input_ids"].shape[1] :].tolist()


class EndsWhenAllHave(StoppingCriteria):
    """Of a batch, with a memory of its rows, as evaluation harnesses have; keeps what it was asked."""

    def __init__(self, of, rows):
        self.of, self.found, self.asked = of, [False] * rows, []

    def __call__(self, input_ids, scores, **kwargs):
        self.asked.append(input_ids.tolist())
        for row, found in enumerate(self.found):
            self.found[row] = found or input_ids[row, -1].item() % self.of == 0
        return all(self.found)


class EndsOneByOne(EndsWhenAllHave):
    """The same row by row, which other rows do not end."""

    def __call__(self, input_ids, scores, **kwargs):
        super().__call__(input_ids, scores, **kwargs)
        return torch.tensor(self.found)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", [EndsWhenAllHave, EndsOneByOne, EndsOn])
@pytest.mark.parametrize("of", [3, 7, 1000])
def test_stopping_criteria_of_batches_are_asked_what_hugging_face_asks_them(model, batch, kind, of):
    inputs, rows = BATCHES[batch], len(BATCHES[batch]["input_ids"])
    # With an end token that never comes transformers pads rows that have stopped, as here.
    options = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": 96, "pad_token_id": PAD}
    criteria = [EndsOn(of) if kind is EndsOn else kind(of, rows) for _ in range(3)]
    expected = model.base.generate(**inputs, **options, stopping_criteria=[criteria[0]])
    whole = model.base.generate(**inputs, **options)
    drafted = model.generate(
        **inputs, **options, stopping_criteria=[criteria[1]], draft=Replay(inputs, whole),
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    plain = model.generate(**inputs, **options, stopping_criteria=[criteria[2]], draft=False)
    assert torch.equal(drafted.sequences, expected) and torch.equal(plain, expected)
    columns = inputs["input_ids"].shape[1]
    assert len(drafted.scores) == expected.shape[1] - columns
    if kind is EndsOn:
        return
    assert criteria[1].asked == criteria[2].asked == criteria[0].asked
    texts = [[] for _ in range(rows)]
    for step in drafted.steps:
        for row, tokens in enumerate(step.tokens):
            texts[row] += tokens
            assert len(step.ranks[row]) == step.accepted[row] <= min(len(tokens), step.drafted[row])
            assert tokens or step.drafted[row] == 0
    for text, row in zip(texts, expected[:, columns:].tolist(), strict=True):
        assert row == text + [PAD] * (len(row) - len(text))


class Unsure(StoppingCriteria):
    """Ends a row where its last token was unlikely; keeps the scores."""

    def __init__(self, least):
        self.least, self.given = least, []

    def __call__(self, input_ids, scores, **kwargs):
        self.given.append(scores)
        return torch.zeros(len(input_ids)) > 0 if scores is None else scores[-1].softmax(-1).amax(-1) < self.least


KEPT = {"return_dict_in_generate": True, "output_scores": True}


def test_stopping_criteria_are_given_the_scores_that_hugging_face_gives_them(model):
    for batch, draft in itertools.product(BATCHES, ["replay", False]):
        inputs = BATCHES[batch]
        options = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": 96, "pad_token_id": PAD}
        whole = model.base.generate(**inputs, **options, **KEPT, repetition_penalty=1.2)
        least = torch.stack(whole.scores).softmax(-1).amax(-1).flatten().sort().values
        for share in (0.02, 0.2):
            theirs, ours = (Unsure(float(least[int(share * len(least))]) + 1e-4) for _ in range(2))
            expected = model.base.generate(
                **inputs, **options, **KEPT, repetition_penalty=1.2, stopping_criteria=[theirs]
            )
            found = model.generate(
                **inputs, **options, **KEPT, repetition_penalty=1.2, stopping_criteria=[ours],
                draft=draft and Replay(inputs, whole.sequences),
            )  # fmt: skip
            assert torch.equal(found.sequences, expected.sequences)
            assert [len(one) for one in ours.given] == [len(one) for one in theirs.given]
            assert len(ours.given) < 24 or share < 0.2
            for one, other in zip(ours.given[-1], theirs.given[-1], strict=True):
                alive = one.any(-1)  # zeros after a row's end, where transformers has scores after padding
                torch.testing.assert_close(one[alive], other[alive], atol=1e-4, rtol=1e-4)
                assert not one.requires_grad and not one.is_inference()


def test_without_scores_stopping_criteria_get_none_as_in_hugging_face(model):
    for kept in [{}, {"return_dict_in_generate": True}, {**KEPT, "return_dict_in_generate": False}]:
        theirs, ours = Unsure(0.5), Unsure(0.5)
        options = {**BATCHES["one"], "do_sample": False, "max_new_tokens": 5, **kept}
        model.base.generate(**options, stopping_criteria=[theirs])
        model.generate(**options, stopping_criteria=[ours])
        assert {*theirs.given} == {*ours.given} == {None}


def test_so_are_those_of_each_prompt_where_the_config_keeps_scores(model):
    prompts = [[5, 6, 7], [9, 8], [11, 12, 13, 14], [3]]
    config = GenerationConfig(do_sample=False, max_new_tokens=24, eos_token_id=96, pad_token_id=PAD, **KEPT)
    wanted = []
    for prompt in prompts:
        out = model.base.generate(torch.tensor([prompt]), generation_config=config, stopping_criteria=[Unsure(0.3)])
        wanted.append(out.sequences[0, len(prompt) :].tolist())
    many = model.generate_many(prompts, batch_size=2, generation_config=config, stopping_criteria=[Unsure(0.3)])
    assert [one.tokens for one in many] == wanted and {*map(len, wanted)} != {24}


class EndsEarlier(EosTokenCriteria):
    """A subclass of a criterion of transformers, which does something else."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] % 3 == 0


def test_a_subclass_of_a_criterion_of_hugging_face_is_asked_itself(model):
    options = {**BATCHES["one"], "do_sample": False, "max_new_tokens": 24, "stopping_criteria": [EndsEarlier(96)]}
    assert torch.equal(model.generate(**options), model.base.generate(**options))


def test_a_time_limit_that_has_passed_leaves_one_token(model):
    inputs = BATCHES["ragged"]
    out = model.generate(**inputs, do_sample=False, max_new_tokens=24, max_time=1e-9)
    assert torch.equal(out, model.base.generate(**inputs, do_sample=False, max_new_tokens=24, max_time=1e-9))
    assert out.shape[1] == inputs["input_ids"].shape[1] + 1


def test_every_limit_and_every_eos_cuts_drafts_where_hugging_face_stops(model):
    for batch in BATCHES:
        inputs = BATCHES[batch]
        columns = inputs["input_ids"].shape[1]
        whole = model.base.generate(**inputs, do_sample=False, max_new_tokens=12)
        for limit in (*range(1, 12), 6.0):  # a quotient is a float
            options = {"do_sample": False, "max_new_tokens": limit}
            expected = model.base.generate(**inputs, **options)
            assert torch.equal(model.generate(**inputs, **options, draft=Replay(inputs, whole)), expected)
            options = {"do_sample": False, "max_length": columns + limit}
            assert torch.equal(model.generate(**inputs, **options, draft=Replay(inputs, whole)), expected)
        for first, second in itertools.pairwise(whole[0, columns:].tolist()):
            options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": [second, first], "pad_token_id": PAD}
            expected = model.base.generate(**inputs, **options)
            assert torch.equal(model.generate(**inputs, **options, draft=Replay(inputs, whole)), expected)


def test_nested_and_tensor_forms_of_eos_end_rows_as_in_hugging_face(model):
    for form in [lambda a, b: [[a]], lambda a, b: torch.tensor([[a], [b]]), lambda a, b: torch.tensor(a)]:
        inputs = BATCHES["ragged"]
        columns = inputs["input_ids"].shape[1]
        whole = model.base.generate(**inputs, do_sample=False, max_new_tokens=12)
        ids = form(int(whole[0, columns + 4]), int(whole[1, columns + 2]))
        options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": ids, "pad_token_id": PAD}
        expected = model.base.generate(**inputs, **options)
        assert torch.equal(model.generate(**inputs, **options, draft=Replay(inputs, whole)), expected)
        assert expected.shape != whole.shape or not torch.equal(expected, whole)


LIMITS = {
    "2.5": ValueError, "math.inf": ValueError, "math.nan": ValueError, "torch.tensor([3, 3])": TypeError,
    "torch.tensor(3)": TypeError, "True": TypeError,
}  # fmt: skip


def test_limits_that_are_no_whole_numbers_are_refused(model):
    """Also in the generation config, and one for each prompt."""
    for name, limit in itertools.product(["max_new_tokens", "max_length", "min_new_tokens", "min_length"], LIMITS):
        value, error = eval(limit, {"math": math, "torch": torch}), LIMITS[limit]
        prompts = BATCHES["one"]["input_ids"]
        with pytest.raises(error, match=f"^{name}=.* must be a"):
            model.generate(prompts, **{name: value})
        with pytest.raises(error, match=f"{name}=.* must be a"):
            model.generate_many(prompts.tolist() * 2, **{name: value})
        if name == "max_new_tokens":
            with pytest.raises(error, match=r"^prompt 1: max_new_tokens=.* must be a"):
                model.generate_many(prompts.tolist() * 2, max_new_tokens=[3, value])
            with pytest.raises(error, match=r"^prompt 0: max_new_tokens=.* must be a"):
                model.generate_many(iter(prompts.tolist()), max_new_tokens=[value])


def test_a_time_limit_that_is_no_number_of_seconds_is_refused(model):
    for value, error in ((math.nan, ValueError), ("3", TypeError), (torch.tensor(3), TypeError)):
        with pytest.raises(error, match=r"^max_time="):
            model.generate(**BATCHES["one"], max_new_tokens=3, max_time=value)


def test_a_length_criterion_without_an_end_is_no_limit(model):
    options = {**BATCHES["one"], "max_new_tokens": 3, "stopping_criteria": [MaxLengthCriteria(math.inf)]}
    with pytest.raises(ValueError, match="no length limit"):
        model.generate(**options)


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
