"""The suffix automaton says of every row what a search of the row by brute force says."""

import random

import pytest

from specheads.decoding.drafters.suffix import Match, SuffixAutomaton, copied


def random_row(rng, alphabet, length):
    """Ids with runs copied from earlier on, so that long suffixes repeat."""
    row = []
    while len(row) < length:
        if row and rng.random() < 0.3:
            start = rng.randrange(len(row))
            row += row[start : start + rng.randint(1, 8)]
        else:
            row.append(rng.randrange(alphabet))
    return row[:length]


def ends_of(row, suffix):
    """Where the suffix ends in the row, the row's own end left out."""
    return [end for end in range(len(suffix), len(row)) if row[end - len(suffix) : end] == suffix]


def longest_repeat(row, longest):
    """(length, ends) of the longest suffix of at most `longest` ids that occurs earlier."""
    for length in range(min(longest, len(row) - 1), 0, -1):
        if ends := ends_of(row, row[-length:]):
            return length, ends
    return 0, [0]


def followers(row, count, longest, shortest):
    """Places of distinct followers, those of longer suffixes first, of these the latest first."""
    found = {}
    for length in range(min(longest, len(row) - 1), max(shortest, 1) - 1, -1):
        for end in reversed(ends_of(row, row[-length:])):
            found.setdefault(row[end], end)
    return list(found.values())[:count]


def assert_like_brute_force(automaton, row):
    assert automaton.ids == row
    length, ends = longest_repeat(row, len(row))
    assert automaton.leftmost() == Match(length, ends[0])
    for longest in range(1, automaton.recent + 1):
        length, ends = longest_repeat(row, longest)
        match = automaton.latest(longest)
        assert match.length == length
        assert not length or match.end == ends[-1]
    for longest in range(1, automaton.recent):
        for count, shortest in ((1, 1), (3, 1), (2, longest)):
            expected = followers(row, count, longest, shortest)
            assert automaton.continuations(count, longest, shortest) == expected


@pytest.mark.parametrize("recent", [0, 1, 3, 6])
@pytest.mark.parametrize("alphabet", [1, 2, 3, 5])
def test_it_finds_the_longest_repeated_suffix_first_and_last(alphabet, recent):
    rng = random.Random(alphabet)
    for length in (1, 2, 12, 40):
        row = random_row(rng, alphabet, length)
        automaton = SuffixAutomaton(recent)
        for end in range(length):
            automaton.append(row[end])
            assert_like_brute_force(automaton, row[: end + 1])


def state_of(automaton):
    return {name: value for name, value in vars(automaton).items() if name != "_followed"}


@pytest.mark.parametrize("alphabet", [1, 2, 4])
def test_rewinding_undoes_appending(alphabet):
    rng = random.Random(alphabet)
    for recent in (0, 4):
        automaton, row = SuffixAutomaton(recent), []
        for _ in range(60):
            more = random_row(rng, alphabet, rng.randint(1, 6))
            for token in more:
                automaton.append(token)
            row += more
            count = rng.randint(0, min(len(row), 7))
            automaton.rewind(count)
            row = row[: len(row) - count]
            fresh = SuffixAutomaton(recent)
            fresh.follow(row)
            assert state_of(automaton) == state_of(fresh)


def test_it_follows_a_row_that_grows_in_place_and_any_other_row():
    rng = random.Random(0)
    automaton, row = SuffixAutomaton(3), [1, 2]
    for _ in range(40):
        if rng.random() < 0.5:
            row += random_row(rng, 3, rng.randint(0, 3))
        else:  # another list: shorter, as long, or longer, alike for a while
            row = row[: rng.randint(0, len(row))] + random_row(rng, 3, rng.randint(0, 4))
        automaton.follow(row)
        assert_like_brute_force(automaton, row)


def test_a_row_that_grows_costs_its_new_ids_only(monkeypatch):
    appended = []
    append = SuffixAutomaton.append
    monkeypatch.setattr(SuffixAutomaton, "append", lambda self, token: (appended.append(token), append(self, token)))
    automaton, row = SuffixAutomaton(4), list(range(500))
    automaton.follow(row)
    appended.clear()
    row += [7, 8]
    automaton.follow(row)
    assert appended == [7, 8]


@pytest.mark.parametrize("row", [[0] * 3000, [0, 1] * 1500, list(range(3000))], ids=["one id", "two", "all new"])
def test_the_work_grows_with_the_row_and_not_faster(row, monkeypatch):
    """Counted in states made and in states whose latest occurrence is noted, per id."""
    noted = []
    register = SuffixAutomaton._register

    def counting(self):
        noted.append(register(self))
        return noted[-1]

    monkeypatch.setattr(SuffixAutomaton, "_register", counting)
    automaton = SuffixAutomaton(recent=5)
    automaton.follow(row)
    assert len(automaton._length) <= 2 * len(row)
    assert max(map(len, noted)) <= 5


def test_a_copy_that_reaches_the_end_goes_on_with_itself():
    row = [5, 1, 2, 3]
    assert copied(row, 0, 3) == [5, 1, 2]
    assert copied(row, 1, 8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert copied(row, 3, 2) == [3, 3]
