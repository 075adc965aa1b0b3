"""Forks that can be killed at any moment without harm to the process that continues."""

import os
import threading

from tqdm import tqdm


def fork():
    """os.fork(), the child with a lock of its own for progress bars: one that dies with the shared lock keeps it."""
    child = os.fork()
    if child == 0:
        tqdm.set_lock(threading.RLock())
    return child
