"""What a batch says of each of its rows beside the ids: `limits`, the most new tokens, where they are not one number
for all; `seeds`, of the sampling."""

from __future__ import annotations

import random
from typing import Any


def draw_numbers(count: int, low: int, high: int, seed: int, use: str) -> list[int]:
    """`count` whole numbers from low to high, both included; the same for the same seed and use, those of another use
    independent of them."""
    coin = random.Random(f"{seed} {use}")
    return [coin.randint(low, high) for _ in range(count)]


def take_row_options(batch: dict[str, Any], max_new_tokens: int) -> tuple[dict[str, Any], list[int], list[int] | None]:
    """The batch without its limits and seeds; the most new tokens of each row; the seed of each, None without."""
    inputs = dict(batch)
    seeds = inputs.pop("seeds", None)
    return inputs, inputs.pop("limits", None) or [max_new_tokens] * len(inputs["input_ids"]), seeds


def cut(tokens: list[list[int]], limits: list[int]) -> list[list[int]]:
    """Each row's tokens up to its limit."""
    return [row[:limit] for row, limit in zip(tokens, limits, strict=True)]
