"""What debug=True prints: each step's accepted and rejected drafts and the target's own token; for beam search, its
candidates."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation.streamers import BaseStreamer

from specheads.compat.witness import Witness
from specheads.terminal import ACCEPTED, MARKS, OWN, REJECTED, has_colors, make_console, printable, write


class Printer:
    """Prints lines of tokens on stdout: as text, or as ids without a tokenizer."""

    def __init__(self, tokenizer: Any, ends: Collection[int]) -> None:
        self.tokenizer, self.ends, self.console = tokenizer, set(ends), make_console()

    def line(self, head: str, *parts: tuple[list[int], str]) -> None:
        """Print head, then the parts: runs of tokens, each with a style, or marked if there are no colours."""
        write(self.console, head)
        for tokens, style in parts:
            if tokens:
                begin, end = ("", "") if has_colors(self.console) or not style else MARKS[style]
                text = " ".join(map(self._spelled, tokens))
                write(self.console, " ")
                write(self.console, f"{begin}{text}{end}", style)
        write(self.console, "\n")

    def _spelled(self, token: int) -> str:
        return printable(str(token) if self.tokenizer is None else repr(self.tokenizer.decode([token])))

    def close(self, text: list[int]) -> None:
        """Print the position of the end token, if `text` (the new ids) ends with one."""
        if text and text[-1] in self.ends:
            self.line(f"end token {text[-1]} found at position {len(text) - 1}")


class StepPrinter(BaseStreamer):
    """A streamer for generate(). witness: where the drafts are read; None if nothing drafts."""

    def __init__(self, printer: Printer, witness: Witness | None) -> None:
        self.printer, self.witness = printer, witness
        self.text: list[int] = []
        self.prompt_seen = False

    def put(self, value: Tensor) -> None:
        if not self.prompt_seen:  # Hugging Face puts the prompt first
            self.prompt_seen = True
            return
        tokens, number = value.flatten().tolist(), len(self.text)
        draft, accepted = self.witness.take() if self.witness else ([], 0)
        self.text += tokens
        if self.witness is None or not number:
            self.printer.line(f"token {number}:", (tokens, OWN))
            return
        own = tokens[accepted:]
        # If the text ends at a draft, later drafts were not judged.
        rejected = draft[accepted:] if own else []
        head = f"{min(accepted, len(tokens))} of {len(draft)} drafts accepted, from token {number}:"
        self.printer.line(head, (tokens[:accepted], ACCEPTED), (rejected, REJECTED), (own, OWN))

    def end(self) -> None:
        self.printer.close(self.text)


class BeamPrinter(LogitsProcessor):
    """Prints the candidates of each step of a beam search, best first: their score, and their text with the new token
    set apart. Leaves the scores unchanged.

    start: number of ids before the first new token. penalty(l): the divisor of Σ log p for a text of l new tokens.
    """

    def __init__(self, printer: Printer, start: int, penalty: Any) -> None:
        self.printer, self.penalty, self.start = printer, penalty, start
        self.sums: dict[tuple[int, ...], float] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] == self.start:
            self.sums = {tuple(input_ids[0].tolist()): 0.0}
        found: dict[tuple[int, ...], float] = {}
        for row, own in zip(map(tuple, input_ids.tolist()), scores, strict=True):
            if row in self.sums and (len(row) == self.start or row[-1] not in self.printer.ends):
                for token in torch.isfinite(own).nonzero().flatten().tolist():
                    found[*row, token] = self.sums[row] + float(own[token])
        self.sums, length = found, input_ids.shape[1] - self.start + 1
        self.printer.line(f"candidates for token {length - 1}:")
        for number, (row, total) in enumerate(sorted(found.items(), key=lambda one: -one[1]), 1):
            *before, last = row[self.start :]
            self.printer.line(f"{number:3}. {total / self.penalty(length):.3f}", (before, ""), ([last], OWN))
        return scores
