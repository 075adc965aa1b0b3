"""Writing a file whole or not at all."""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file that replaces `path` if the block succeeds, and is deleted if it does not.

    It lies in a hidden folder of its own beside `path`, which is all that a killed process leaves, since safetensors
    has a temporary file of its own name as well. The next to write `path` removes it: one process at a time. OSError
    names `path`.
    """
    remove_unfinished(path)
    folder = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    temporary = folder / path.name
    try:
        folder.mkdir()
        temporary.touch()
        mode = temporary.stat().st_mode  # as the umask allows; safetensors would make the file private to its owner
        yield temporary
        temporary.chmod(mode)
        with open(temporary, "rb+") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_unfinished(path: Path) -> None:
    """Remove what a killed process left when it wrote `path`."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.{8 * '[0-9a-f]'}"):
        if left.is_dir():
            shutil.rmtree(left)
        else:  # an earlier version wrote a file
            left.unlink()
