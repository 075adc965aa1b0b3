"""Where Python may look at numbers: reading one costs next to nothing on a CPU, and on a GPU the wait for the device.

Asked as `host.reads(tensor)`, so that one place says it and the other branch can be run on a CPU too.
"""

from torch import Tensor

Marks = Tensor | list[list[bool]]
"""(B, N) bool: lists where Python may read them, which then are faster than tensors so small."""


def reads(values: Tensor) -> bool:
    """May Python read them as it likes?"""
    return values.is_cpu


def marks(values: Marks) -> Marks:
    """(B, N) bool as `Marks` are: lists where Python may read them."""
    return values.tolist() if isinstance(values, Tensor) and reads(values) else values
