"""Ctrl-C in a program of ours is one line on stderr and exit code 130, whatever it interrupts."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def say_stopped(program: str, where: object = "") -> int:
    """Print that the program was stopped, and where, if that is known. Returns the exit code."""
    if _speaks():
        print(f"{program}: stopped {where}".rstrip(), file=sys.stderr, flush=True)
    return 130


def listen(program: str) -> None:
    """From now on Ctrl-C raises KeyboardInterrupt, or exits at once during an import (torch's takes seconds): numpy and
    transformers would catch the exception there, and go on or fail later with an unrelated message."""

    def stop(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                if _speaks():
                    os.write(2, f"{program}: stopped\n".encode())  # print() may be what is interrupted
                os._exit(130)
            frame = frame.f_back
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # in a shell's background it is ignored
        signal.signal(signal.SIGINT, stop)


def _speaks() -> bool:
    """Whether this process reports: of a run in several, the first."""
    return os.environ.get("RANK", "0") == "0"
