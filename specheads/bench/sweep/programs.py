"""HumanEval's check: the completed program is run against the problem's tests in a separate process."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile

# The start of code or text after the requested function.
_ENDS = re.compile(r"\n(?=(?:class|def|if|print|#|@|import|from)\b|#|@|```)")


def complete_function(prompt: str, completion: str) -> str:
    """The prompt and the completion, cut at the end of the function."""
    return prompt + _ENDS.split(completion, maxsplit=1)[0] + "\n"


def passes(prompt: str, completion: str, test: str, entry_point: str, *, seconds: float = 10.0) -> bool:
    """Does the completed function pass its tests in time? Runs code that a model wrote: without environment, input or
    output, in a temporary folder, but with all permissions of this process."""
    program = f"{complete_function(prompt, completion)}\n{test}\ncheck({entry_point})\n"
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", program], cwd=folder, env={}, timeout=seconds, check=False,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0
