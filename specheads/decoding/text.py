"""Token ids as text, a few at a time."""

from __future__ import annotations

from typing import Any


class TextPieces:
    """Token ids → the text each adds; ids that end inside a character add nothing until it is whole."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.ids = tokenizer, list[int]()
        # The text of ids[:done] has been returned. Decoding starts a piece earlier, at `start`, to get spaces right.
        self.start, self.done = 0, 0

    @property
    def pending(self) -> list[int]:
        """The ids whose text has not been returned yet, because they end inside a character."""
        return self.ids[self.done :]

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def add(self, *tokens: int, last: bool = False) -> str:
        """The text that tokens add. last: no more will follow, so an unfinished character is returned as it is."""
        self.ids += tokens
        before, now = self._decode(self.ids[self.start : self.done]), self._decode(self.ids[self.start :])
        if now.endswith("\ufffd") and not last:
            return ""
        self.start, self.done = self.done, len(self.ids)
        return now[len(before) :]

    def peek(self, *tokens: int) -> str:
        """The text that further tokens would add, without adding them."""
        before = self._decode(self.ids[self.start : self.done])
        return self._decode([*self.ids[self.start :], *tokens])[len(before) :]
