"""A disk that is full."""

import errno
from pathlib import Path


def fill_disk(patch):
    """From here on half of each text fits."""
    write_text = Path.write_text

    def full(path, text, encoding):
        write_text(path, text[: len(text) // 2], encoding)
        raise OSError(errno.ENOSPC, "No space left on device")

    patch.setattr(Path, "write_text", full)
