"""Conversion of ids between the vocabularies of target and draft model, through text.

After universal assisted generation in transformers. A draft is only a guess, so text that the second tokenizer splits
differently costs accepted tokens, never correctness.
"""

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


SETTLED = 1024  # characters: the most text that is encoded again at every step
LEAD = 64  # characters of earlier text to encode with the new ones, so that these are split as inside a text


class RetokenizedText:
    """One row's text with its ids in both vocabularies. Special tokens are not part of it.

    ids: the text so far in the draft model's vocabulary, never empty.
    """

    def __init__(self, tokenizer: Any, target_tokenizer: Any) -> None:
        self.tokenizer, self.target_tokenizer = tokenizer, target_tokenizer
        self.pieces = TextPieces(target_tokenizer)
        self.bos = [tokenizer.bos_token_id] if tokenizer.bos_token_id in tokenizer("")["input_ids"] else []
        self.settled: list[int] = []  # ids that further text will not change
        self.lead, self.tail = "", ""  # the end of the settled text, and the text since
        self.ids: list[int] = []

    @property
    def num_read(self) -> int:
        """How many of the target's ids have been added to the text."""
        return len(self.pieces.ids)

    def extend(self, target_ids: list[int]) -> int:
        """Append ids of the target → how many leading `ids` did not change. The last few may, where tokens merge."""
        # The last four one by one: if the text ends inside a character, everything before that character is decoded.
        self.tail += self.pieces.add(*target_ids[:-4]) + "".join(map(self.pieces.add, target_ids[-4:]))
        ids, before = encode_after(self.tokenizer, self.lead, self.tail), self.ids
        # The draft model needs a token to read even if the text is empty.
        self.ids = [*self.bos, *self.settled, *ids] or [self.tokenizer.eos_token_id or 0]
        cut = self.tail.rfind(" ", 0, len(self.tail) - SETTLED // 2) if len(self.tail) > SETTLED else -1
        if cut > 0:
            head = encode_after(self.tokenizer, self.lead, self.tail[:cut])
            if ids[: len(head)] == head:
                self.settled += head
                self.lead, self.tail = (self.lead + self.tail[:cut])[-LEAD:], self.tail[cut:]
        pairs = enumerate(zip(before, self.ids, strict=False))
        return next((i for i, (old, new) in pairs if old != new), min(len(before), len(self.ids)))

    def to_target_ids(self, drafted: list[int]) -> list[int]:
        """The target's ids for what was drafted after the text; none if they cannot be determined."""
        eos = self.tokenizer.eos_token_id
        ended = eos in drafted
        if ended:
            drafted = drafted[: drafted.index(eos)]
        pieces = TextPieces(self.tokenizer)
        pieces.add(*self.ids[-LEAD:], last=True)
        added = pieces.add(*drafted, last=True).rstrip("\ufffd")
        target_ids = encode_after(self.target_tokenizer, (self.lead + self.tail)[-LEAD:], added)
        pending = self.pieces.pending  # the first tokens of a character whose other tokens are to be drafted
        if target_ids[: len(pending)] != pending:
            return []
        target_ids = target_ids[len(pending) :]
        if ended and self.target_tokenizer.eos_token_id is not None:
            target_ids.append(self.target_tokenizer.eos_token_id)
        return target_ids


def encode_after(tokenizer: Any, before: str, text: str) -> list[int]:
    """The ids of `text` after `before`; of the text alone if a token would span both."""

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    # Encoded together, since some tokenizers prepend a space to a text.
    head, whole = encode(before), encode(before + text)
    return whole[len(head) :] if whole[: len(head)] == head else encode(text)
