"""The rows of a SpecTrainer: tokenized if text, without those with nothing to learn, in an order that can be resumed.

Rows that are only repeated to fill an epoch's last batch, which must have as many in every process, are masked. Rows
that are made as they are read (by a transform, a stream or a class of the user's) are left as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import datasets
import numpy as np
import torch
from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler
from accelerate.state import GradientState
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers.trainer_pt_utils import LengthGroupedSampler

from specheads.data.batches import Collator
from specheads.data.config import DataConfig
from specheads.data.datasets import build_datasets
from specheads.data.images import processor_of, tokenizer_of
from specheads.data.row_forms import is_chat
from specheads.data.rows import IGNORED
from specheads.decoding.verify.hf_base import text_config
from specheads.models.spec_model import SpecModel

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowCollator:
    """`Collator` for rows that may say what is learnt by a loss_mask, or not at all: then all but their first token."""

    pad_token_id: int
    processor: Any = None

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        return Collator(self.pad_token_id, processor=self.processor)(
            [{**row, "labels": labels_of(row)} for row in rows]
        )


def labels_of(row: Mapping[str, Any]) -> Any:
    if row.get("labels") is not None:
        return row["labels"]
    ids = row["input_ids"]
    mask = row.get("loss_mask", [False, *[True] * (len(ids) - 1)])
    return [int(token) if learnt else IGNORED for token, learnt in zip(ids, mask, strict=True)]


def prepared(
    model: SpecModel, *, train_dataset: Any = None, eval_dataset: Any = None, data_collator: Any = None,
    processing_class: Any = None, **_: Any,
) -> dict[str, Any]:  # fmt: skip
    """A Trainer's arguments train_dataset, eval_dataset and data_collator. A collator of the user's may take rows of
    text; the default one pads with the tokenizer's padding token, or the base's, or any: what pads is masked.

    ValueError for text without a tokenizer, and if no row has a token to learn from."""
    parts = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
    rows = {name: _prepare(part, name, model, processing_class, data_collator is None) for name, part in parts.items()}
    if data_collator is None:
        owners = (tokenizer_of(processing_class), text_config(model.base))
        ids = (getattr(owner, "pad_token_id", None) for owner in owners)
        pad = next((i for i in ids if isinstance(i, int) and i >= 0), 0)
        data_collator = RowCollator(pad, processor_of(processing_class))
    return {**rows, "data_collator": data_collator}


def _prepare(rows: Any, name: str, model: SpecModel, tokenizer: Any, tokenizes: bool) -> Any:
    """The rows of a dataset, or of each in a dict of them. tokenizer: or processor."""
    if isinstance(rows, dict):
        return {key: _prepare(part, f"{name}[{key!r}]", model, tokenizer, tokenizes) for key, part in rows.items()}
    columns = _columns(rows)
    if tokenizes and "input_ids" not in columns and ("text" in columns or "messages" in columns or is_chat(columns)):
        return _tokenized(rows, name, columns, model, tokenizer)
    return _learnable(rows, name, columns)


def _columns(rows: Any) -> list[str]:
    """The names in each row; [] if rows are made as they are read."""
    if isinstance(rows, datasets.Dataset):
        return [] if rows.format["type"] == "custom" else rows.column_names
    if isinstance(rows, datasets.IterableDataset):
        return rows.column_names or []
    return list(rows[0]) if isinstance(rows, list | tuple) and rows and isinstance(rows[0], Mapping) else []


def _tokenized(rows: Any, name: str, columns: Sequence[str], model: SpecModel, tokenizer: Any) -> Any:
    if tokenizer is None or isinstance(rows, datasets.IterableDataset):
        lack = "they are a stream" if tokenizer is not None else "there is no tokenizer"
        raise ValueError(
            f"the rows of {name} have {', '.join(columns)} and no input_ids, and {lack}: pass processing_class="
            'AutoTokenizer.from_pretrained("the/base") with a dataset or a list of rows, or rows made by '
            "build_datasets(DataConfig(…), tokenizer)"
        )
    return build_datasets(DataConfig(train=rows), tokenizer, text_config(model.base).vocab_size)[0]


def _learnable(rows: Any, name: str, columns: Sequence[str]) -> Any:
    marked = next((column for column in ("labels", "loss_mask") if column in columns), None)
    if marked is None or isinstance(rows, datasets.IterableDataset):
        return rows
    nothing = IGNORED if marked == "labels" else 0
    # The first token is predicted by nothing.
    kept = [
        i for i, marks in enumerate(_marks(rows, marked)) if marks is None or (np.asarray(marks)[1:] != nothing).any()
    ]
    if not kept:
        raise ValueError(
            f"none of the {len(rows)} rows of {name} has a token to learn from: their {marked} are {nothing} "
            "everywhere, or all but the first"
        )
    if len(kept) == len(rows):
        return rows
    _log.warning("%s: left out %d of %d rows with no token to learn from", name, len(rows) - len(kept), len(rows))
    return rows.select(kept) if isinstance(rows, datasets.Dataset) else [rows[i] for i in kept]


def _marks(rows: Any, column: str) -> Iterator[Any]:
    if not isinstance(rows, datasets.Dataset):
        yield from (row.get(column) for row in rows)
        return
    for batch in rows.select_columns([column]).with_format("numpy").iter(1000):
        yield from batch[column]


class SeededLengthGroups(LengthGroupedSampler):
    """LengthGroupedSampler, but its order does not depend on all earlier random draws, as transformers' does.

    The Trainer calls set_epoch() before each epoch.
    """

    def __init__(self, batch_size: int, lengths: list[int], seed: int) -> None:
        super().__init__(batch_size, lengths=lengths)
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return super().__iter__()


class EndlessRows(IterableDataset):
    """The rows of a stream, restarted after the last. ValueError if it is read further after a pass without rows.

    At the end of a stream transformers (5.23) carries the gradients of an incomplete step over to the next one, and
    never steps if there are fewer rows than a step takes; a resumed run would forget how often they were read.
    """

    def __init__(self, rows: Any) -> None:
        self.rows = rows
        self.ended: int | None = None  # the number of rows read, once a pass has given none

    def __iter__(self) -> Iterator[Any]:
        if self.ended is not None:
            raise ValueError(
                f"the rows to train on ended after {self.ended}, before the last step, and gave none when they were "
                "read again: give a stream that begins anew each time, or a lower max_steps"
            )
        number = 0
        for epoch in count():
            if hasattr(self.rows, "set_epoch"):
                self.rows.set_epoch(epoch)
            before = number
            for row in self.rows:
                number += 1
                yield row
            if number == before:
                self.ended = number
                return


def mask_repeats(inputs: dict[str, Any], state: GradientState) -> dict[str, Any]:
    """The active loader's current batch, with repeated rows unsupervised."""
    if not state.end_of_dataloader:
        return inputs
    rows = len(inputs["input_ids"])
    fresh = _fresh_rows(state.active_dataloader, rows)
    return inputs if fresh >= rows else _learning(inputs, fresh)


def _learning(inputs: dict[str, Any], fresh: int) -> dict[str, Any]:
    """The batch, with only the first `fresh` rows supervised."""
    name, ignored = ("labels", IGNORED) if "labels" in inputs else ("loss_mask", 0)
    mask = torch.arange(len(inputs["input_ids"]), device=inputs[name].device).unsqueeze(1) < fresh
    return {**inputs, name: torch.where(mask, inputs[name], ignored)}


def _fresh_rows(loader: Any, rows: int) -> int:
    """How many of this process's `rows` in the last batch are not repeats (they come first); ≤ 0 if all are."""
    sampler = loader.batch_sampler
    while isinstance(sampler, SkipBatchSampler):  # in a resumed run
        sampler = sampler.batch_sampler
    if not isinstance(sampler, BatchSamplerShard) or sampler.split_batches or sampler.drop_last:
        return rows
    left_over = len(sampler.batch_sampler.sampler) % (sampler.batch_size * sampler.num_processes)
    return left_over - sampler.batch_size * sampler.process_index if left_over else rows


@dataclass(frozen=True)
class EvenCollator:
    """Wraps `collator` and fills its batches up to a multiple of `processes` rows."""

    collator: Any
    processes: int

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        missing = -len(rows) % self.processes
        batch = self.collator([*rows, *[rows[0]] * missing])
        return _learning(batch, len(rows)) if missing else batch
