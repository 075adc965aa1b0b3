"""N-gram storages that learn during decoding, and the drafter that uses them (NASD; ANPD without fillers)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Any

from specheads.decoding.drafters.base import Context
from specheads.decoding.drafters.lookup import copyable_sources
from specheads.decoding.drafters.path_drafter import PathDrafter, Paths
from specheads.decoding.planner import Plan
from specheads.options import shown


class _Followers:
    """What followed one context: counts by id, and the most frequent id, the latest on ties."""

    __slots__ = ("best", "counts")

    def __init__(self) -> None:
        self.best = -1
        self.counts: dict[int, int] = {}

    def add(self, token: int) -> None:
        # Removed and inserted again, so that the dict is ordered by when an id was last counted.
        count = self.counts[token] = self.counts.pop(token, 0) + 1
        if count >= self.counts.get(self.best, 0):
            self.best = token

    def top(self, count: int) -> list[int]:
        """The `count` most frequent ids, the latest first on ties."""
        return nlargest(count, reversed(self.counts), key=self.counts.__getitem__)


class NGramStorage:
    """Counts which id follows the last n − 1 ids, n − 2, … and the last one; answers from the longest known context.

    A level is a number of context ids. For an unknown context the id is drawn from range(vocab_size) with `seed`;
    without a vocab_size it is -1.
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
        """Count every id of the row from index `start` on as a follower of the ids before it."""
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
        """The id that followed most often (the latest on ties) and True; for an unknown context a random id and False.

        level: search only that one. ValueError if the storage has no such level, or has counted nothing there yet.
        """
        followers = self._find(context, self.levels if level is None else (self._require_level(level),))
        if followers:
            return followers.best, True
        return (-1 if self.vocab_size is None else self._random.randrange(self.vocab_size)), False

    def followers(self, context: Sequence[int], count: int) -> list[int]:
        """Up to `count` ids that followed, most frequent first; none for an unknown context."""
        followers = self._find(context, self.levels)
        return followers.top(count) if followers else []

    def _require_level(self, level: int) -> int:
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
    """Counts which id follows the last n − 1 ids, and nothing for shorter contexts."""

    def _levels(self) -> tuple[int, ...]:
        return (self.n - 1,)


@dataclass(frozen=True)
class NGram(PathDrafter):
    """Drafts from a storage that learns the prompt (and an encoder's source), the emitted text, and other tokens the
    target found likely.

    storage: by default a new one, of trigrams. filler_top_k: after each accepted id, count this many of the target's
    likeliest ids too; 1 counts only the emitted one. stop_if_unknown: end the draft at an unknown context, instead of
    drafting a random id there. reset_between: forget each prompt before the next. The rows of a batch share the
    storage, and so do the prompts that refill it. width > 1: several first ids, each followed by its likeliest path.
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
        if not isinstance(self.storage, NGramStorage):
            raise TypeError(
                f"NGram: storage={shown(self.storage)} must be an NGramStorage, for instance NGramStorage(3)"
            )
        if not self.stop_if_unknown and self.storage.vocab_size is None:
            raise ValueError(
                "NGram(stop_if_unknown=False) drafts random ids, and its storage has no vocab_size; give "
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

    def refill(self, context: Context, rows: list[int], prompts: Context, plan: Plan) -> None:
        super().refill(context, rows, prompts, plan)
        for row in rows if "learned" in context.memory else ():
            context.memory["learned"][row] = 0

    def paths(self, context: Context, length: int, rows: Mapping[int, list[int]] | None = None) -> list[Paths]:
        self._learn(context)
        return [self._row_paths(ids, length) for ids in (context.history if rows is None else rows.values())]

    def _learn(self, context: Context) -> None:
        learned = context.memory.get("learned")
        if learned is None:
            if self.reset_between:
                self.reset()
            learned = context.memory["learned"] = [0] * len(context.history)
            for source in copyable_sources(context):
                self.storage.initialize(source)
        if learned == [len(ids) for ids in context.history]:  # called again in the same step
            return
        if context.top is not None:
            tops, counts = context.top.tolist(), context.new.tolist()
            for ids, top, count in zip(context.history, tops, counts, strict=True):
                end = len(ids) - min(count, len(top))
                for index, likeliest in enumerate(top[: len(ids) - end], start=end):
                    # The likeliest last, so that it wins ties.
                    self.storage.update(ids[max(0, index - self.storage.n + 1) : index], likeliest[::-1])
        for row, ids in enumerate(context.history):
            self.storage.initialize(ids, learned[row])
            learned[row] = len(ids)

    def _row_paths(self, ids: list[int], length: int) -> Paths:
        size = self.storage.n - 1
        if self.width == 1:
            return [self._extend(ids[-size:], [], length)]
        first = self.storage.followers(ids[-size:], self.width)
        return [self._extend(ids[-size:], [token], length) for token in first]

    def _extend(self, context: list[int], path: list[int], length: int) -> list[int]:
        context = context + path
        while len(path) < length:
            token, known = self.storage.next_token(context[-self.storage.n + 1 :])
            if not known and self.stop_if_unknown:
                break
            path.append(token)
            context.append(token)
        return path
