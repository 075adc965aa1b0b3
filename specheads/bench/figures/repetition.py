"""Which tokens of a generated text repeat it, and what its steps gave on new and on repeated text."""

from __future__ import annotations

from collections.abc import Sequence

from specheads.bench.runner import TimedRun

GRAM = 8  # a token that completes this many tokens seen together before counts as repeated text


def split_by_text(run: TimedRun) -> dict[str, list[float]]:
    """Tokens, seconds, and tokens and steps after the prefill, of steps whose first token continues new text
    (`unrepeated`) or text seen before (`repeated`). Of a batch of one row; zeros where the steps are unknown."""
    sums: dict[str, list[float]] = {"unrepeated": [0, 0.0, 0, 0], "repeated": [0, 0.0, 0, 0]}
    again, position = repeated(run.output.tokens[0]), 0
    for number, (gained, seconds) in enumerate(run.steps):
        kind = "repeated" if position < len(again) and again[position] else "unrepeated"
        for i, figure in enumerate((gained, seconds, gained if number else 0, 1 if number else 0)):
            sums[kind][i] += figure
        position += gained
    return sums


def repeated(tokens: Sequence[int], gram: int = GRAM) -> list[bool]:
    """Per token: do the `gram` tokens that end with it occur earlier in the same generated text?"""
    seen: set[tuple[int, ...]] = set()
    marks = []
    for end in range(1, len(tokens) + 1):
        window = tuple(tokens[max(0, end - gram) : end])
        marks.append(window in seen)
        if len(window) == gram:
            seen.add(window)
    return marks
