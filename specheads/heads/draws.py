"""Random numbers that depend on a row's tokens and a seed, not on its batch, process or device.

So a run that resumes with a different number of processes draws the same numbers. Counter-based, as in
`decoding.probs.randomness`. Shapes: B batch rows, T positions.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from specheads.decoding.probs.randomness import GOLDEN, scramble, shift_right


def keys(tokens: Tensor, documents: Tensor, seed: int) -> Tensor:
    """(B, T) int64 a key for each position, from the row's tokens, the position among them and the seed. Padding
    (document 0) does not count."""
    real = documents > 0
    position = real.cumsum(1)
    start = scramble(torch.tensor(seed)).to(tokens.device)
    row = (scramble(tokens + position * GOLDEN) * real).sum(1, keepdim=True)
    return scramble(scramble(row ^ start) + position * GOLDEN)


def uniform(key: Tensor) -> Tensor:
    """(…) int64 → (…) float32, uniform over [0, 1) in steps of 2⁻²⁴."""
    return shift_right(key, 40).float() * 2**-24


def split_keys(key: Tensor, count: int) -> Iterator[Tensor]:
    """(B, T) keys → for each row (T, count) new keys. Row by row, because all keys at once, of eight bytes each, would
    take more memory than the numbers drawn from them."""
    steps = torch.arange(1, count + 1, device=key.device) * GOLDEN
    for row in key:
        yield scramble(row.unsqueeze(1) + steps)
