"""A stream of unknown length, repeated endlessly, so that a run over it is one epoch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from torch.utils.data import IterableDataset


class EndlessRows(IterableDataset):
    """The rows of a stream, restarted after the last. ValueError if it is read further after a pass without rows.

    At the end of a stream transformers (5.23) carries the gradients of an incomplete step over to the next one, and
    never steps if there are fewer rows than a step takes; a resumed run would forget how often they were read.
    """

    def __init__(self, rows: Any) -> None:
        self.rows = rows
        self.ended: int | None = None  # the number of rows read, once a pass has given none

    def __iter__(self) -> Iterator[Any]:
        if self.ended is not None:
            raise ValueError(
                f"the rows to train on ended after {self.ended}, before the last step, and gave none when they were "
                "read again: give a stream that begins anew each time, or a lower max_steps"
            )
        given = 0
        for epoch in count():
            if hasattr(self.rows, "set_epoch"):
                self.rows.set_epoch(epoch)
            before = given
            for row in self.rows:
                given += 1
                yield row
            if given == before:
                self.ended = given
                return
