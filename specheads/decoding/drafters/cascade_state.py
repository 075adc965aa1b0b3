"""CascadeState: each row's text and the tokens that a cascade has drafted after it so far, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile


@dataclass
class CascadeState:
    """All by batch row.

    ids: the text and the tokens drafted after it; text: how many ids are text; q: the probability of each drafted token
    under the draft that wrote it or was the last to accept it; read[d]: how many leading ids draft d has in its cache.
    """

    ids: list[list[int]]
    text: list[int]
    q: list[list[float]]
    read: list[list[int]]

    @classmethod
    def of(cls, history: Sequence[Sequence[int]], num_drafts: int) -> CascadeState:
        """Nothing drafted. Each draft has read the text up to its last id: a review needs the logits after that one."""
        lengths = [len(row) for row in history]
        return cls(
            [list(row) for row in history], lengths, [[] for _ in history],
            [[length - 1 for length in lengths] for _ in range(num_drafts)],
        )  # fmt: skip

    def follow(self, history: Sequence[Sequence[int]]) -> None:
        """Replace the text by `history`. Caches keep the ids before the first that differs."""
        for b, text in enumerate(history):
            start = self.text[b]
            pairs = zip(self.ids[b][start:], text[start:], strict=False)
            self.cut(b, start + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
            self.ids[b] += text[len(self.ids[b]) :]
            self.text[b], self.q[b] = len(text), []

    def replace_rows(self, rows: Sequence[int], history: Sequence[Sequence[int]]) -> None:
        """Restart these rows, each with its text in `history`."""
        new = CascadeState.of(history, len(self.read))
        for i, b in enumerate(rows):
            self.ids[b], self.text[b], self.q[b] = new.ids[i], new.text[i], new.q[i]
            for lengths, new_lengths in zip(self.read, new.read, strict=True):
                lengths[b] = new_lengths[i]

    def drafted(self, b: int) -> list[int]:
        return self.ids[b][self.text[b] :]

    def add(self, b: int, tokens: Sequence[int], q: Sequence[float]) -> None:
        self.ids[b] += tokens
        self.q[b] += q

    def cut(self, b: int, length: int) -> None:
        """Drop the row's ids from index `length` on."""
        del self.ids[b][length:], self.q[b][max(0, length - self.text[b]) :]
        for lengths in self.read:
            lengths[b] = min(lengths[b], length)
