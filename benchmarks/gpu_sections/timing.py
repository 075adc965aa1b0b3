"""Seconds and peak bytes of steps of decode(), on any device, and the time that a section has.

Shapes: B batch rows, L tokens of the prompt.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from bootstrap import median_interval
from live_memory import LiveMemory
from torch import Tensor

from specheads.decoding.acceptance import Exact
from specheads.decoding.compiled import CompiledSteps
from specheads.decoding.drafters import Drafter
from specheads.decoding.loop import decode
from specheads.decoding.planner import chain
from specheads.decoding.probs.sampler import Sampler
from specheads.decoding.results import Step
from specheads.decoding.verify.causal import Target

# Steps that are not timed: the first is made on the host, the second may be compiled, and CUDA captures the next two.
WARM = 4


@dataclass
class Deadline:
    """The seconds of a section. skipped: what was left out when they were over."""

    seconds: float
    began: float = field(default_factory=time.perf_counter)
    skipped: list[str] = field(default_factory=list)

    def over(self, what: str) -> bool:
        """Is the time over? Then `what` is noted as skipped."""
        if time.perf_counter() - self.began <= self.seconds:
            return False
        self.skipped.append(what)
        return True


@dataclass
class Times:
    """Seconds of each of some equal steps."""

    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return median(self.seconds)

    def to_dict(self) -> dict[str, Any]:
        return {"ms": 1e3 * self.median, "interval_ms": self.interval_ms(), "count": len(self.seconds)}

    def interval_ms(self) -> list[float] | None:
        found = median_interval(self.seconds)
        return None if found is None else [1e3 * bound for bound in found]

    def __str__(self) -> str:
        bounds = self.interval_ms()
        return f"{1e3 * self.median:.2f}" + (f" ({bounds[0]:.2f}–{bounds[1]:.2f})" if bounds else "")


class Peak:
    """bytes: the most that were alive at once, beyond what was there before."""

    bytes = 0


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """The peak of the block: the allocator's on CUDA; else counted tensor by tensor, which takes time."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        torch.cuda.synchronize(device)
        peak.bytes = torch.cuda.max_memory_allocated(device) - before
    else:
        with LiveMemory() as memory:
            yield peak
        peak.bytes = memory.peak


class Stepper:
    """A text that is decoded step by step, each over a chain of `nodes` nodes. The first few are made at once."""

    def __init__(
        self, target: Target, drafter: Drafter, nodes: int, ids: Tensor, steps: int,
        compiled: CompiledSteps | None = None,
    ) -> None:  # fmt: skip
        """ids (B, L): the prompts. steps: the most that will be asked for."""
        lengths = torch.full((len(ids),), ids.shape[1], device=ids.device)
        self._steps = decode(
            target, drafter if nodes > 1 else None, ids, lengths, plan=chain(nodes - 1) if nodes > 1 else None,
            sampler=Sampler(), accept=Exact(), stop=lambda row, text, count: -1,
            max_new_tokens=2 * (steps + WARM) + nodes + 2, compiled=compiled,
        )  # fmt: skip
        for _ in range(1 + WARM):
            next(self._steps)

    def step(self) -> Step:
        """Its seconds end when the host has the tokens, so a device has computed them."""
        return next(self._steps)
