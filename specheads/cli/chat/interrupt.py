"""Ctrl-C stops a generation, not the program."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import StoppingCriteria


class Interruption(StoppingCriteria):
    """A stopping criterion that is met once the user has asked to stop."""

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return torch.full((len(input_ids),), self.asked)


@contextmanager
def stoppable() -> Iterator[Interruption]:
    """In the block, the first Ctrl-C stops after the current step; a second one raises KeyboardInterrupt, in case that
    step takes long."""
    stop = Interruption()

    def ask(number: int, frame: Any) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True

    # Only the main thread gets signals. If SIGINT is ignored, as in a shell's background job, it stays ignored.
    before = signal.getsignal(signal.SIGINT)
    ours = threading.current_thread() is threading.main_thread() and before not in (None, signal.SIG_IGN)
    if not ours:
        yield stop
        return
    signal.signal(signal.SIGINT, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
