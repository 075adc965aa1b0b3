"""The finished parts of a measurement, in a JSON Lines file, so that an interrupted measurement can resume."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

Row = dict[str, Any]
RESULTS = "results.jsonl"
NOTHING_DONE = "before anything was measured"  # message of a KeyboardInterrupt


class Results:
    """Rows by key. Each line of the file is written completely or not at all. Used in a `with` block, which at its end
    removes folders that it created and that are still empty."""

    def __init__(self, path: Path) -> None:
        """Read the file. A last line that a crash cut short is dropped, and removed from the file."""
        self.path = path
        self.rows: dict[str, Row] = {}
        self._made = [folder for folder in path.parents if not folder.exists()]
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.read_bytes() if path.exists() else b""
        kept = whole[: whole.rfind(b"\n") + 1]
        if kept != whole:
            with open(path, "r+b") as file:
                file.truncate(len(kept))
        for number, line in enumerate(kept.decode("utf8").splitlines(), start=1):
            try:
                record = json.loads(line)
                self.rows[record["key"]] = record["row"]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number} is no result of bench; move the file away") from error

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):  # the folder is not empty
            for folder in self._made:
                folder.rmdir()

    def add(self, key: str, row: Row) -> None:
        """Append a row. OSError if its line cannot be written completely; the file is then unchanged."""
        line = json.dumps({"key": key, "row": row}, allow_nan=False).encode() + b"\n"
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(file).st_size
        try:
            while line:  # a full disk writes part of it, and raises for the rest
                line = line[os.write(file, line) :]
            os.fsync(file)
        except OSError as error:
            os.ftruncate(file, size)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        finally:
            os.close(file)
        self.rows[key] = row


def digest(*values: Any) -> str:
    """A short digest of plain values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
