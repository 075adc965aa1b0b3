"""Matches of a row's last ids are those that a search of the row by brute force finds."""

import itertools
import random

import pytest

from specheads import MaxGram, PromptLookup
from specheads.decoding.drafters.lookup import copy_ids, longest_match, to_text
from tests.support.drafter_context import context
from tests.support.random_rows import ends_of, random_row


def copied(row, start, count):
    """Token by token, each copy appended to the row it is copied from."""
    row = list(row)
    for index in range(start, start + count):
        row.append(row[index])
    return row[len(row) - count :]


def looked_up(row, count, width, longest, shortest):
    """PromptLookup's runs by definition."""
    found = {}
    for length in range(min(longest, len(row) - 1), shortest - 1, -1):
        for end in reversed(ends_of(row, row[-length:])):
            found.setdefault(row[end], end)
    return [copied(row, end, count) for end in list(found.values())[:width]]


def test_prompt_lookup_drafts_what_its_definition_says():
    for (width, longest, shortest), alphabet in itertools.product(
        [(1, 1, 1), (1, 4, 1), (1, 40, 3), (2, 3, 2), (3, 6, 1)], [1, 2, 3, 5]
    ):
        rng, drafter = random.Random(alphabet), PromptLookup(4, width, max_ngram=longest, min_ngram=shortest)
        for length in range(1, 40):
            row = random_row(rng, alphabet, length)
            assert drafter.paths(context([row]), 5) == [looked_up(row, 5, width, longest, shortest)]


def test_the_longest_match_is_the_longest_suffix_that_occurs_earlier():
    for alphabet in [1, 2, 5]:
        rng = random.Random(alphabet)
        for length in range(1, 40):
            row = random_row(rng, alphabet, length)
            for longest in (1, 3, length):
                matched = [n for n in range(1, min(longest, length - 1) + 1) if ends_of(row, row[-n:])]
                assert longest_match(to_text(row), longest) == max(matched, default=0)


@pytest.mark.parametrize("drafter", [PromptLookup(3), PromptLookup(3, width=2), MaxGram(3)], ids=repr)
@pytest.mark.parametrize("source", [None, [[0, 1, 2, 0], [3, 1]]], ids=["no source", "source"])
def test_rows_that_grow_and_drafts_after_them_are_searched_as_they_are(drafter, source):
    """One context over many steps gives what a new one gives, whatever was drafted in between."""
    rng, rows = random.Random(0), [[1, 2], [0]]
    kept = context(rows, source=source)
    for _ in range(40):
        for row in rows:
            row += random_row(rng, 4, rng.randint(0, 3))
        drafted = {b: rows[b] + random_row(rng, 4, rng.randint(0, 4)) for b in rng.sample([0, 1], rng.randint(1, 2))}
        own = {b: [source[b]] if source else None for b in drafted}
        assert drafter.paths(kept, 3, drafted) == [
            drafter.paths(context([ids], source=own[b]), 3)[0] for b, ids in drafted.items()
        ]
        assert drafter.paths(kept, 3) == drafter.paths(context(rows, source=source), 3)


def test_a_source_counts_as_earlier_text():
    assert PromptLookup(2).paths(context([[9, 2]], source=[[1, 2, 3, 4]]), 2) == [[[3, 4]]]


def test_ids_may_be_any_character_codes():
    """Halves of surrogate pairs and codes beyond 16 bits among them."""
    for first in [0xD7F0, 300_000]:
        row = [first + token for token in (1, 20, 3, 40, 1, 20)]
        assert PromptLookup(2).paths(context([row]), 2) == [[[first + 3, first + 40]]]


def test_a_copy_that_reaches_the_end_continues_with_itself():
    row = [5, 1, 2, 3]
    for start in range(4):
        for count in (1, 3, 9):
            assert copy_ids(to_text(row), start, count) == copied(row, start, count)
