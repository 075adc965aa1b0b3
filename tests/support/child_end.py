"""A child process says itself that its work is done; how it ends after that is no matter of what is tested.

After a backward pass on a device, torch's thread of that device drops a Python object. If the thread is late, and the
interpreter ends meanwhile, the process aborts with "terminate called without an active exception" (before Python 3.14,
which no longer ends such a thread). A busy machine is enough for it, in a child that ends right after such a pass.
"""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

DONE = "the child has done its work"
_FOLDER = "SPECHEADS_CHILD_FOLDER"


def report_done():
    """In the child: its last line. From here on a core dump goes to the parent's folder."""
    if folder := os.environ.get(_FOLDER):
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)
    print(DONE, flush=True)


def run_to_its_end(start, *arguments):
    """start(*arguments, **environment) runs a child and waits for it. It fails unless the child reported that it was
    done; if that then ended abnormally, a warning has the stacks of its threads, given gdb and a core dump."""
    with tempfile.TemporaryDirectory() as folder:
        done = start(*arguments, **{_FOLDER: folder})
        assert DONE in done.stdout.splitlines(), done.stdout[-2000:] + done.stderr[-4000:]
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:]
            stacks = native_stacks(folder)
            warnings.warn(f"a child ended with {done.returncode} after its work: {last}\n{stacks}", stacklevel=2)
    return done


def native_stacks(folder):
    cores = [path for path in Path(folder).iterdir() if path.name.startswith("core")]
    if not cores or not shutil.which("gdb"):
        return "no core dump, or no gdb to read one"
    command = ["gdb", "-batch", "-ex", "thread apply all bt 30", sys.executable, str(cores[0])]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False).stdout[-8000:]
