"""Options that a batch gives each row besides its ids: `limits`, the most new tokens, if they differ between rows;
`seeds`, for sampling."""

from __future__ import annotations

import random
from typing import Any


def draw_numbers(count: int, low: int, high: int, seed: int, use: str) -> list[int]:
    """`count` random integers from low to high, both included. The same seed and use give the same numbers; different
    uses give independent ones."""
    coin = random.Random(f"{seed} {use}")
    return [coin.randint(low, high) for _ in range(count)]


def take_row_options(batch: dict[str, Any], max_new_tokens: int) -> tuple[dict[str, Any], list[int], list[int] | None]:
    """The batch without its limits and seeds; each row's most new tokens; each row's seed, or None without seeds."""
    inputs = dict(batch)
    seeds = inputs.pop("seeds", None)
    return inputs, inputs.pop("limits", None) or [max_new_tokens] * len(inputs["input_ids"]), seeds


def cut(tokens: list[list[int]], limits: list[int]) -> list[list[int]]:
    """Each row's tokens up to its limit."""
    return [row[:limit] for row, limit in zip(tokens, limits, strict=True)]
