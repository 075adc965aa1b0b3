"""Which processes wrote a checkpoint, and what other processes can resume from it."""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from specheads.files import replacing
from specheads.models.base.fingerprint import differences
from specheads.models.config import SpecConfig
from specheads.models.files import CONFIG
from specheads.options import shown
from specheads.training.errors import begin_from_head

DECODING = ("tree", "draft_depth")  # options of a head that do not affect its training
MAX_ROWS = 1000  # read at most so many rows (about) for the data's checksum
_LEARNT = ("labels", "loss_mask")  # either says which tokens are learnt
WHOLE = ("no", "ddp")  # kinds whose checkpoints are unsharded, and interchangeable


class ResumeError(ValueError):
    """A checkpoint that this run cannot resume as the run that wrote it would have."""


@dataclass(frozen=True)
class Writers:
    """processes: how many there were; rows: per step, over all processes and accumulation; kind: see launch; data:
    `data_mark` of the training data; seed: of the order of the rows."""

    processes: int
    rows: int
    kind: str
    data: str | None = None
    seed: int | None = None

    def refuse(self, written: Writers, checkpoint: Path, other_rows: bool = False) -> None:
        """ResumeError if these processes cannot resume what others have written. other_rows: a different number of rows
        per step, or different data, is intended."""
        restart = begin_anew(checkpoint)
        if self.kind != written.kind and not (self.kind in WHOLE and written.kind in WHOLE):
            raise ResumeError(
                f"{checkpoint} was written by a run of the kind {written.kind!r}, whose optimizer state one of the "
                f"kind {self.kind!r} cannot read: resume with {written.kind!r}, {restart}"
            )
        if self.rows != written.rows and not other_rows:
            raise ResumeError(
                f"{checkpoint} was written by a run with {written.rows} rows a step ({written.processes} processes); "
                f"this one has {self.rows} ({self.processes} processes) and would lose its position in the data: "
                "choose training.per_device_train_batch_size and training.gradient_accumulation_steps so that their "
                f"product with the processes is {written.rows}, or start the data over: training.ignore_data_skip=true"
            )
        if self.data != written.data and None not in (self.data, written.data) and not other_rows:
            raise ResumeError(
                f"{checkpoint} was written by a run on other data ({written.data}; here {self.data}), whose position "
                f"means nothing here: give the same data, start with these anew (training.ignore_data_skip=true), "
                f"{restart}"
            )
        if self.seed != written.seed and not other_rows:
            raise ResumeError(
                f"{checkpoint} was written by a run whose rows are in the order by the seed {written.seed}, and this "
                f"one's is {self.seed}: give training.data_seed={written.seed}, or start the data over "
                f"(training.ignore_data_skip=true), {restart}"
            )


def refuse_other_model(current: SpecConfig, checkpoint: Path) -> None:
    """ResumeError if the checkpoint's head is not like this run's, or is for another base."""
    if not (checkpoint / CONFIG).is_file():
        return
    written = SpecConfig.from_dict(json.loads((checkpoint / CONFIG).read_text("utf8")))
    here, there = ({**config.head_config().to_dict(), "lora": config.joint} for config in (current, written))
    differing = [
        f"{name} is {shown(there[name])}, not {shown(here[name])}"
        for name in (["kind"] if here["kind"] != there["kind"] else here)
        if name not in DECODING and here[name] != there[name]
    ]
    others = differences(current.base_fingerprint, written.base_fingerprint)
    differing += [f"the base has other {name}" for name in others]
    if differing:
        raise ResumeError(
            f"{checkpoint} is of another head than this run's ({'; '.join(differing)}): give what it was trained with, "
            f"another training.output_dir, {begin_anew(checkpoint)}"
        )


def refuse_head_alone(checkpoint: Path, kind: str) -> None:
    """ResumeError for a checkpoint without optimizer or schedule, which transformers would silently restart."""
    missing = [name for name in (OPTIMIZER_NAME, SCHEDULER_NAME) if not (checkpoint / name).is_file()]
    if kind in WHOLE and missing:
        raise ResumeError(
            f"{checkpoint} has no {missing[0]}, as training.save_only_model=true leaves it out, and a run cannot "
            f"resume without: give a whole checkpoint, {begin_anew(checkpoint)}"
        )


def begin_anew(checkpoint: Path) -> str:
    return f"or {begin_from_head(checkpoint)}"


def data_mark(rows: Any) -> str | None:
    """A dataset's number of rows, a checksum of the tokens of some, and one of their labels, if rows hold tokens (a
    transform or a collator may make them later); None for a dataset without a length."""
    if not hasattr(rows, "__len__"):
        return None
    mark, chosen = f"{len(rows)} rows", range(0, len(rows), max(1, len(rows) // MAX_ROWS))
    if hasattr(rows, "checksum"):  # saved features, whose rows are large
        return f"{mark}, checksum {rows.checksum()} of the features"
    names = rows[0] if isinstance(rows, list | tuple) and rows else getattr(rows, "column_names", ())
    if "input_ids" not in names:
        return mark
    if hasattr(rows, "select_columns"):
        rows = rows.select_columns([name for name in ("input_ids", *_LEARNT) if name in names])
    tokens = labels = 0
    for row in map(rows.__getitem__, chosen):
        tokens = _crc(row["input_ids"], tokens)
        labels = _crc(next((row[name] for name in _LEARNT if row.get(name) is not None), ()), labels)
    return f"{mark}, checksum {tokens:08x}, of labels {labels:08x}"


def _crc(numbers: Iterable[Any], crc: int) -> int:
    return zlib.crc32(array("q", map(int, numbers)).tobytes(), crc)


@dataclass(frozen=True)
class Unlogged:
    """What a process has summed since the last log. meters: states of TrainingMeters; loss: the Trainer's own sum;
    last_logged: the step of that log."""

    meters: list[dict[str, list[float]]]
    loss: float
    last_logged: int

    def save(self, folder: str, process: int, writers: Writers) -> None:
        with replacing(_file(folder, process)) as path:
            path.write_text(json.dumps({**asdict(self), **asdict(writers)}), "utf8")
        if process == 0:
            for left in Path(folder).glob("unlogged_*.json"):  # from an earlier run with more processes at this step
                if left not in [_file(folder, i) for i in range(writers.processes)]:
                    left.unlink()

    @classmethod
    def load(cls, folder: str, process: int, processes: int) -> Unlogged:
        """The sums for one of `processes` processes: its own. If a different number of processes wrote them, the first
        takes everyone's meters, and each takes the mean loss, as the Trainer logs the mean over processes."""
        writers = writers_of(folder, process)
        assert writers is not None
        same = writers.processes == processes  # their files may be on different machines
        records = [_read(_file(folder, i)) for i in ([process] if same else range(writers.processes))]
        meters = [meter for record in records for meter in record["meters"]] if same or process == 0 else []
        return cls(meters, sum(record["loss"] for record in records) / len(records), records[0]["last_logged"])


def writers_of(folder: str | Path, process: int = 0) -> Writers | None:
    """The writers of a checkpoint, as far as this process can see; None if not recorded."""
    file = next((path for path in (_file(folder, process), _file(folder, 0)) if path.is_file()), None)
    if file is None:
        return None
    record = _read(file)
    return Writers(**{field.name: record[field.name] for field in fields(Writers)})


def _file(folder: str | Path, process: int) -> Path:
    return Path(folder) / f"unlogged_{process}.json"


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return json.loads(path.read_text("utf8"))
    except (OSError, ValueError) as error:
        raise ResumeError(f"{path}, which each process leaves in a checkpoint, cannot be read: {error}") from error
