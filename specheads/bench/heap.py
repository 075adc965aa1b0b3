"""What the C library does with memory that a decoder frees."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of mallopt(3)


def keep_freed_memory() -> None:
    """Let this process keep what it frees, under Linux with glibc; elsewhere nothing changes.

    Else glibc gives the cache of one decoder back to the system, and the next one, if its own is larger, waits for new
    pages while it reads the prompts. A process with one decoder does not: it gets its old cache back.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, -1)
