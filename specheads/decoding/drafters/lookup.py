"""Prompt lookup: what followed the row's last few ids when they stood in it before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specheads.decoding.drafters.base import Context
from specheads.decoding.drafters.paths import PathDrafter
from specheads.decoding.drafters.suffix import SuffixAutomaton, copied


@dataclass(frozen=True)
class PromptLookup(PathDrafter):
    """Copies what followed the longest suffix of at most max_ngram ids (min_ngram at least) that stood there before.

    Of several occurrences the latest counts, and a copy that reaches the end of the row goes on with itself: on the
    shipped model's greedy text 6 % fewer steps than with the first occurrence, 32 % fewer than with a copy cut short.
    width > 1: a tree of several followers, those of the longest suffix first, of these the latest first.
    Behind an encoder the source counts as earlier text, as who summarises or corrects expects; transformers' own looks
    in the decoder's text alone.
    https://github.com/apoorvumang/prompt-lookup-decoding.
    """

    max_ngram: int = 10
    min_ngram: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least("min_ngram", 1)
        self._at_least("max_ngram", self.min_ngram)

    def runs(self, context: Context, length: int, rows: Mapping[int, list[int]] | None = None) -> list[list[list[int]]]:
        suffixes = context.memory.setdefault("suffixes", [])
        while len(suffixes) < len(context.history):
            # One more than is matched: a follower is ordered by its occurrence behind the match.
            suffixes.append(SuffixAutomaton(recent=self.max_ngram + (self.width > 1)))
        found = []
        for b, history in enumerate(context.history) if rows is None else rows.items():
            ids = context.haystack(b, history)
            suffixes[b].follow(ids)
            found.append([copied(ids, start, length) for start in self._starts(suffixes[b])])
        return found

    def _starts(self, row: SuffixAutomaton) -> list[int]:
        if self.width > 1:
            return row.continuations(self.width, self.max_ngram, self.min_ngram)
        match = row.latest(self.max_ngram)
        return [match.end] if match.length >= self.min_ngram else []
