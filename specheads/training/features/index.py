"""The index of a folder of saved features: what was saved per token, from which base, and in which files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from specheads.files import replacing
from specheads.models.files import make_portable
from specheads.options import OptionError
from specheads.training.features.shards import AGAIN, FeatureError, file_fingerprint

INDEX = "index.json"
FORMAT = 2


TeacherProbs = Literal["hidden", "none"] | int


def parse_teacher_probs(value: str | int) -> TeacherProbs:
    """'hidden', 'none', or '64' → 64 likeliest tokens. OptionError for anything else."""
    if value == "hidden":
        return "hidden"
    if value == "none":
        return "none"
    number = str(value)
    if isinstance(value, bool) or not number.isdecimal() or int(number) < 1:
        raise OptionError(
            "{teacher_probs}: expected hidden, none or a number of likeliest tokens, such as 64", teacher_probs=value
        )
    return int(number)


@dataclass(frozen=True)
class Index:
    """taps: hidden_states saved, as Hugging Face indices; dtype: theirs; teacher_probs: what is saved of the base's
    distribution, "hidden", "none" or a number of likeliest tokens; last_tap: the tap that equals the last hidden state,
    if any. batch_size, shard_rows: rows per pass, and per file.

    base: its name, revision, fingerprint, the `autocast` it ran under, and `unfit`, kind of head → why it cannot learn
    from this base.
    rows: number per split; files: per split, the `file_fingerprint` of each file, empty until all are written; kept:
    that of the base's file.
    """

    taps: tuple[int, ...]
    dtype: str
    teacher_probs: TeacherProbs
    last_tap: int | None
    batch_size: int
    shard_rows: int
    pad_token_id: int
    base: dict[str, Any]
    rows: dict[str, int]
    files: dict[str, list[dict[str, Any]]]
    kept: dict[str, Any]

    @property
    def finished(self) -> bool:
        return bool(self.files)

    def shards(self, split: str) -> list[tuple[str, range]]:
        """The files of a split and the rows that each holds, whichever process writes them."""
        count, size = self.rows[split], self.shard_rows
        return [
            (f"{split}-{number:05d}.safetensors", range(start, min(start + size, count)))
            for number, start in enumerate(range(0, count, size))
        ]

    def differences(self, other: Index) -> list[str]:
        """How the options of another run differ, as 'name: this, not that'; files do not count."""
        here, there = asdict(self), asdict(other)
        return [
            f"{name}: {here[name]!r}, not {there[name]!r}"
            for name in here
            if name not in ("files", "kept") and here[name] != there[name]
        ]

    def write(self, folder: Path) -> None:
        record = {"format": FORMAT, **asdict(self)}
        record["base"] = {**self.base, "name": make_portable(self.base["name"], folder)}
        with replacing(folder / INDEX) as path:
            path.write_text(json.dumps(record, indent=2) + "\n", "utf8")


def read_index(folder: Path) -> Index:
    """Read a folder's index. FeatureError if there is none, or if another version or program wrote it."""
    path = folder / INDEX
    if not path.is_file():
        raise FeatureError(f"{folder} has no {INDEX}: give a folder that `specheads features` has filled")
    try:
        record = json.loads(path.read_text("utf8"))
        version = record.pop("format")
        if version != FORMAT:
            raise FeatureError(
                f"{path} has format {version!r}, and this version reads {FORMAT}; save the features again"
            )
        record["teacher_probs"] = parse_teacher_probs(record["teacher_probs"])
        if not isinstance(record["base"], Mapping) or {f.name for f in fields(Index)} != set(record):
            raise KeyError(f"it has {sorted(record)}")
    except FeatureError:
        raise
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise FeatureError(f"{path} is damaged, or no index of saved features ({error}); {AGAIN}") from error
    name = record["base"]["name"]
    if name and name.startswith("."):
        record["base"] = {**record["base"], "name": str((folder / name).resolve())}
    return Index(**{**record, "taps": tuple(record["taps"])})


def read_finished_index(folder: Path) -> Index:
    """The index of a complete folder, whose files all exist with the recorded sizes and headers. FeatureError names the
    first that does not."""
    index = read_index(folder)
    if not index.finished:
        raise FeatureError(f"{folder} is not finished: {AGAIN}")
    from specheads.training.features.frozen_weights import FOLDER

    known = [(folder / FOLDER, index.kept), *((folder, entry) for files in index.files.values() for entry in files)]
    for base, entry in known:
        path = base / entry["file"]
        actual = file_fingerprint(path)
        if actual != entry:
            wrong = ", ".join(
                f"{name} {actual[name]}, not {entry[name]}" for name in entry if actual[name] != entry[name]
            )
            raise FeatureError(f"{path} is damaged or not the one that was saved ({wrong}); delete it and {AGAIN}")
    for split, files in index.files.items():
        if [entry["file"] for entry in files] != [name for name, _ in index.shards(split)]:
            raise FeatureError(f"{folder / INDEX} does not list the files of its {split} rows; {AGAIN}")
    return index
