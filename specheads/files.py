"""Writing files atomically: completely or not at all."""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

_ABANDONED = 3600  # seconds after which the unfinished write of a shared file is considered abandoned


@contextlib.contextmanager
def replacing(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """A temporary file that replaces `path` if the block succeeds, and is deleted if it does not.

    It is in its own hidden folder beside `path`, so that a killed process leaves only that folder, including the
    temporary file that safetensors itself creates. The next writer of `path` removes it; there may only be one writer
    at a time. An OSError names `path`.

    shared: others may write `path` at the same time. The last one wins, and leftovers of killed ones are removed later.
    """
    remove_unfinished(path, shared=shared)
    folder = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    temporary = folder / path.name
    try:
        folder.mkdir()
        temporary.touch()
        mode = temporary.stat().st_mode  # the umask's permissions; safetensors makes files private to their owner
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


def remove_unfinished(path: Path, *, shared: bool = False) -> None:
    """Remove what a killed process left when writing `path`. shared: except what another may still be writing."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.{8 * '[0-9a-f]'}"):
        with contextlib.suppress(OSError):  # another process has removed it, or it belongs to another user
            if shared and time.time() - left.stat().st_mtime < _ABANDONED:
                continue
            if left.is_dir():
                shutil.rmtree(left)
            else:  # an earlier version used a file instead of a folder
                left.unlink()


def write_whole(path: Path, text: str) -> None:
    """Write a text file completely or not at all. Several processes may do so at once; the last one wins."""
    with replacing(path, shared=True) as temporary:
        temporary.write_text(text, "utf8")
