"""Saved features as training rows and batches, as data/datasets.py and data/batches.py provide them for tokens.

Shapes: T tokens of a row, B batch rows, F tapped features, H hidden, K likeliest tokens kept.
"""

from __future__ import annotations

import copy
import json
import zlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from specheads.data.batches import Collator
from specheads.data.rows import IGNORED
from specheads.training.features.index import Index, read_finished_index
from specheads.training.features.shards import FeatureError, Shard

_OPEN = 16  # files kept open at a time
_TOKENS = ("input_ids", "supervised", "document_ids", "position_ids")
BASE_POSITIONS = "base_positions"  # only in files of a base whose positions have several parts


class FeatureDataset(Dataset):
    """The rows of one split, in the order of the data they were saved from.

    A row is input_ids, labels, document_ids and position_ids (T,), features (T, F) of `layers`, and last_hidden (T, H),
    or topk_ids and topk_log_p (T, K) and topk_tail (T,), or neither. FeatureError if a file is damaged or missing, or
    lacks those layers.
    """

    def __init__(
        self, folder: str | Path, layers: Sequence[int], split: str = "train", index: Index | None = None
    ) -> None:
        self.folder, self.layers, self.split = Path(folder), tuple(layers), split
        self.index = read_finished_index(self.folder) if index is None else index
        if missing := sorted(set(self.layers) - set(self.index.taps)):
            raise FeatureError(
                f"the head reads layers {self.layers}, and {folder} holds {self.index.taps}: save {missing} too, with "
                f"--taps {','.join(map(str, sorted({*self.layers, *self.index.taps})))} --output elsewhere"
            )
        self.shards = self.index.shards(split)
        self.firsts = [rows.start for _, rows in self.shards]
        self.taps = {layer: f"tap_{layer}" for layer in self.layers}
        self.teacher: tuple[str, ...] = ()
        if self.index.teacher_probs == "hidden":
            self.teacher = ("last_hidden",) if self.index.last_tap is None else (f"tap_{self.index.last_tap}",)
        elif self.index.teacher_probs != "none":
            self.teacher = ("topk_ids", "topk_log_p", "topk_tail")
        self.chosen: Sequence[int] = range(self.index.rows[split])
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._checked: set[int] = set()

    def select(self, indices: Sequence[int]) -> FeatureDataset:
        """Only these rows."""
        selected = copy.copy(self)
        selected.chosen = [self.chosen[i] for i in indices]
        return selected

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        i = self.chosen[i]
        number = bisect_right(self.firsts, i) - 1
        names = dict.fromkeys([*_TOKENS, *self.taps.values(), *self.teacher])
        shard = self._shard(number)
        if number not in self._checked:
            shard.check()
            self._checked.add(number)
        if BASE_POSITIONS in shard.names:
            names[BASE_POSITIONS] = None
        saved = shard.row(i - self.firsts[number], tuple(names))
        row = {name: saved[name].long() for name in _TOKENS}
        row["labels"] = _labels(row["input_ids"], row.pop("supervised").bool())
        if BASE_POSITIONS in names:
            row[BASE_POSITIONS] = saved[BASE_POSITIONS].long()
        row["features"] = torch.cat([saved[self.taps[layer]] for layer in self.layers], -1)
        if self.index.teacher_probs == "hidden":
            return {**row, "last_hidden": saved[self.teacher[0]]}
        return {**row, **{name: saved[name] for name in self.teacher}}

    def checksum(self) -> str:
        """A checksum of everything saved for this split, from the index alone."""
        return f"{zlib.crc32(json.dumps(self.index.files[self.split], sort_keys=True).encode()):08x}"

    def labels(self) -> Iterator[dict[str, list[int]]]:
        """Rows with labels only, without reading the features; of the whole split."""
        for number in range(len(self.shards)):
            shard = self._shard(number)
            labels = _labels(shard.whole("input_ids").long(), shard.whole("supervised")).tolist()
            yield from ({"labels": labels[start:stop]} for start, stop in pairwise(shard.starts))

    def _shard(self, number: int) -> Shard:
        if number not in self._open:
            self._open[number] = Shard(self.folder / self.shards[number][0])
            if len(self._open) > _OPEN:
                self._open.popitem(last=False)
        self._open.move_to_end(number)
        return self._open[number]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}  # each worker opens its own files


def _labels(ids: Tensor, supervised: Tensor) -> Tensor:
    return torch.where(supervised, ids, IGNORED)


@dataclass(frozen=True)
class FeatureCollator:
    """Rows of a FeatureDataset → a batch of `Collator`, and every other tensor as (B, T, …), 0 at padding."""

    pad_token_id: int

    def __call__(self, rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        tokens = ("input_ids", "labels", "document_ids", "position_ids")
        batch = Collator(self.pad_token_id)([{name: row[name] for name in tokens} for row in rows])
        width = batch["input_ids"].shape[1]
        for name in rows[0].keys() - set(tokens):
            first = rows[0][name]
            batch[name] = first.new_zeros(len(rows), width, *first.shape[1:])
            for b, row in enumerate(rows):
                batch[name][b, : len(row[name])] = row[name]
        return batch
