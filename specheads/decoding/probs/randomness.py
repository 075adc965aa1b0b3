"""Random numbers as functions of a row's seed, its output position and their use; no generator keeps a state.

So a row draws the same numbers whatever tree is drafted, whatever else is in its batch, and on every device. The
numbers are hashes of counters, by the finalizer of SplitMix64 (Steele, Lea and Flood, 2014): the same on every device,
whereas a torch.Generator differs between CPU and GPU and has to be advanced row by row.
Shapes: B batch rows, R draws, T output positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

# 64 bits each, written as the signed integers that torch has.
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
# What a number is for; each use has numbers of its own.
TOKEN, DRAFT, ACCEPT = 1, 2, 3


def scramble(x: Tensor) -> Tensor:
    """int64 → int64, a bijection: each bit of the result depends on every bit of x."""
    for bits, factor in ROUNDS:
        x = (x ^ shift_right(x, bits)) * factor
    return x ^ shift_right(x, 31)


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: zeros enter from the left."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def child_keys(keys: Tensor, counter: Tensor | int) -> Tensor:
    """int64 keys and counters ≥ 0, broadcast → int64 keys, distinct for the counters of one key."""
    step = signed((counter + 1) * GOLDEN) if isinstance(counter, int) else (counter + 1) * GOLDEN
    return scramble(keys + step)


def to_unit(keys: Tensor) -> Tensor:
    """int64 → numbers in [0, 1) from the highest bits: 53 in float64; on MPS, without float64, 24 in float32."""
    if keys.device.type == "mps":
        return shift_right(keys, 40).float() * 2**-24
    return shift_right(keys, 11).double() * 2**-53


def signed(seed: int) -> int:
    """Any integer as int64, modulo 2**64."""
    return (seed + 2**63) % 2**64 - 2**63


def row_seed(seed: int, row: int) -> int:
    """The seed of one row of a batch with one seed: that seed for row 0, one derived from it for others."""
    if row == 0:
        return seed
    return int(shift_right(child_keys(scramble(torch.tensor([signed(seed)])), row), 1))


def row_seeds(seed: int, count: int) -> list[int]:
    """`row_seed` of the first `count` rows."""
    return [row_seed(seed, row) for row in range(count)]


def seeds_for(seed: Any, count: int) -> list[int]:
    """The seeds of `count` rows from generate()'s `seed`: an int, a list of one for each row, or None, for which one is
    drawn from torch's global generator. TypeError for anything else, ValueError for a wrong number of seeds.
    """
    if seed is None:
        seed = int(torch.randint(2**62, ()))
    if isinstance(seed, Integral):
        return row_seeds(int(seed), count)
    if not isinstance(seed, list | tuple) or not all(isinstance(one, Integral) for one in seed):
        raise TypeError(f"seed={seed!r} must be a whole number, or a list of one for each row")
    if len(seed) != count:
        raise ValueError(f"seed= has {len(seed)} numbers for {count} rows; give one for each row, or a single one")
    return [int(one) for one in seed]


@dataclass
class RowNumbers:
    """The random numbers of the rows of a batch, from their seeds.

    keys (B,): one a row. After `begin`, `next` gives the numbers of one use at each row's output position.
    """

    keys: Tensor
    step_keys: Tensor = field(init=False)
    calls: int = field(init=False)

    @classmethod
    def from_seeds(cls, seeds: Sequence[int], device: torch.device) -> RowNumbers:
        return cls(scramble(torch.tensor([signed(seed) for seed in seeds], device=device)))

    def tokens(self, length: int) -> Tensor:
        """(B, length) the number that draws each row's token at positions 0 … length − 1."""
        position = torch.arange(length, device=self.keys.device)
        return to_unit(child_keys(child_keys(self.keys, TOKEN).unsqueeze(1), position))

    def replace_rows(self, rows: Tensor, other: RowNumbers) -> None:
        """Take the keys of `other` for these rows."""
        self.keys = self.keys.index_copy(0, rows, other.keys)

    def begin(self, use: int, position: Tensor) -> None:
        """Start the numbers of a use, DRAFT or ACCEPT, for rows with `position` (B,) output tokens so far."""
        self.step_keys, self.calls = child_keys(child_keys(self.keys, use), position), 0

    def next(self, shape: Sequence[int]) -> Tensor:
        """Numbers (R, …) that differ from call to call; rows have R / B each, in order.

        A row's numbers depend only on their index within the row, so asking for more does not change the earlier ones.
        """
        count, batch = math.prod(shape), len(self.step_keys)
        keys = child_keys(self.step_keys, self.calls).unsqueeze(1)
        self.calls += 1
        index = torch.arange(-(-count // batch), device=keys.device)
        return to_unit(child_keys(keys, index)).flatten()[:count].view(tuple(shape))
