"""What a decoder of `specheads bench` says of itself: what it drafts with, where it does not run, how it is built."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from specheads.bench.compare.cell import BenchSetup, Cell
from specheads.bench.runner import Decoder


class DecoderSpec(ABC):
    """What a decoder's text stands for. drafters: the names of what it drafts with, if anything. refill: it takes a
    round's prompts at once, and the next one takes the row of a text that has ended. compiles_as_needed: other texts
    may need other graphs. peer: the engine whose environment it runs in, if any."""

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
        """Why it does not run in this cell; None if it does."""
        return None

    @abstractmethod
    def build(self, setup: BenchSetup, cell: Cell) -> Decoder: ...


class OneRow(DecoderSpec):
    """It takes no batches."""

    reason: ClassVar[str] = "takes one row at a time"

    def refusal(self, cell: Cell) -> str | None:
        return None if cell.batch == 1 else self.reason
