"""MaxGram (MaG): copies what followed the row's longest suffix where it occurred before; else uses a bigram table:
for each id of the vocabulary, the id that most often follows it in a corpus.

The file format of the table is that of CS Drafting (arXiv:2312.11462): a JSON list, index = token id, value = next id,
0 = unknown.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from specheads.decoding.drafters.base import Context
from specheads.decoding.drafters.lookup import copy_ids, longest_match, row_texts
from specheads.decoding.drafters.path_drafter import PathDrafter, Paths


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
            context.memoize("bigrams_checked", lambda: check_bigrams(self.bigrams, context.target.vocab_size))
        return [[self._path(text, length)] for text in row_texts(context, rows)]

    def _path(self, text: str, length: int) -> list[int]:
        if matched := longest_match(text, len(text)):
            return copy_ids(text, text.find(text[-matched:]) + matched, length)
        path: list[int] = []
        table, token = self.bigrams or (), ord(text[-1])
        while token < len(table) and len(path) < length and (token := table[token]):
            path.append(token)
        return path


def count_bigrams(rows: Iterable[Sequence[int]], vocab_size: int) -> list[int]:
    """Rows of ids → the most frequent follower of each id, the lowest on ties; 0 where none was seen.

    ValueError for an id outside the vocabulary.
    """
    counts: Counter[tuple[int, int]] = Counter()
    for row in rows:
        if row and not 0 <= min(row) <= max(row) < vocab_size:
            worst = max(row) if min(row) >= 0 else min(row)
            raise ValueError(f"id {worst} is outside vocab_size={vocab_size}: give the vocabulary of these rows")
        counts.update(pairwise(row))
    table, most = [0] * vocab_size, [0] * vocab_size
    for (token, follower), count in sorted(counts.items()):
        if count > most[token]:
            table[token], most[token] = follower, count
    return table


# The share of a model's ids that its tokenizer may lack: padding of the vocabulary (T5: 32,100 to 32,128), which occurs
# in no text, so a table made with the tokenizer alone has no entries for it.
PADDING = 0.01


def check_bigrams(table: Any, vocab_size: int, name: str = "the bigram table") -> None:
    """ValueError unless the table has one id of the vocabulary for each id of the vocabulary, padding aside."""
    if not isinstance(table, (list, tuple)):
        raise ValueError(f"{name} is a {type(table).__name__}: expected a list, one id for each id of the vocabulary")
    if not (1 - PADDING) * vocab_size <= len(table) <= vocab_size:
        raise ValueError(
            f"{name} has {len(table)} entries, but the vocabulary {vocab_size} ids: make one for this model with "
            "train/bigram.py"
        )
    for token, follower in enumerate(table):
        if type(follower) is not int or not 0 <= follower < vocab_size:
            raise ValueError(f"{name} has {follower!r} at index {token}: expected an id from 0 to {vocab_size - 1}")


def load_bigrams(path: str | Path, vocab_size: int | None) -> tuple[int, ...]:
    """Read a table. OSError if there is no file, ValueError if it does not fit the vocabulary (None: any)."""
    try:
        table = json.loads(Path(path).read_text("utf8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if vocab_size is None:
        vocab_size = len(table) if isinstance(table, list) else 0
    check_bigrams(table, vocab_size, str(path))
    return tuple(table)


def save_bigrams(table: Sequence[int], path: str | Path) -> None:
    """Write a table, creating its parent folders."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(list(table)) + "\n", "utf8")
