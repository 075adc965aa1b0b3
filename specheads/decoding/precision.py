"""The precision that logarithms and sums over a vocabulary need."""

from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32 where its dtype is narrower, else as it is."""
    return x if x.element_size() >= 4 else x.float()
