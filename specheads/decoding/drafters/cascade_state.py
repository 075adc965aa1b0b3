"""Working: each row's text and the tokens that a cascade has drafted behind it so far, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile


@dataclass
class CascadeState:
    """ids: the text and the tokens drafted behind it; text: how many of them are text; q: of each drafted token, the
    probability it had in the law of who wrote it or last let it stand; read[d]: how many leading ids draft d holds in
    its cache. All by batch row."""

    ids: list[list[int]]
    text: list[int]
    q: list[list[float]]
    read: list[list[int]]

    @classmethod
    def of(cls, history: Sequence[Sequence[int]], num_drafts: int) -> CascadeState:
        """Nothing drafted. A draft begins with the text but for its last id, of which a review needs the law."""
        lengths = [len(row) for row in history]
        return cls(
            [list(row) for row in history], lengths, [[] for _ in history],
            [[length - 1 for length in lengths] for _ in range(num_drafts)],
        )  # fmt: skip

    def follow(self, history: Sequence[Sequence[int]]) -> None:
        """Take the text as it has become; of what was drafted that remains known which became text."""
        for b, text in enumerate(history):
            start = self.text[b]
            pairs = zip(self.ids[b][start:], text[start:], strict=False)
            self.cut(b, start + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
            self.ids[b] += text[len(self.ids[b]) :]
            self.text[b], self.q[b] = len(text), []

    def drafted(self, b: int) -> list[int]:
        return self.ids[b][self.text[b] :]

    def add(self, b: int, tokens: Sequence[int], q: Sequence[float]) -> None:
        self.ids[b] += tokens
        self.q[b] += q

    def cut(self, b: int, length: int) -> None:
        """Drop the row's ids from `length` on."""
        del self.ids[b][length:], self.q[b][max(0, length - self.text[b]) :]
        for lengths in self.read:
            lengths[b] = min(lengths[b], length)
