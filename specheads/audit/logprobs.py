"""Log-probabilities that a server reports of its tokens, against the base's.

Servers report them of the raw logits (vLLM, llama.cpp) or of the distribution after the samplers (SGLang): whichever
fits better is taken as the server's definition, and every token must fit it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specheads.audit.evidence import smallest_rate, tokens_to_miss
from specheads.audit.scoring import ScoredText
from specheads.audit.settings import Settings
from specheads.audit.verdict import Result, Verdict

PRINTED = 1e-3  # a server may print three digits
DEFINITIONS = ("of the raw logits", "after the samplers")


class LogprobWatch:
    """Of one way to ask. miss_rate: the share of wrong values that "lossless" rules out."""

    def __init__(self, settings: Settings, miss_rate: float, max_lines: int) -> None:
        self.settings, self.miss_rate, self.max_lines = settings, miss_rate, max_lines
        self.texts = self.tokens = 0
        self.missing = 0  # texts without any
        self.faults: tuple[list[str], list[str]] = ([], [])  # by definition
        self.largest = [0.0, 0.0]

    def add(self, text: ScoredText, reported: Sequence[float] | None) -> None:
        """reported: of the text's first tokens; a server may leave out that of its end token."""
        self.texts += 1
        if not reported:
            self.missing += 1
            return
        values = torch.tensor(reported[: len(text.tokens)], dtype=torch.float64)
        rows = torch.arange(len(values))
        self.tokens += len(values)
        # A log-probability moves by at most two logits' errors together; the margin is of scores after the temperature.
        raw_margin = text.margin * max(1.0, self.settings.temperature)
        for kind, (scores, margin) in enumerate(((text.raw, raw_margin), (text.scores, text.margin))):
            right = scores.double().log_softmax(-1).cpu()[rows, text.tokens.cpu()[: len(values)]]
            apart = (values - right).abs().nan_to_num(torch.inf)
            self.largest[kind] = max(self.largest[kind], float(apart.max()))
            for i in (apart > margin + PRINTED).nonzero().flatten().tolist():
                words = f"{values[i]:.4g}, where the base has {right[i]:.4g}"
                self.faults[kind].append(f"text {self.texts}, token {i + 1}: {words}")

    def result(self) -> Result:
        kind = min((0, 1), key=lambda one: len(self.faults[one]))
        faults, more = self.faults[kind], max(0, tokens_to_miss(self.miss_rate) - self.tokens)
        verdict = Verdict.NOT_LOSSLESS if faults else Verdict.UNDECIDED if more else Verdict.LOSSLESS
        lines = [f"read as {DEFINITIONS[kind]}", *faults[: self.max_lines]]
        if self.missing:
            lines.append(f"{self.missing:,} of {self.texts:,} texts came without any")
        figures = {"wrong": len(faults), "largest_difference": min(self.largest[kind], 1e9)}
        return Result(
            f"log-probabilities at {self.settings}", verdict, self.texts, self.tokens, 0.0 if faults else 1.0,
            smallest_rate(self.tokens), 0 if faults else more, tuple(lines), figures,
        )  # fmt: skip
