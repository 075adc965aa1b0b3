"""romsto's n-gram storages: ours, with methods that also take tensors of rows, and then return tensors.

Shapes: B rows, T ids in a row, K tokens after it, n ids in an n-gram.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specheads.decoding.drafters import ngram

Ids = Sequence[int] | Tensor


class NGramStorage(ngram.NGramStorage):
    """Counts which ids follow contexts of n − 1, n − 2, …, 1 ids."""

    def initialize(self, ids: Ids, start: int = 1) -> None:
        """Count the ids of rows (B, T) or of a list."""
        for row in rows_of(ids):
            super().initialize(row, start)

    def update(self, context: Ids, tokens: Ids) -> None:
        """Count tokens (B, K) as following the rows (B, T); or both as lists."""
        for row, own in zip(rows_of(context), rows_of(tokens), strict=True):
            super().update(row, own)

    def next_token(self, context: Ids, level: int | None = None) -> Any:
        """Rows (B, T) → next tokens (B,) and whether each is known (B,); for a list, a token and a bool."""
        answers = [super(NGramStorage, self).next_token(row, level) for row in rows_of(context)]
        if not isinstance(context, Tensor):
            return answers[0]
        tokens, known = zip(*answers, strict=True)
        return torch.tensor(tokens), torch.tensor(known, device=context.device)

    def has_gram(self, gram: Ids) -> bool:
        """Has the last id of `gram` been counted after the ids before it, or after the last few of them?"""
        (row,) = rows_of(gram)
        return len(row) >= min(self.levels) + 1 and any(
            row[-1] in found.counts
            for level in self.levels
            if (found := self._known[level].get(tuple(row[:-1][-level:]))) is not None
        )


class OneLevelNGramStorage(NGramStorage, ngram.OneLevelNGramStorage):
    """Counts which ids follow contexts of n − 1 ids, and of no other length."""


def rows_of(ids: Ids) -> list[list[int]]:
    """Rows (B, T), or one row (T,) as a tensor or list → a list of rows."""
    if not isinstance(ids, Tensor):
        return [list(ids)]
    rows: list[list[int]] = ids.reshape(-1, ids.shape[-1]).tolist()
    return rows
