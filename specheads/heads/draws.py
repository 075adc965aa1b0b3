"""Random numbers that depend on a row's tokens and a seed, not on its batch, process or device.

So a run that resumes with another number of processes draws the same numbers. Counter-based, with the finalizer of
SplitMix64 (Steele, Lea and Flood, 2014). Shapes: B batch rows, T positions.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# 64 bits each, written as signed integers, which torch's are.
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


def scramble(x: Tensor) -> Tensor:
    """int64 → int64, one to one: each bit of the result depends on every bit of x."""
    for bits, factor in ROUNDS:
        x = (x ^ shift_right(x, bits)) * factor
    return x ^ shift_right(x, 31)


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: zeros enter from the left."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def keys(tokens: Tensor, documents: Tensor, seed: int) -> Tensor:
    """(B, T) int64 a key of each position, from the row's tokens, the position among them and the seed. Padding,
    document 0, does not count."""
    real = documents > 0
    position = real.cumsum(1)
    start = scramble(torch.tensor(seed)).to(tokens.device)
    row = (scramble(tokens + position * GOLDEN) * real).sum(1, keepdim=True)
    return scramble(scramble(row ^ start) + position * GOLDEN)


def uniform(key: Tensor) -> Tensor:
    """(…) int64 → (…) float32, uniform over [0, 1) in steps of 2⁻²⁴."""
    return shift_right(key, 40).float() * 2**-24


def split_keys(key: Tensor, count: int) -> Iterator[Tensor]:
    """(B, T) keys → for each row (T, count) new keys. Row by row, because all keys at once, eight bytes each, take more
    memory than the numbers drawn from them."""
    steps = torch.arange(1, count + 1, device=key.device) * GOLDEN
    for row in key:
        yield scramble(row.unsqueeze(1) + steps)
