"""PromptLookup: copies what followed an earlier occurrence of the row's last few ids; and the search that copies need.

Rows are searched as str, one character per id, since str.find runs in C. Ids are below 1,114,112, the number of
characters; no vocabulary is that large.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from specheads.decoding.drafters.base import Context
from specheads.decoding.drafters.path_drafter import PathDrafter, Paths


def to_text(ids: Iterable[int]) -> str:
    return "".join(map(chr, ids))


def copyable_sources(context: Context) -> list[list[int]]:
    """Each row's source; empty without an encoder, and for a source with ids that the decoder lacks, which shows that
    the encoder has a different vocabulary."""
    if context.source is None:
        return [[] for _ in context.history]
    size = context.target.vocab_size
    return [ids if max(ids, default=0) < size else [] for ids in context.source]


def row_texts(context: Context, rows: Mapping[int, list[int]] | None = None) -> list[str]:
    """Each row as text: an encoder's source, if any, and then the history.

    rows: only these batch rows, each with its history and the ids drafted after it. The histories are kept in
    context.memory, so a step converts new ids only.
    """
    sources = context.memoize("sources", lambda: copyable_sources(context))
    texts = context.memoize("texts", lambda: [to_text(source) for source in sources])
    for b, history in enumerate(context.history):
        texts[b] += to_text(history[len(texts[b]) - len(sources[b]) :])
    if rows is None:
        return texts
    return [texts[b] + to_text(ids[len(context.history[b]) :]) for b, ids in rows.items()]


def longest_match(text: str, longest: int) -> int:
    """The length of the longest suffix of at most `longest` ids that occurs earlier in the text; 0 if none does."""
    # If a suffix occurs earlier, so do all shorter ones.
    return bisect_left(range(1, longest + 1), True, key=lambda length: text.find(text[-length:], 0, -1) < 0)


def copy_ids(text: str, start: int, count: int) -> list[int]:
    """`count` ids from `start` on. A copy that reaches the end of the text continues with what it has copied."""
    run = text[start : start + count]
    return [*map(ord, (run * (count // len(run) + 1))[:count])] if run else []


@dataclass(frozen=True)
class PromptLookup(PathDrafter):
    """Copies what followed the longest suffix of min_ngram to max_ngram ids that occurred earlier in the row.

    The latest of several occurrences counts. A copy that reaches the end of the row continues with itself. On a
    small model's greedy text this takes 6 % fewer steps than the first occurrence, and 32 % fewer than a copy that
    stops at the end.
    width > 1: a tree of distinct followers, longest suffix first, then latest first.
    With an encoder the source counts as earlier text, which helps summaries and corrections; transformers' prompt
    lookup searches the decoder's text alone.
    https://github.com/apoorvumang/prompt-lookup-decoding.
    """

    max_ngram: int = 10
    min_ngram: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_least("min_ngram", 1)
        self._at_least("max_ngram", self.min_ngram)

    def paths(self, context: Context, length: int, rows: Mapping[int, list[int]] | None = None) -> list[Paths]:
        return [
            [copy_ids(text, start, length) for start in self._follower_indices(text)]
            for text in row_texts(context, rows)
        ]

    def _follower_indices(self, text: str) -> list[int]:
        """Indices of up to `width` distinct followers of the text's suffixes, best first."""
        found: dict[str, int] = {}
        for length in range(longest_match(text, self.max_ngram), self.min_ngram - 1, -1):
            suffix = text[-length:]
            start = text.rfind(suffix, 0, -1)
            while start >= 0:
                found.setdefault(text[start + length], start + length)
                if len(found) == self.width:
                    return list(found.values())
                start = text.rfind(suffix, 0, start + length - 1)
        return list(found.values())
