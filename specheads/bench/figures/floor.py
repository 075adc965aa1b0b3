"""The least time a pass can take on this machine: it reads each weight once, so at least bytes divided by bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

REPEATS = 20


@dataclass(frozen=True)
class Floor:
    """weight_bytes: read by one pass; bandwidth: bytes per second; seconds: the least that a pass can take."""

    weight_bytes: int
    bandwidth: float

    @property
    def seconds(self) -> float:
        return self.weight_bytes / self.bandwidth

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": self.seconds}


def measure_floor(model: nn.Module) -> Floor:
    size = weight_bytes(model)
    return Floor(size, read_bandwidth(size, next(model.parameters()).device))


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters, each counted once. An input embedding that is not also the output matrix is left out,
    since a pass reads only a few of its rows."""
    shared = {parameter.data_ptr(): parameter for parameter in model.parameters()}
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    output = getattr(model, "get_output_embeddings", lambda: None)()
    if embeddings is not None and (output is None or output.weight.data_ptr() != embeddings.weight.data_ptr()):
        shared.pop(embeddings.weight.data_ptr(), None)
    return sum(parameter.numel() * parameter.element_size() for parameter in shared.values())


def read_bandwidth(
    size: int, device: torch.device, *, repeats: int = REPEATS, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Bytes per second at which `size` bytes are read: the fastest of `repeats` matrix-vector products.

    With the matrix as large as the weights, whatever fits into a cache is read from the cache, as in decoding."""
    columns = 1024
    matrix = torch.ones(max(1, size // (4 * columns)), columns, device=device)
    vector = torch.ones(columns, device=device)
    waits = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    taken = []
    for _ in range(repeats + 1):  # the first warms up
        waits()
        began = clock()
        matrix @ vector
        waits()
        taken.append(clock() - began)
    return matrix.numel() * 4 / min(taken[1:])
