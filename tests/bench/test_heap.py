"""keep_freed_memory(): what one decoder frees serves the next."""

import ctypes
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import torch
from specheads.bench.heap import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()
faults = []
for turn in range(12):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    cache = torch.zeros((40 + 20 * (turn % 2)) << 18)  # of 40 and 60 MiB in turn
    del cache
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sum(faults[4:]))
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt"
)
def test_a_cache_that_was_freed_is_not_asked_of_the_system_again():
    def faults(how):
        done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert 5 * faults("keep") < faults("give back") > 1000
