"""romsto's functions in specheads.compat: texts, end tokens, acceptance rates and n-gram storages."""

import pytest
import torch

from specheads import compat
from tests.reference.greedy_replay import NEW, PROMPT, greedy_draft, replayed
from tests.support.seq2seq_models import tiny_t5
from tests.support.tiny_models import tiny_llama


@pytest.mark.parametrize("gamma", [1, 4])
def test_greedy_text_and_acceptance_are_those_of_a_replay(target, small, gamma):
    ids, accepted, drafted = replayed(target, greedy_draft(small), gamma, NEW)
    assert ids == target.plain and 0 < accepted < drafted
    options = {"gamma": gamma, "max_gen_len": NEW, "eos_tokens_id": []}
    assert compat.speculative_generate(PROMPT, small, target, **options) == (ids, accepted / drafted)
    assert compat.autoregressive_generate(PROMPT, target, NEW, eos_tokens_id=[]) == ids


@pytest.mark.parametrize("storage", [compat.NGramStorage, compat.OneLevelNGramStorage])
def test_ngram_text_and_acceptance_are_those_of_a_replay(target, storage):
    prompt = PROMPT + target.plain  # which it then repeats, as a model this small repeats itself
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


@pytest.mark.parametrize("length", [1, 2, NEW])
@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder"])
def test_a_storage_learns_the_prompt_and_the_whole_text(target, kind, length):
    model = target if kind == "decoder" else tiny_t5()
    given, by_hand = compat.NGramStorage(3, 97), compat.NGramStorage(3, 97)
    options = {"filler_top_k": 1, "max_gen_len": length, "eos_tokens_id": [], "stop_if_unknown": True}
    text, _ = compat.ngram_assisted_speculative_generate(PROMPT, given, model, **options)
    rows = [PROMPT + text] if kind == "decoder" else [PROMPT, text]
    for row in rows:
        by_hand.initialize(row)
    for context in (row[:end] for row in rows for end in range(1, len(row))):
        assert given.next_token(context) == by_hand.next_token(context), context


def test_the_earliest_of_several_end_tokens_ends_the_text(target, small):
    plain = target.plain
    late, early = plain[9], plain[5]
    first = next(i for i, token in enumerate(plain) if token in (late, early))
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
    """As theirs counts: n accepted of γ, wherever the end token is."""
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
