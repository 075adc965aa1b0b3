"""Find where the last ids of a row occurred before. Rows are searched as str, one character per id: str.find runs in C.

Ids are below 1,114,112, the number of characters. No vocabulary is that large.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping

from specheads.decoding.drafters.base import Context


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
    sources = context.once("sources", lambda: copyable_sources(context))
    texts = context.once("texts", lambda: [to_text(source) for source in sources])
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
