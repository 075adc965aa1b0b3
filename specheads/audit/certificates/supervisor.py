"""Runs a command that ends with the process that started it, however that one ends, SIGKILL included:

    python supervisor.py FOLDER COMMAND…

Its standard input is a pipe whose other end the starting process holds, and never writes to: the system closes it with
that process. Then the command and all that it started are ended, and FOLDER, with their files, is deleted. If the
command ends first, so does this program, with its exit status, and FOLDER stays. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys

GRACE = 30.0  # seconds that the command may take to end by itself
INTERVAL = 0.1  # seconds between two looks at it


def main(folder: str, *command: str) -> int:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    closed = False
    while process.poll() is None and not closed:
        closed = bool(select.select([sys.stdin], [], [], INTERVAL)[0])
    end_group(process)
    if closed:
        shutil.rmtree(folder, ignore_errors=True)
    return process.returncode


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End the process, which leads its group, by SIGTERM, after GRACE by SIGKILL; then what is left of the group."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) % 256)
