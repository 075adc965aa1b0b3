"""Random numbers that belong to a row of tokens: the same in whichever batch, process or device the row lies, so that a
run that goes on with other processes draws what it would have drawn.

Counter-based, with the finalizer of SplitMix64 (Steele, Lea and Flood, 2014). Shapes: B batch rows, T positions, N
numbers of a position.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# 64 bits each, written with their sign, as torch's integers have one.
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


def scrambled(x: Tensor) -> Tensor:
    """int64 → int64, one to one: each bit of the result hangs on every bit of x."""
    for bits, factor in ROUNDS:
        x = (x ^ shifted(x, bits)) * factor
    return x ^ shifted(x, 31)


def shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, zeros moving in."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def keys(tokens: Tensor, documents: Tensor, seed: int) -> Tensor:
    """(B, T) int64 a key of each position, of the row's tokens, the position among them and the seed; document 0 is
    padding, which changes nothing."""
    real = documents > 0
    place = real.cumsum(1)
    start = scrambled(torch.tensor(seed)).to(tokens.device)
    row = (scrambled(tokens + place * GOLDEN) * real).sum(1, keepdim=True)
    return scrambled(scrambled(row ^ start) + place * GOLDEN)


def uniform(key: Tensor) -> Tensor:
    """(…) int64 → (…) float32, uniform over [0, 1) in steps of 2⁻²⁴."""
    return shifted(key, 40).float() * 2**-24


def of_positions(key: Tensor, count: int) -> Iterator[Tensor]:
    """(B, T) keys → of each row (T, count) keys, none of them the position's own: row by row, because eight bytes a
    number are more than what the numbers are for takes."""
    steps = torch.arange(1, count + 1, device=key.device) * GOLDEN
    for row in key:
        yield scrambled(row.unsqueeze(1) + steps)
