"""The interface of a decoder of `specheads bench`: what it drafts with, where it cannot run, how it is built."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from specheads.bench.compare.cell import BenchSetup, Cell
from specheads.bench.runner import Decoder


class DecoderSpec(ABC):
    """The decoder that a text names. drafters: the names of its drafters, if any. refill: it takes all prompts of a
    round at once, and a finished text's row goes to the next prompt. compiles_as_needed: other texts may need other
    graphs. peer: the engine in whose environment it runs, if any."""

    peer: ClassVar[str | None] = None

    @property
    def drafters(self) -> tuple[str, ...]:
        return ()

    @property
    def refill(self) -> bool:
        return False

    @property
    def compiles_as_needed(self) -> bool:
        return False

    def refusal(self, cell: Cell) -> str | None:
        """Why the decoder cannot run in this cell; None if it can."""
        return None

    @abstractmethod
    def build(self, setup: BenchSetup, cell: Cell) -> Decoder: ...


class OneRow(DecoderSpec):
    """A decoder that cannot decode batches."""

    reason: ClassVar[str] = "takes one row at a time"

    def refusal(self, cell: Cell) -> str | None:
        return None if cell.batch == 1 else self.reason
