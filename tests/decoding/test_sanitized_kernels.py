"""The C++ kernels touch no memory but theirs and do nothing undefined: their tests, built with GCC's sanitizers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

WORKER = ROOT / "tests" / "workers" / "sanitized_kernels.py"


def sanitizers():
    """libasan and libubsan of the compiler, which a process must load first; those that it has."""
    if (compiler := shutil.which(os.environ.get("CXX", "g++"))) is None:
        return []
    asked = [[compiler, f"-print-file-name={name}"] for name in ("libasan.so", "libubsan.so")]
    answers = [subprocess.run(command, capture_output=True, text=True).stdout.strip() for command in asked]
    return [path for path in answers if Path(path).is_absolute()]  # of what it lacks, GCC repeats the name


@pytest.mark.slow
def test_kernels_keep_to_their_memory_and_to_defined_behaviour():
    """Four minutes of CPU time, most of them to compile."""
    if len(libraries := sanitizers()) < 2:
        pytest.skip("needs g++ with libasan and libubsan (CXX names another compiler)")
    done = subprocess.run(
        [sys.executable, str(WORKER)], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "LD_PRELOAD": " ".join(libraries),
             "ASAN_OPTIONS": "detect_leaks=0"},  # Python frees little of what it holds at its end
    )  # fmt: skip
    assert done.returncode == 0 and " passed" in done.stdout, (done.stdout + done.stderr)[-4000:]
