"""N-gram storages that learn while decoding, and the drafter that reads them (NASD, and ANPD without fillers)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Any

from specheads.decoding.drafters.base import Context
from specheads.decoding.drafters.paths import PathDrafter


class _Followers:
    """What followed one context: counts by id, and the id counted most, the latest of several."""

    __slots__ = ("best", "counts")

    def __init__(self) -> None:
        self.best = -1
        self.counts: dict[int, int] = {}

    def add(self, token: int) -> None:
        # Taken out and put back, so that the dict is in the order of the latest count.
        count = self.counts[token] = self.counts.pop(token, 0) + 1
        if count >= self.counts.get(self.best, 0):
            self.best = token

    def top(self, count: int) -> list[int]:
        """The `count` ids counted most, of equals the latest first."""
        return nlargest(count, reversed(self.counts), key=self.counts.__getitem__)


class NGramStorage:
    """Counts which id follows the last n − 1 ids, the last n − 2, … the last one, and answers from the longest known.

    A level is a number of context ids. vocab_size and seed serve the random ids of unknown contexts; without a
    vocab_size those give -1, which is no id.
    """

    def __init__(self, n: int = 3, vocab_size: int | None = None, *, seed: int = 0) -> None:
        for name, value, least in (("n", n, 2), ("vocab_size", 1 if vocab_size is None else vocab_size, 1)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{type(self).__name__}: {name}={value!r} must be a whole number of at least {least}")
        self.n, self.vocab_size, self.seed = n, vocab_size, seed
        self.levels = self._levels()
        self.reset()

    def _levels(self) -> tuple[int, ...]:
        """Longest first."""
        return tuple(range(self.n - 1, 0, -1))

    def reset(self) -> None:
        """Forget everything."""
        self._known: dict[int, dict[tuple[int, ...], _Followers]] = {level: {} for level in self.levels}
        self._random = random.Random(self.seed)

    def initialize(self, ids: Sequence[int], start: int = 1) -> None:
        """Count every id of the row from index `start` on, behind the ids before it."""
        for index in range(max(1, start), len(ids)):
            self.update(ids[max(0, index - self.n + 1) : index], ids[index : index + 1])

    def update(self, context: Sequence[int], tokens: Sequence[int]) -> None:
        """Count each of `tokens` once as a follower of the context."""
        for level in self.levels:
            if level <= len(context):
                followers = self._known[level].setdefault(tuple(context[-level:]), _Followers())
                for token in tokens:
                    followers.add(token)

    def next_token(self, context: Sequence[int], level: int | None = None) -> tuple[int, bool]:
        """The id that followed most often, of equals the latest, and whether one is known; if not, a random id.

        level: ask that one alone. ValueError where the storage has no such level, or has counted nothing there yet.
        """
        followers = self._find(context, self.levels if level is None else (self._seen(level),))
        if followers:
            return followers.best, True
        return (-1 if self.vocab_size is None else self._random.randrange(self.vocab_size)), False

    def followers(self, context: Sequence[int], count: int) -> list[int]:
        """Up to `count` ids that followed, the most often counted first; none for an unknown context."""
        followers = self._find(context, self.levels)
        return followers.top(count) if followers else []

    def _seen(self, level: int) -> int:
        if level not in self._known:
            raise ValueError(f"{type(self).__name__}(n={self.n}) has no level {level}: ask for {self.levels}")
        if not self._known[level]:
            raise ValueError(f"level {level} has seen no context of {level} ids yet: initialize or update it first")
        return level

    def _find(self, context: Sequence[int], levels: tuple[int, ...]) -> _Followers | None:
        for level in levels:
            if level <= len(context) and (followers := self._known[level].get(tuple(context[-level:]))):
                return followers
        return None


class OneLevelNGramStorage(NGramStorage):
    """Counts which id follows the last n − 1 ids, and knows no shorter context."""

    def _levels(self) -> tuple[int, ...]:
        return (self.n - 1,)


@dataclass(frozen=True)
class NGram(PathDrafter):
    """Drafts from a storage that learns the prompt (and an encoder's source), what is emitted, and what the target
    would have said besides.

    storage: by default one of its own, of trigrams. filler_top_k: behind each accepted id the target's so many
    likeliest are counted too; 1 counts none besides the emitted one. stop_if_unknown: end the draft at an unknown
    context, instead of drafting a random id there. reset_between: forget each prompt before the next. The rows of a
    batch share the storage. width > 1: several first ids, each followed by its likeliest run.
    After https://github.com/romsto/Speculative-Decoding; with filler_top_k=1 it is ANPD, arXiv:2404.08698.
    """

    positional = ("n",)

    num_tokens: int = 5
    storage: NGramStorage = field(default_factory=NGramStorage, kw_only=True)
    filler_top_k: int = 3
    stop_if_unknown: bool = True
    reset_between: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least("filler_top_k", 1)
        if not self.stop_if_unknown and self.storage.vocab_size is None:
            raise ValueError(
                "NGram(stop_if_unknown=False) drafts random ids, and which there are is not known; give "
                "storage=NGramStorage(3, vocab_size)"
            )

    @classmethod
    def from_text(cls, n: int = 3, *, vocab_size: int | None = None, **options: Any) -> NGram:
        """`ngram[:N]`: a storage of n-grams of N tokens."""
        return cls(storage=NGramStorage(n, vocab_size), **options)

    @property
    def wants_target_top(self) -> int:
        return self.filler_top_k if self.filler_top_k > 1 else 0

    def reset(self) -> None:
        self.storage.reset()

    def runs(self, context: Context, length: int, rows: Mapping[int, list[int]] | None = None) -> list[list[list[int]]]:
        self._learn(context)
        return [self._row(ids, length) for ids in (context.history if rows is None else rows.values())]

    def _learn(self, context: Context) -> None:
        learnt = context.memory.get("learnt")
        if learnt is None:
            if self.reset_between:
                self.reset()
            learnt = context.memory["learnt"] = [0] * len(context.history)
            for source in context.source or ():
                self.storage.initialize(source)
        if learnt == [len(ids) for ids in context.history]:  # asked again in the same step
            return
        if context.top is not None:
            tops, counts = context.top.tolist(), context.new.tolist()
            for ids, top, count in zip(context.history, tops, counts, strict=True):
                end = len(ids) - min(count, len(top))
                for place, likeliest in enumerate(top[: len(ids) - end], start=end):
                    # The likeliest last, which of equals makes it the first choice.
                    self.storage.update(ids[max(0, place - self.storage.n + 1) : place], likeliest[::-1])
        for row, ids in enumerate(context.history):
            self.storage.initialize(ids, learnt[row])
            learnt[row] = len(ids)

    def _row(self, ids: list[int], length: int) -> list[list[int]]:
        size = self.storage.n - 1
        if self.width == 1:
            return [self._run(ids[-size:], [], length)]
        first = self.storage.followers(ids[-size:], self.width)
        return [self._run(ids[-size:], [token], length) for token in first]

    def _run(self, context: list[int], run: list[int], length: int) -> list[int]:
        context = context + run
        while len(run) < length:
            token, known = self.storage.next_token(context[-self.storage.n + 1 :])
            if not known and self.stop_if_unknown:
                break
            run.append(token)
            context.append(token)
        return run
