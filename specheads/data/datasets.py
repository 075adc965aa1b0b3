"""Turns rows of any source into datasets of token ids and labels, for training and evaluation. V vocabulary."""

from __future__ import annotations

import logging
import random
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specheads.data import chat_template, images, row_forms, spans
from specheads.data import rows as rows_code
from specheads.data.batches import Collator, pack
from specheads.data.chat_template import MissingTemplate
from specheads.data.config import DataConfig
from specheads.data.row_forms import Dropped, reason_of
from specheads.data.rows import IGNORED, TOKEN_COLUMNS, Row, chunk, tokenize, truncate
from specheads.data.sources import load_dataset_rows, naming_undecodable_lines, source_name
from specheads.options import OptionError

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = [
    "IGNORED", "Collator", "DataConfig", "Row", "build_datasets", "chunk", "load_dataset_rows", "pack", "token_counts",
    "tokenize", "truncate",
]  # fmt: skip

_log = logging.getLogger(__name__)
NOTHING_TO_LEARN = "without a token to learn from"
_PACK_ROWS = 1000  # rows packed at a time: enough to waste little space, few enough to keep rows roughly in order


def build_datasets(
    config: DataConfig, tokenizer: Any, vocab_size: int | None = None,
    stop_ids: Collection[int] = (),
) -> tuple[Dataset, Dataset | None]:  # fmt: skip
    """(train, eval or None), tokenized, cut and, with packing, packed. The same for a given seed, whatever num_proc is.

    tokenizer: the base's, or its processor, which rows with images need. vocab_size: of the base; stop_ids: see
    `tokenize`. Rows are held out whole. Rows that are malformed, that the chat
    template refuses, whose answers are uncertain or that have no supervised token are dropped, with a warning that
    counts them by reason. Raises ValueError if all are, and for a row with tokens that the base lacks.
    """
    names = ("subset", "text_column", "messages_column")
    columns = {name: getattr(config, name) for name in names}
    train, evaluation = load_dataset_rows(config.train, config.split, **columns), None
    chosen: Sequence[int] = range(len(train))
    held_out: Sequence[int] = ()
    draw = random.Random(config.seed)
    if config.max_samples is not None and config.max_samples < len(train):
        chosen = sorted(draw.sample(chosen, config.max_samples))
    if config.eval is not None:
        evaluation = load_dataset_rows(config.eval, config.eval_split, **columns)
        held_out = range(len(evaluation))
    elif config.eval_fraction:
        count = max(1, round(len(chosen) * config.eval_fraction))
        if count >= len(chosen):
            raise ValueError(
                f"eval_fraction={config.eval_fraction} of {len(chosen)} rows leaves none to train on: "
                "give eval=…, or more rows (a .txt file is one row)"
            )
        indices = set(draw.sample(range(len(chosen)), count))
        held_out = [row for i, row in enumerate(chosen) if i in indices]
        chosen = [row for i, row in enumerate(chosen) if i not in indices]
        evaluation = train
    known = {
        "tokenizer": images.tokenizer_of(tokenizer), "config": config, "vocab_size": vocab_size,
        "stop_ids": sorted(stop_ids), "code": _code(), "processor": images.processor_of(tokenizer),
    }  # fmt: skip
    return _prepare(train, chosen, "train", config, known), (
        None if evaluation is None else _prepare(evaluation, held_out, "eval", config, known)
    )


def _prepare(rows: Dataset, chosen: Sequence[int], name: str, config: DataConfig, known: dict[str, Any]) -> Dataset:
    """The chosen rows, ready to train on. known: arguments of `_tokenize_rows`. ValueError, with the row's number
    (counted from 1), for a row of another base."""
    import datasets

    known_columns = {
        config.text_column,
        config.messages_column,
        "tools",
        *row_forms.COLUMNS,
        *images.COLUMNS,
        "input_ids",
        *TOKEN_COLUMNS,
    }
    rows = rows.select_columns([c for c in rows.column_names if c in known_columns])
    if len(chosen) < len(rows):
        rows = rows.select(chosen)
    ids, text = datasets.List(datasets.Value("int64")), datasets.Value("string")
    columns = {"input_ids": ids, "labels": ids, "row": datasets.Value("int64"), "dropped": text, "fault": text}
    if known["processor"] is not None:
        stored = {"bytes": datasets.Value("binary"), "path": text}
        columns |= {"images": datasets.List(stored), images.TYPES: datasets.List(datasets.Value("int8"))}
    options: dict[str, Any] = {
        "batched": True, "remove_columns": rows.column_names, "num_proc": config.num_proc,
        "features": datasets.Features(columns),
    }  # fmt: skip
    source = source_name(config.train if name == "train" or config.eval is None else config.eval)
    try:
        with naming_undecodable_lines(config.train if name == "train" or config.eval is None else config.eval):
            done = rows.map(_tokenize_rows, with_indices=True, fn_kwargs=known, desc=f"tokenize {name}", **options)
    except _OtherBase as error:
        index, reason = error.args
        raise ValueError(f"row {chosen[index] + 1} of {source or name}: {reason}") from error
    kept = done.filter(_is_kept, input_columns="dropped", num_proc=config.num_proc, desc=f"check {name}")
    if len(kept) < len(done):
        left_out, dropped = done.filter(_is_dropped, input_columns="dropped", desc=f"count {name}"), Dropped()
        for row in left_out.select_columns(["row", "dropped", "fault"]):
            dropped.add(row["dropped"], chosen[row["row"]] + 1, row["fault"])
        where = f"{name} ({source})" if source else name
        if len(kept) == 0:
            raise ValueError(f"none of the {len(done)} rows of {where} can be learnt from: {dropped}")
        _log.warning("%s: dropped %d of %d rows: %s", where, dropped.total, len(done), dropped)
    kept = kept.remove_columns(["row", "dropped", "fault"])
    if "images" in kept.column_names:
        if not any(map(len, kept.select_columns(images.TYPES)[images.TYPES])):
            kept = kept.remove_columns(["images", images.TYPES])
        elif config.packing:
            raise OptionError("{packing}: rows with images are not packed; leave it out", packing=True)
    if not config.packing:
        return kept
    # One process, so that sequences do not depend on num_proc; packing only copies lists.
    length = {"max_length": config.max_length}
    return kept.map(_pack_rows, fn_kwargs=length, batched=True, batch_size=_PACK_ROWS, desc=f"pack {name}")


class _OtherBase(ValueError):
    """A row with tokens that the base lacks: its index among the rows mapped, and the reason."""


def _rows_of(columns: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    """A batch of the datasets library, which is in columns, as rows."""
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def _code() -> str:
    """A digest of the code that makes rows. The datasets library caches a function's results under its name alone, and
    would otherwise reuse those of another version."""
    parts = (rows_code, row_forms, chat_template, spans, images)
    return f"{zlib.crc32(b''.join(Path(str(part.__file__)).read_bytes() for part in parts)):08x}"


def _tokenize_rows(
    columns: Mapping[str, list[Any]], indices: Sequence[int], tokenizer: Any, config: DataConfig,
    vocab_size: int | None, stop_ids: Collection[int], code: str, processor: Any,
) -> dict[str, list]:  # fmt: skip
    """Tokenize a batch of rows; one that is dropped keeps its reason and fault. code: see `_code`; part of the cache
    key, otherwise unused."""
    tokenized: list[dict[str, Any]] = []
    none: Row = {} if processor is None else {"images": [], images.TYPES: []}  # of a row of text
    for index, row in zip(indices, _rows_of(columns), strict=True):
        try:
            tokens = none | tokenize(row, tokenizer, config, stop_ids, processor)
            parts = chunk(tokens, config.max_length, tokenizer)
        except MissingTemplate:
            raise
        except ValueError as error:
            nothing: Row = {"input_ids": [], "labels": []}
            tokenized.append({**nothing, **none, "row": index, "dropped": reason_of(error), "fault": str(error)})
            continue
        try:
            refuse_unknown_ids(tokens["input_ids"], vocab_size)
        except ValueError as error:
            raise _OtherBase(index, str(error)) from error
        for part in parts:
            learnt = any(label != IGNORED for label in part["labels"])
            fault = "" if learnt else f"expected text, or assistant turns inside max_length={config.max_length}"
            tokenized.append(
                {**none, **part, "row": index, "dropped": "" if learnt else NOTHING_TO_LEARN, "fault": fault}
            )
    return _columns_of(tokenized)


def refuse_unknown_ids(ids: Sequence[int], vocab_size: int | None) -> None:
    """ValueError for a token for which the base has no embedding."""
    if vocab_size is None or not ids:
        return
    for worst in (min(ids), max(ids)):
        if not 0 <= worst < vocab_size:
            raise ValueError(
                f"token {worst} is outside the base's vocabulary of {vocab_size}: give the tokens of this base, or its "
                "tokenizer"
            )


def _pack_rows(columns: Mapping[str, list[Any]], max_length: int) -> dict[str, list]:
    rows: Any = _rows_of(columns)
    return _columns_of(pack(rows, max_length))


def _is_kept(dropped: str) -> bool:
    return not dropped


def _is_dropped(dropped: str) -> bool:
    return bool(dropped)


def token_counts(dataset: Iterable[Mapping[str, Any]], vocab_size: int) -> Tensor:
    """How often each token is supervised in the dataset: (V,) int64. ValueError for a label outside the vocabulary."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for labels in _label_batches(dataset):
        labels = labels[labels != IGNORED]
        if labels.numel() and not 0 <= (worst := int(labels[labels.argmax()])) < vocab_size:
            raise ValueError(f"label {worst} is outside vocab_size={vocab_size}: give the base model's vocabulary size")
        counts += torch.bincount(labels, minlength=vocab_size)
    return counts


def _label_batches(dataset: Iterable[Mapping[str, Any]], num_rows: int = 1000) -> Iterator[Tensor]:
    held: list[int] = []
    for i, row in enumerate(dataset, start=1):
        held.extend(row["labels"])
        if i % num_rows == 0:
            yield torch.tensor(held, dtype=torch.int64)
            held = []
    yield torch.tensor(held, dtype=torch.int64)
