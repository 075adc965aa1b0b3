"""The precision of sums over a vocabulary, and of matrix products."""

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32 if its dtype is narrower, else unchanged."""
    return x if x.element_size() >= 4 else x.float()


def bfloat16_is_fast(device: torch.device) -> bool:
    """Does this device multiply bfloat16 matrices faster than float32? If that is unknown, no."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return device.type == "cpu" and any(getattr(torch.cpu, name, lambda: False)() for name in checks)
