"""SuffixAutomaton: every substring of a growing row of ids, to find which suffix of the row has occurred before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import nlargest
from typing import NamedTuple


class Match(NamedTuple):
    """An earlier occurrence of the row's suffix: its length in tokens (0: none), and the index of the id behind it."""

    length: int
    end: int


class SuffixAutomaton:
    """Grows by one id in amortised O(1) and rewinds by what growing cost, whatever the length of the row.

    recent: latest occurrences are kept for substrings of at most so many tokens, in O(recent) an id; 0 keeps none.

    A state stands for the substrings that end at the same places in the row, state 0 for the empty one; its link is
    the state of its longest suffix that ends elsewhere too. So the link of the whole row's state is the longest suffix
    that has occurred before. Blumer et al., Theoretical Computer Science 40 (1985).
    """

    def __init__(self, recent: int = 0) -> None:
        self.recent = recent
        self.ids: list[int] = []
        # Per state: transitions, link, longest length, and the ends of its first and its latest known occurrence.
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self._first, self._latest = [-1], [0], [0], [0]
        self._whole = 0  # the state of the whole row
        # Per id, what `rewind` needs: the whole row's state before, the state split in two or -1, and where `latest`
        # was overwritten with what it held.
        self._log: list[tuple[int, int, list[tuple[int, int]]]] = []
        self._followed: Sequence[int] | None = None

    def follow(self, ids: Sequence[int]) -> None:
        """Become the automaton of `ids`, at the cost of those that differ. A list given before may only have grown."""
        if ids is not self._followed or len(ids) < len(self.ids):
            shared, step = min(len(self.ids), len(ids)), 1
            while self.ids[:shared] != ids[:shared]:  # rows mostly differ near their ends
                shared, step = max(0, shared - step), 2 * step
            self.rewind(len(self.ids) - shared)
            self._followed = ids
        for token in ids[len(self.ids) :]:
            self.append(token)

    def append(self, token: int) -> None:
        """Add one id at the end."""
        registered = self._register() if self.recent else []
        before, split = self._whole, -1
        self.ids.append(token)
        whole = self._whole = self._new(self._length[before] + 1, {}, len(self.ids), len(self.ids))
        state = before
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = whole
            state = self._link[state]
        link = 0
        if state >= 0:
            link = self._next[state][token]
            if self._length[link] > self._length[state] + 1:
                # The shorter substrings of `link` now end here too, and its longer ones do not.
                split = link
                link = self._new(
                    self._length[state] + 1, dict(self._next[split]), self._first[split], self._latest[split]
                )
                self._link[link] = self._link[split]
                while state >= 0 and self._next[state].get(token) == split:
                    self._next[state][token] = link
                    state = self._link[state]
                self._link[split] = link
        self._link[whole] = link
        self._log.append((before, split, registered))

    def rewind(self, count: int) -> None:
        """Take the last `count` ids away again."""
        for _ in range(count):
            token, whole = self.ids.pop(), self._whole
            state, split, registered = self._log.pop()
            self._whole = state
            if split >= 0:
                self._link[split] = self._link[whole + 1]
            while state >= 0 and self._next[state].get(token) == whole:
                del self._next[state][token]
                state = self._link[state]
            while split >= 0 and state >= 0 and self._next[state].get(token) == whole + 1:
                self._next[state][token] = split
                state = self._link[state]
            for column in (self._next, self._link, self._length, self._first, self._latest):
                del column[whole:]
            for state, end in registered:
                self._latest[state] = end

    def leftmost(self) -> Match:
        """The longest suffix that has occurred before, where it occurred first."""
        state = max(0, self._link[self._whole])
        return Match(self._length[state], self._first[state])

    def latest(self, longest: int) -> Match:
        """The longest suffix of at most `longest` ≤ recent tokens that has occurred before, where it did so last."""
        state = self._suffix(longest)
        return Match(min(longest, self._length[state]), self._latest[state])

    def continuations(self, count: int, longest: int, shortest: int = 1) -> list[int]:
        """Where up to `count` distinct followers of the suffix stand in the row: those behind its longest earlier
        occurrences first, and of these the latest first. Suffixes of `shortest` to `longest` < recent tokens count."""
        found: dict[int, int] = {}
        ending = set(self._suffixes(self.recent))  # these occur at the row's end too, which is not noted yet
        for state in self._suffixes(longest):
            if self._length[state] < shortest or len(found) >= count:
                break
            followers = (
                (len(self.ids) if child in ending else self._latest[child], token)
                for token, child in self._next[state].items()
            )
            for end, token in nlargest(count, followers):
                found.setdefault(token, end - 1)
        return list(found.values())[:count]

    def _new(self, length: int, following: dict[int, int], first: int, latest: int) -> int:
        self._next.append(following)
        self._link.append(-1)
        self._length.append(length)
        self._first.append(first)
        self._latest.append(latest)
        return len(self._length) - 1

    def _suffix(self, longest: int) -> int:
        """The state of the longest suffix of at most `longest` tokens that has occurred before."""
        state = max(0, self._link[self._whole])
        if self._length[state] > longest:
            state = 0
            for token in self.ids[-longest:]:
                state = self._next[state][token]
        return state

    def _suffixes(self, longest: int) -> Iterator[int]:
        """The states of all suffixes of at most `longest` tokens that have occurred before, longest first."""
        state = self._suffix(longest)
        while state > 0:
            yield state
            state = self._link[state]

    def _register(self) -> list[tuple[int, int]]:
        """Note the end of the row as the latest occurrence of its suffixes, now that an id is to follow them."""
        overwritten = []
        for state in self._suffixes(self.recent):
            overwritten.append((state, self._latest[state]))
            self._latest[state] = len(self.ids)
        return overwritten


def copied(ids: Sequence[int], start: int, count: int) -> list[int]:
    """`count` ids from `start` on; where the row ends, the copy goes on with what it has copied (a row that repeats
    itself goes on repeating itself)."""
    run = list(ids[start : start + count])
    return (run * (count // len(run) + 1))[:count] if run else []
