"""Between two vocabularies, through text: what the target wrote as the draft model reads it, and its draft back again.

After universal assisted generation in transformers: a draft is only ever a guess, so what a second tokenizer splits
otherwise costs accepted tokens and no exactness.
"""

from __future__ import annotations

from typing import Any

from specheads.decoding.text import TextPieces

SETTLED = 1024  # characters: text longer than this is not encoded anew at every step
LEAD = 64  # characters of known text before those to be encoded, so that they are split as inside a text


class Translation:
    """One row's text, of which both vocabularies have their own ids. Special tokens are not part of it.

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
        """How many of the target's tokens this knows."""
        return len(self.pieces.ids)

    def read(self, target_ids: list[int]) -> int:
        """Take in further tokens of the target's. How many of the ids there were still stand: the last few may not,
        where tokens merge."""
        # The last ones singly: if the text ends inside a character, what stands before it is out all the same.
        self.tail += self.pieces.add(*target_ids[:-4]) + "".join(map(self.pieces.add, target_ids[-4:]))
        ids, before = spelled(self.tokenizer, self.lead, self.tail), self.ids
        # An empty text still needs a token for the draft model to read.
        self.ids = [*self.bos, *self.settled, *ids] or [self.tokenizer.eos_token_id or 0]
        cut = self.tail.rfind(" ", 0, len(self.tail) - SETTLED // 2) if len(self.tail) > SETTLED else -1
        if cut > 0:
            head = spelled(self.tokenizer, self.lead, self.tail[:cut])
            if ids[: len(head)] == head:
                self.settled += head
                self.lead, self.tail = (self.lead + self.tail[:cut])[-LEAD:], self.tail[cut:]
        pairs = enumerate(zip(before, self.ids, strict=False))
        return next((i for i, (old, new) in pairs if old != new), min(len(before), len(self.ids)))

    def write(self, drafted: list[int]) -> list[int]:
        """What the target's vocabulary calls the ids drafted behind the text; nothing where it cannot be told."""
        eos = self.tokenizer.eos_token_id
        ended = eos in drafted
        if ended:
            drafted = drafted[: drafted.index(eos)]
        spelling = TextPieces(self.tokenizer)
        spelling.add(*self.ids[-LEAD:], last=True)
        added = spelling.add(*drafted, last=True).rstrip("\ufffd")
        target_ids = spelled(self.target_tokenizer, (self.lead + self.tail)[-LEAD:], added)
        begun = self.pieces.pending  # the first tokens of a character whose other tokens are to be drafted
        if target_ids[: len(begun)] != begun:
            return []
        target_ids = target_ids[len(begun) :]
        if ended and self.target_tokenizer.eos_token_id is not None:
            target_ids.append(self.target_tokenizer.eos_token_id)
        return target_ids


def spelled(tokenizer: Any, before: str, text: str) -> list[int]:
    """The ids of `text` where it stands behind `before`; of the text alone where a token would span both."""

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    head, whole = encode(before), encode(before + text)
    return whole[len(head) :] if whole[: len(head)] == head else encode(text)
