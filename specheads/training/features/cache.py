"""A disk cache of the base's features, filled in the first epoch and read in later ones; the base stays in memory.

Shapes: B batch rows, T positions, N tokens of all rows, F tapped features, H hidden.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import torch
from torch import Tensor
from torch.utils.data import Dataset

from specheads.decoding.verify.hf_base import logits_of
from specheads.files import replacing
from specheads.losses.teacher import LiveTeacher, Teacher, gives_logits
from specheads.models.base.fingerprint import fingerprint_base
from specheads.models.base.loading import quantization_of
from specheads.models.spec_model import SpecModel
from specheads.training.errors import TrainingError
from specheads.training.features.shards import FeatureError

_log = logging.getLogger(__name__)

RECORD, STATES, MARKS, LOCK = "cache.json", "states.bin", "rows.bin", "lock"
ROW_NUMBERS = "row_numbers"
_PIECE = 1 << 24
_SAVED = 1 << 32  # the bit of a row's mark that says it is on disk; the lower 32 are the checksum of its states


@dataclass(frozen=True)
class Origin:
    """What a cache's states depend on. base: its fingerprint. text: a checksum of the rows' tokens and documents."""

    base: Any
    dtype: str
    quantization: dict[str, Any] | None
    taps: tuple[int, ...]
    autocast: str
    text: str


class FeatureCache:
    """Tapped features and last hidden states of every row, in one file allocated in full from the start.

    Each row is written once, whole, and marked with its checksum. A row with a wrong checksum counts as not saved.
    Several processes on one machine share the folder.
    """

    def __init__(self, folder: str | Path, origin: Origin, lengths: Sequence[int]) -> None:
        """FeatureError if the folder holds something else, or states of other rows or another base."""
        self.folder, self.origin, self.lengths = Path(folder), origin, tuple(lengths)
        self.starts = tuple(accumulate(self.lengths, initial=0))
        self.sizes: tuple[int, int] | None = None  # F and H, known once a pass has run
        self.states = self.marks = torch.empty(0)
        self._checked: set[int] = set()
        if (self.folder / RECORD).is_file():
            self._open()
        elif self.folder.exists() and {path.name for path in self.folder.iterdir()} - {STATES, MARKS, LOCK}:
            raise FeatureError(f"{folder} holds something other than a cache of features: give a new feature_cache")

    def _open(self) -> None:
        try:
            record = json.loads((self.folder / RECORD).read_text("utf8"))
            origin, sizes, dtype = record["origin"], tuple(record["sizes"]), getattr(torch, record["dtype"])
            found = {name: (self.folder / name).stat().st_size for name in (STATES, MARKS)}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FeatureError(f"{self.folder} is no whole cache of features ({error}): delete it") from error
        wanted = json.loads(json.dumps(asdict(self.origin)))
        if other := [name for name, value in wanted.items() if origin.get(name) != value]:
            raise FeatureError(
                f"{self.folder} holds what another run's base saw ({', '.join(other)} differ): give a new feature_cache"
            )
        if found != (needed := self._bytes(sizes, dtype)):
            raise FeatureError(f"{self.folder} is damaged: its files have {found} bytes, not {needed}; delete it")
        width = sum(sizes)
        states = torch.from_file(str(self.folder / STATES), True, self.starts[-1] * width, dtype=dtype)
        self.sizes, self.states = sizes, states.view(-1, width)
        self.marks = torch.from_file(str(self.folder / MARKS), True, len(self.lengths), dtype=torch.int64)

    def _bytes(self, sizes: tuple[int, ...], dtype: torch.dtype) -> dict[str, int]:
        return {STATES: self.starts[-1] * sum(sizes) * dtype.itemsize, MARKS: 8 * len(self.lengths)}

    def _create(self, sizes: tuple[int, int], dtype: torch.dtype) -> None:
        """Create files with room for every row, unless another process has. TrainingError if the disk is too full."""
        import fcntl  # not available on every system

        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / LOCK, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (self.folder / RECORD).is_file():
                needed = self._bytes(sizes, dtype)
                _log.info("feature cache: %.3g GB in %s", needed[STATES] / 1e9, self.folder)
                try:
                    for name, size in needed.items():
                        _fill(self.folder / name, size)
                except OSError as error:
                    for name in (*needed, LOCK):
                        (self.folder / name).unlink(missing_ok=True)
                    raise TrainingError(
                        f"{self.folder} has no room for {needed[STATES] / 1e9:.3g} GB of features ({error.strerror}): "
                        "make room, give another feature_cache, or leave it out"
                    ) from error
                record = {"origin": asdict(self.origin), "sizes": sizes, "dtype": str(dtype).removeprefix("torch.")}
                with replacing(self.folder / RECORD) as path:
                    path.write_text(json.dumps(record, indent=2) + "\n", "utf8")
        self._open()

    def holds(self, rows: Iterable[int]) -> bool:
        """Are all of these rows saved, and undamaged?"""
        return self.sizes is not None and all(map(self._is_saved, rows))

    def _is_saved(self, row: int) -> bool:
        mark = int(self.marks[row])
        if row not in self._checked and mark & _SAVED:
            if mark ^ _SAVED != self._checksum(row):
                _log.warning("row %d in %s is damaged: the base is run on it again", row, self.folder)
                self.marks[row] = mark = 0
            else:
                self._checked.add(row)
        return bool(mark & _SAVED)

    def _part(self, row: int) -> Tensor:
        return self.states[self.starts[row] : self.starts[row + 1]]

    def _checksum(self, row: int) -> int:
        return zlib.crc32(self._part(row).view(-1).view(torch.uint8).numpy().data)

    def write(self, rows: Sequence[int], features: Tensor, hidden: Tensor) -> None:
        """Save features (B, T, F) and hidden (B, T, H) of these rows."""
        sizes = features.shape[-1], hidden.shape[-1]
        if self.sizes is None:
            self._create(sizes, torch.promote_types(features.dtype, hidden.dtype))
        for b, row in enumerate(rows):
            part, length = self._part(row), self.lengths[row]
            part[:, : sizes[0]], part[:, sizes[0] :] = features[b, :length], hidden[b, :length]
            self.marks[row] = _SAVED | self._checksum(row)

    def read(self, rows: Sequence[int], width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The features (B, T, F) and hidden states (B, T, H) of rows padded to T = width, 0 at padding."""
        assert self.sizes is not None
        states = self.states.new_zeros(len(rows), width, sum(self.sizes))
        for b, row in enumerate(rows):
            states[b, : self.lengths[row]] = self._part(row)
        features, hidden = states.to(device).split(self.sizes, -1)
        return features, hidden


def _fill(path: Path, size: int) -> None:
    """Write a file of zeros, so that its disk space is really allocated: a sparse mapped file on a full disk would kill
    the process later."""
    with open(path, "wb") as file:
        for start in range(0, size, _PIECE):
            file.write(bytes(min(_PIECE, size - start)))


class CachingModel(SpecModel):
    """A SpecModel that runs its base only on rows that the cache lacks. It takes batches of a NumberedCollator."""

    cache: FeatureCache

    @classmethod
    def of(cls, model: SpecModel, cache: FeatureCache) -> CachingModel:
        if model.joint is not None:
            raise FeatureError("feature_cache keeps what a frozen base sees, and lora trains the base: leave one out")
        if not gives_logits(model.base):
            raise FeatureError(
                "feature_cache keeps last hidden states, from which the logits of a "
                f"{type(model.base).__name__} cannot be had: leave it out"
            )
        made = cls(model.config, model.base, model.head)
        made.cache = cache
        return made

    def observe_base(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, documents: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Teacher]:
        rows = kwargs.pop(ROW_NUMBERS, None)
        if rows is None:  # an evaluation batch
            return super().observe_base(input_ids, attention_mask, position_ids, documents, **kwargs)
        rows = rows.tolist()
        if not self.cache.holds(rows):
            features, teacher = super().observe_base(input_ids, attention_mask, position_ids, documents, **kwargs)
            assert isinstance(teacher, LiveTeacher) and teacher.lm_head is not None
            self.cache.write(rows, features, teacher.outputs.view(*input_ids.shape, -1))
            return features, teacher
        features, hidden = self.cache.read(rows, input_ids.shape[1], input_ids.device)
        return features, LiveTeacher(hidden.flatten(0, 1), lambda states: logits_of(self.base, states))


class NumberedRows(Dataset):
    """Rows with their numbers added."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {**self.rows[i], ROW_NUMBERS: i}


@dataclass(frozen=True)
class NumberedCollator:
    """Batches of `collator`, with the rows' numbers (B,) if they have them."""

    collator: Any

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        tokens = [{name: value for name, value in row.items() if name != ROW_NUMBERS} for row in rows]
        numbers = [row[ROW_NUMBERS] for row in rows if ROW_NUMBERS in row]
        return {**self.collator(tokens), **({ROW_NUMBERS: torch.tensor(numbers)} if numbers else {})}


@dataclass(frozen=True)
class Cached:
    model: CachingModel
    rows: NumberedRows
    collator: NumberedCollator


def with_cache(folder: str | Path, model: SpecModel, rows: Any, collator: Any, autocast: str) -> Cached:
    """The model, its dataset and its collator, with the base's features cached in `folder`. autocast: the run's, see
    `plan.autocast_of`. FeatureError if this model cannot be cached, or that folder cannot be used."""
    lengths, text = text_of(rows)
    base = model.base
    origin = Origin(fingerprint_base(base), str(base.dtype), quantization_of(base), model.head.layers, autocast, text)
    made = CachingModel.of(model, FeatureCache(folder, origin, lengths))
    return Cached(made, NumberedRows(rows), NumberedCollator(collator))


def text_of(rows: Any) -> tuple[list[int], str]:
    """The lengths of a dataset's rows, and a checksum of their tokens and documents."""
    names = [name for name in ("input_ids", "document_ids") if name in rows.column_names]
    lengths: list[int] = []
    crc = 0
    for batch in rows.select_columns(names).with_format("arrow").iter(1000):
        lengths += pc.list_value_length(batch["input_ids"]).to_pylist()
        for name in names:
            crc = zlib.crc32(pc.list_flatten(batch[name]).to_numpy().astype("int64").tobytes(), crc)
    return lengths, f"{zlib.crc32(str(lengths).encode(), crc):08x}"
