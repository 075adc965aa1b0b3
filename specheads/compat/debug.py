"""What debug=True prints: each step's drafts, accepted and rejected, and the target's own token; for beam search, its
candidates. A rule counts the drafts, before an end token cuts the text."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor
from transformers.generation.streamers import BaseStreamer

from specheads.decoding.acceptance import Acceptance, Exact, TargetProbs, Verdict
from specheads.decoding.probs.sampler import Sampler
from specheads.terminal import ACCEPTED, MARKS, OWN, REJECTED, has_colors, make_console, printable, write


class CountingRule(Acceptance):
    """Wraps another rule, for chains and one row. drafted, accepted: numbers of tokens so far.

    An end token may be in the middle of a draft. The reference functions count the whole draft, including tokens
    accepted after the end token; `Step` counts only those in the text.
    """

    def __init__(self, rule: Acceptance) -> None:
        self.rule = rule
        self.drafted = self.accepted = 0
        self._last: tuple[list[int], int] = ([], 0)

    @property
    def lossless(self) -> bool:
        return self.rule.lossless

    @property
    def requires_draft_probs(self) -> bool:
        return self.rule.requires_draft_probs

    @property
    def uses_draft_probs(self) -> bool:
        return self.rule.uses_draft_probs

    def is_exact(self, sampler: Sampler) -> bool:
        return False  # otherwise judge() would not be called

    def judge(self, target: TargetProbs) -> Verdict:
        rule = Exact() if self.rule.is_exact(target.sampler) else self.rule
        verdict = rule.judge(target)
        nodes = zip(target.tree.tokens[0].tolist(), target.tree.topology.drafted[0].tolist(), strict=True)
        draft, accepted = [token for token, drafted in nodes if drafted], int(verdict.length[0]) - 1
        self.drafted, self.accepted = self.drafted + len(draft), self.accepted + accepted
        self._last = draft, accepted
        return verdict

    def take(self) -> tuple[list[int], int]:
        """The last step's draft, and the number of its tokens that were accepted; ([], 0) if nothing was drafted."""
        last, self._last = self._last, ([], 0)
        return last

    @property
    def rate(self) -> float:
        """Accepted over drafted tokens; 0 if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0


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
    """A streamer for generate(). counts: where the drafts are read; None if nothing drafts."""

    def __init__(self, printer: Printer, counts: CountingRule | None) -> None:
        self.printer, self.counts = printer, counts
        self.text: list[int] = []
        self.prompt_seen = False

    def put(self, value: Tensor) -> None:
        if not self.prompt_seen:  # Hugging Face puts the prompt first
            self.prompt_seen = True
            return
        tokens, number = value.flatten().tolist(), len(self.text)
        draft, accepted = self.counts.take() if self.counts else ([], 0)
        self.text += tokens
        if self.counts is None or not number:
            self.printer.line(f"token {number}:", (tokens, OWN))
            return
        target_tokens = tokens[accepted:]
        # If the text ends at a draft, later drafts were not judged.
        rejected = draft[accepted:] if target_tokens else []
        head = f"{min(accepted, len(tokens))} of {len(draft)} drafts accepted, from token {number}:"
        self.printer.line(head, (tokens[:accepted], ACCEPTED), (rejected, REJECTED), (target_tokens, OWN))

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
        sums: dict[tuple[int, ...], float] = {}
        for row, row_scores in zip(map(tuple, input_ids.tolist()), scores, strict=True):
            if row in self.sums and (len(row) == self.start or row[-1] not in self.printer.ends):
                for token in torch.isfinite(row_scores).nonzero().flatten().tolist():
                    sums[*row, token] = self.sums[row] + float(row_scores[token])
        self.sums, length = sums, input_ids.shape[1] - self.start + 1
        self.printer.line(f"candidates for token {length - 1}:")
        for number, (row, total) in enumerate(sorted(sums.items(), key=lambda pair: -pair[1]), 1):
            *before, last = row[self.start :]
            self.printer.line(f"{number:3}. {total / self.penalty(length):.3f}", (before, ""), ([last], OWN))
        return scores
