"""What all timed sections use: the random base, its floor, its drafters."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel

from gpu_sections.sizes import Sizes
from gpu_sections.successor import SuccessorDrafter, successor_base
from specheads.bench.figures.floor import Floor, read_bandwidth, weight_bytes
from specheads.decoding.compiled import CompiledSteps, compiled_steps

LARGEST_READ = 4 << 30  # bytes; far more than any cache, and it must fit beside the weights


class Machine:
    """The base is made when it is first asked for."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes, self.device = sizes, device

    @cached_property
    def base(self) -> PreTrainedModel:
        return successor_base(self.sizes, self.device)

    @cached_property
    def floor(self) -> Floor:
        """The least time of a pass: the bytes of its weights at the bandwidth at which as many are read."""
        size = weight_bytes(self.base)
        return Floor(size, read_bandwidth(min(size, LARGEST_READ), self.device))

    @cached_property
    def drafter(self) -> SuccessorDrafter:
        return SuccessorDrafter(self.sizes.vocab_size, self.device)

    @property
    def compiled(self) -> CompiledSteps:
        return compiled_steps(self.base, self.sizes.backend)

    def to_dict(self) -> dict[str, Any]:
        sizes = self.sizes
        heads = f"{sizes.heads} heads over {sizes.key_heads}"
        shape = f"{sizes.layers} × {sizes.hidden}, {heads}, vocabulary {sizes.vocab_size:,}"
        return {"name": sizes.name, "shape": shape, "dtype": str(sizes.dtype), "floor": self.floor.to_dict()}
