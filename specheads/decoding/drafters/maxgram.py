"""MaxGram (MaG): copies what followed the row's longest suffix where it occurred before; else uses a bigram table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specheads.decoding.drafters.base import Context
from specheads.decoding.drafters.bigram import check_bigrams, load_bigrams
from specheads.decoding.drafters.path_drafter import PathDrafter, Paths
from specheads.decoding.drafters.suffix_search import copy_ids, longest_match, row_texts


@dataclass(frozen=True)
class MaxGram(PathDrafter):
    """The last drafter of a cascade: it costs no more than a copy. CS Drafting, arXiv:2312.11462.

    It copies the ids after the first occurrence of the longest suffix that occurs earlier in the row. A copy that
    reaches the end of the row continues with itself, as matching the extended row again would. Where nothing matches
    (an id never seen before) it follows the bigram table, up to an id the table does not know. With an encoder the
    source is searched too, as if it preceded the row.
    bigrams: the table, one entry per id of the vocabulary (`bigram.load_bigrams`); None to draft nothing there.
    """

    positional = ("bigrams",)

    bigrams: Sequence[int] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width > 1:
            raise ValueError(f"MaxGram: width={self.width}, but it knows one follower only; PromptLookup knows several")

    @classmethod
    def from_text(cls, bigrams: Path | None = None, *, vocab_size: int | None = None) -> MaxGram:
        """`maxgram[:FILE]`: FILE holds the table."""
        return cls(bigrams=None if bigrams is None else load_bigrams(bigrams, vocab_size))

    def paths(self, context: Context, length: int, rows: Mapping[int, list[int]] | None = None) -> list[Paths]:
        if self.bigrams is not None:
            context.once("bigrams_checked", lambda: check_bigrams(self.bigrams, context.target.vocab_size))
        return [[self._path(text, length)] for text in row_texts(context, rows)]

    def _path(self, text: str, length: int) -> list[int]:
        if matched := longest_match(text, len(text)):
            return copy_ids(text, text.find(text[-matched:]) + matched, length)
        path: list[int] = []
        table, token = self.bigrams or (), ord(text[-1])
        while token < len(table) and len(path) < length and (token := table[token]):
            path.append(token)
        return path
