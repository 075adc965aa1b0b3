"""The precision needed by logarithms and sums over a vocabulary."""

from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32 if its dtype is narrower, else unchanged."""
    return x if x.element_size() >= 4 else x.float()
