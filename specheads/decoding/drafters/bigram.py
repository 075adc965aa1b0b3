"""The bigram table of MaxGram: for each id of the vocabulary, the id that most often follows it in a corpus.

The file format is that of CS Drafting (arXiv:2312.11462): a JSON list, index = token id, value = next id, 0 = unknown.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any


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
