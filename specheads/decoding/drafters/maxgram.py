"""MaG (max-gram): copy what followed the longest suffix of the row that stood there before; else a bigram table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specheads.decoding.drafters.base import Context
from specheads.decoding.drafters.bigram import check_bigrams, load_bigrams
from specheads.decoding.drafters.paths import PathDrafter
from specheads.decoding.drafters.suffix import SuffixAutomaton, copied


@dataclass(frozen=True)
class MaxGram(PathDrafter):
    """The drafter at the bottom of a cascade, as fast as a copy. CS Drafting, arXiv:2312.11462.

    The longest suffix of the row that occurs earlier, its first occurrence, and the ids behind it; where these reach
    the end of the row, matching again on the row so extended finds the copy itself, so the copy goes on. Where
    nothing matches (an id never seen before) the bigram table is followed, up to an id it does not know. Behind an
    encoder the source stands in front of the row.
    bigrams: the table, one entry an id of the vocabulary (`bigram.load_bigrams`); None to draft nothing there.
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

    def runs(self, context: Context, length: int, rows: Mapping[int, list[int]] | None = None) -> list[list[list[int]]]:
        memory = context.memory
        if "suffixes" not in memory:
            if self.bigrams is not None:
                check_bigrams(self.bigrams, context.target.config.vocab_size)
            memory["suffixes"] = [SuffixAutomaton() for _ in context.history]
        suffixes = memory["suffixes"]
        given = enumerate(context.history) if rows is None else rows.items()
        return [[self._run(suffixes[b], context.haystack(b, history), length)] for b, history in given]

    def _run(self, row: SuffixAutomaton, ids: list[int], length: int) -> list[int]:
        row.follow(ids)
        match = row.leftmost()
        if match.length:
            return copied(ids, match.end, length)
        run: list[int] = []
        table, token = self.bigrams or (), ids[-1]
        while token < len(table) and len(run) < length and (token := table[token]):
            run.append(token)
        return run
