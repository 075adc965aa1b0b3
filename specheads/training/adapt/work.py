"""The files of an adaptation in OUTPUT/sessions: a stage that has its file is done, so a stopped run resumes there."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specheads.files import replacing
from specheads.models.files import refuse_below_file
from specheads.options import OptionError
from specheads.training.adapt.options import AdaptOptions

OPTIONS = "options"  # the file of the options that a run resumes with


class Work:
    def __init__(self, options: AdaptOptions) -> None:
        """OptionError if the folder holds something else, or was begun with other options; nothing is written yet."""
        self.folder, output = options.output / "sessions", str(options.output)
        refuse_below_file(self.folder)
        self.options = json.loads(json.dumps(options.deciding, default=str))
        if (before := self.read(OPTIONS)) is None:
            if options.output.is_dir() and any(options.output.iterdir()):
                raise OptionError("{output} holds something else: give a new folder", output=output)
        elif differing := [name for name in self.options if before.get(name) != self.options[name]]:
            said = "; ".join(f"{name}: {before.get(name)!r}, not {self.options[name]!r}" for name in differing)
            raise OptionError(
                f"{{output}} was begun with other options ({said}): resume it with the same, or give another",
                output=output,
            )

    def read(self, name: str) -> Any:
        """What a stage left; None if it is not done."""
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text("utf8")) if path.is_file() else None

    def write(self, name: str, value: Any) -> None:
        if not (self.folder / f"{OPTIONS}.json").is_file():
            self._replace(f"{OPTIONS}.json", json.dumps(self.options, indent=2) + "\n")
        self._replace(f"{name}.json", json.dumps(value, indent=2, default=str) + "\n")

    def write_rows(self, name: str, rows: Sequence[Any]) -> Path:
        return self._replace(name, "".join(json.dumps(row, default=str) + "\n" for row in rows))

    def _replace(self, name: str, text: str) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        with replacing(self.folder / name) as path:
            path.write_text(text, "utf8")
        return self.folder / name


@contextlib.contextmanager
def stage(where: str) -> Iterator[None]:
    """In the block Ctrl-C says where, and how to resume."""
    try:
        yield
    except KeyboardInterrupt as stopped:  # TrainingStopped among them
        raise KeyboardInterrupt(f"{where}; the same command resumes") from stopped
