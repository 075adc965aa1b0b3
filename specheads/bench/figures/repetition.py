"""Which tokens of a generated text repeat earlier parts of it, and the figures of steps on new and on repeated text."""

from __future__ import annotations

from collections.abc import Sequence

from specheads.bench.runner import TimedRun

GRAM = 8  # a token counts as repeated if the n-gram of this length that it completes has occurred before


def split_by_text(run: TimedRun) -> dict[str, list[float]]:
    """Four figures each for steps whose first token continues new text (`unrepeated`) or repeated text (`repeated`):
    tokens, seconds, tokens after the prefill, steps after it. For a batch of one row; zeros if steps are unknown."""
    sums: dict[str, list[float]] = {"unrepeated": [0, 0.0, 0, 0], "repeated": [0, 0.0, 0, 0]}
    again, position = repeated(run.output.tokens[0]), 0
    for number, (gained, seconds) in enumerate(run.steps):
        kind = "repeated" if position < len(again) and again[position] else "unrepeated"
        for i, figure in enumerate((gained, seconds, gained if number else 0, 1 if number else 0)):
            sums[kind][i] += figure
        position += gained
    return sums


def repeated(tokens: Sequence[int], gram: int = GRAM) -> list[bool]:
    """For each token: do the `gram` tokens that end with it occur earlier in the same generated text?"""
    seen: set[tuple[int, ...]] = set()
    marks = []
    for end in range(1, len(tokens) + 1):
        window = tuple(tokens[max(0, end - gram) : end])
        marks.append(window in seen)
        if len(window) == gram:
            seen.add(window)
    return marks
