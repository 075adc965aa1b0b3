"""Where training rows come from: files, folders, the hub, memory → datasets of token ids and labels.

V vocabulary. What becomes of one row is in rows.py.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specheads import hub
from specheads.data import row_forms
from specheads.data.config import DataConfig
from specheads.data.rows import IGNORED, Collator, Row, chunk, pack, tokenize, truncate

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = [
    "IGNORED", "Collator", "DataConfig", "Row", "build_datasets", "chunk", "load_dataset_rows", "pack", "token_counts",
    "tokenize", "truncate",
]  # fmt: skip

_log = logging.getLogger(__name__)
_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}
_PACK_ROWS = 1000  # rows packed together: enough that little is wasted, few enough that the order stays


# -------------------------------------------------------------------------------------------------------------- loading


def load_dataset_rows(
    source: Any,
    split: str = "train",
    *,
    subset: str | None = None,
    text_column: str = "text",
    messages_column: str = "messages",
    prompt_column: str | None = None,
) -> Dataset:
    """The rows of `source` (see DataConfig.train). A .txt file is one row; JSON and Parquet hold one row per record.

    Raises FileNotFoundError for what is not there, ValueError for what is empty, of an unknown kind or without a
    text, messages, input_ids or (where one is named) prompt column.
    """
    import datasets

    name = f"the {type(source).__name__} given"
    if isinstance(source, (str, os.PathLike)):
        source = [source]
    if isinstance(source, (list, tuple)) and source and all(isinstance(s, (str, os.PathLike)) for s in source):
        name = ", ".join(map(str, source[:3])) + (", …" if len(source) > 3 else "")
        rows = _load_named([os.path.expanduser(s) for s in source], split, subset, text_column)
    elif isinstance(source, (datasets.Dataset, datasets.DatasetDict)):
        rows = _pick_split(source, split, name)
    elif isinstance(source, Iterable) and not isinstance(source, Mapping):
        listed = list(source)
        if bad := [row for row in listed if not isinstance(row, Mapping)]:
            raise ValueError(f"a row is {bad[0]!r:.80}: expected a dict with {text_column!r} or {messages_column!r}")
        rows = datasets.Dataset.from_list(listed)
    else:
        raise ValueError(f"cannot read rows from {name}: expected a path, a hub id, a Dataset or dicts")
    if len(rows) == 0:
        raise ValueError(f"{name} holds no rows: expected at least one")
    known = {text_column, messages_column, prompt_column, "input_ids"} & set(rows.column_names)
    if not known and not row_forms.is_chat(rows.column_names):
        prompt = f"{prompt_column!r} (a prompt), " if prompt_column else ""
        raise ValueError(
            f"{name} has columns {rows.column_names}: expected {prompt}{text_column!r} (text) or "
            f"{messages_column!r} (chat), 'conversations' (ShareGPT), 'instruction' and 'output' (Alpaca), or "
            "'input_ids'; name yours with text_column or messages_column"
        )
    return rows


def _load_named(names: list[str], split: str, subset: str | None, text_column: str) -> Dataset:
    """Saved folder, hub id, or files of one kind."""
    import datasets

    if len(names) == 1 and os.path.isdir(names[0]):
        held = sorted(os.listdir(names[0]))
        if not {"state.json", "dataset_dict.json"} & set(held):
            raise ValueError(
                f"folder {names[0]} holds {held[:8]}: expected what save_to_disk wrote; "
                f"for loose files give a glob such as '{names[0]}/*.jsonl'"
            )
        return _pick_split(datasets.load_from_disk(names[0]), split, names[0])
    if len(names) == 1 and not _is_path(names[0]):
        hub.options(names[0], "dataset")  # FileNotFoundError at once, where there is none
        try:
            return datasets.load_dataset(names[0], subset, split=split)
        except (FileNotFoundError, ConnectionError) as error:
            raise FileNotFoundError(
                f"{names[0]!r} is no file or folder here, and as a hub dataset it did not load: {error}"
            ) from error
    files: list[str] = []
    for name in names:
        found = sorted(glob.glob(name, recursive=True)) if glob.has_magic(name) and not os.path.exists(name) else [name]
        if not found or not all(os.path.isfile(file) for file in found):
            hint = hub.did_you_mean(name) or f" (looked from {os.getcwd()})"
            raise FileNotFoundError(f"no file {name!r}{hint}")
        files += found
    for file in files:
        if Path(file).suffix.lower() not in _FORMATS:
            raise ValueError(f"{file}: extension {Path(file).suffix!r} is unknown; expected one of {sorted(_FORMATS)}")
        if os.path.getsize(file) == 0:
            raise ValueError(f"{file} is empty: expected at least one row")
    kinds = {_FORMATS[Path(file).suffix.lower()] for file in files}
    if len(kinds) > 1:
        raise ValueError(f"files of several kinds {sorted(kinds)} in {names[0]}, …: give files of one kind")
    kind = kinds.pop()
    options = {"sample_by": "document"} if kind == "text" else {}
    told = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(logging.CRITICAL)  # it logs what it then raises
    try:
        rows = datasets.load_dataset(kind, data_files=files, split="train", **options)
    except (ValueError, datasets.exceptions.DatasetGenerationError) as error:
        wrong = broken_line(files) if kind == "json" else None
        said = wrong or f"{names[0]} holds no rows that read as {kind}: {error.__cause__ or error}"
        raise ValueError(said) from error
    finally:
        datasets.logging.set_verbosity(told)
    return rows.rename_column("text", text_column) if kind == "text" and text_column != "text" else rows


def broken_line(files: Sequence[str]) -> str | None:
    """What is wrong with the first line that is no JSON object, by file and line number; None where all lines are.

    A .json file may be one value over many lines instead.
    """
    for file in files:
        try:
            text = Path(file).read_text("utf8")
        except UnicodeDecodeError as error:
            return f"{file} is not UTF-8 text: {error}"
        whole = Path(file).suffix.lower() == ".json" and text.lstrip()[:1] == "["
        for number, line in [(1, text)] if whole else enumerate(text.split("\n"), start=1):
            try:
                if line.strip() and not isinstance(found := json.loads(line), list if whole else dict):
                    return f"{file}, line {number}: {found!r:.60} is no object; expected {{…}} on each line"
            except json.JSONDecodeError as error:
                at = number + error.lineno - 1
                return f"{file}, line {at} is not JSON: {error.msg} (column {error.colno})"
    return None


def _pick_split(loaded: Any, split: str, name: str) -> Dataset:
    if not isinstance(loaded, dict):
        return loaded
    if split not in loaded:
        raise ValueError(f"{name} has splits {sorted(loaded)}: no split {split!r}")
    return loaded[split]


def _is_path(name: str) -> bool:
    """Whether `name` must be a file: it exists, it is a glob, it has a file's extension or is no 'owner/name'."""
    looks_like_id = re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) is not None
    suffixes = {*_FORMATS, ".csv", ".tsv", ".gz", ".zst", ".xz", ".zip", ".arrow", ".md", ".py"}
    return os.path.exists(name) or not looks_like_id or Path(name).suffix.lower() in suffixes


# ------------------------------------------------------------------------------------------------------------- datasets


def build_datasets(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[Dataset, Dataset | None]:
    """(train, eval or None), tokenized, cut and, with packing, packed. The same for a seed, whatever num_proc is.

    A held-out row is held out whole. Rows with nothing to learn are dropped with a warning that counts them; raises
    ValueError if all are.
    """
    names = ("subset", "text_column", "messages_column")
    columns = {name: getattr(config, name) for name in names}
    train, evaluation = load_dataset_rows(config.train, config.split, **columns), None
    kept: Sequence[int] = range(len(train))
    held_out: Sequence[int] = ()
    draw = random.Random(config.seed)
    if config.max_samples is not None and config.max_samples < len(train):
        kept = sorted(draw.sample(kept, config.max_samples))
    if config.eval is not None:
        evaluation = load_dataset_rows(config.eval, config.eval_split, **columns)
        held_out = range(len(evaluation))
    elif config.eval_fraction:
        count = max(1, round(len(kept) * config.eval_fraction))
        if count >= len(kept):
            raise ValueError(
                f"eval_fraction={config.eval_fraction} of {len(kept)} rows leaves none to train on: "
                "give eval=…, or more rows (a .txt file is one row)"
            )
        chosen = set(draw.sample(range(len(kept)), count))
        held_out = [row for i, row in enumerate(kept) if i in chosen]
        kept = [row for i, row in enumerate(kept) if i not in chosen]
        evaluation = train
    return _prepare(train, kept, "train", config, tokenizer), (
        None if evaluation is None else _prepare(evaluation, held_out, "eval", config, tokenizer)
    )


def _prepare(
    rows: Dataset, chosen: Sequence[int], name: str, config: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> Dataset:
    """The chosen rows, ready. ValueError names a row that makes no sense by its number, from 1."""
    known_columns = (config.text_column, config.messages_column, "tools", "input_ids", "labels", *row_forms.COLUMNS)
    rows = rows.select_columns([c for c in known_columns if c in rows.column_names])
    if len(chosen) < len(rows):
        rows = rows.select(chosen)
    options: dict[str, Any] = {"batched": True, "remove_columns": rows.column_names, "num_proc": config.num_proc}
    known = {"tokenizer": tokenizer, "config": config}
    try:
        done = rows.map(_tokenize_rows, with_indices=True, fn_kwargs=known, desc=f"tokenize {name}", **options)
    except _BadRow as error:
        index, reason = error.args
        source = config.train if name == "train" or config.eval is None else config.eval
        where = f" of {source}" if isinstance(source, (str, os.PathLike)) else f" of {name}"
        raise ValueError(f"row {chosen[index] + 1}{where}: {reason}") from error
    kept = done.filter(_supervised, input_columns="labels", num_proc=config.num_proc, desc=f"check {name}")
    if len(kept) == 0:
        raise ValueError(
            f"none of the {len(done)} rows of {name} has a token to learn from: expected text, or assistant turns "
            f"inside max_length={config.max_length}"
        )
    if len(kept) < len(done):
        _log.warning("%s: dropped %d of %d rows with no token to learn from", name, len(done) - len(kept), len(done))
    if not config.packing:
        return kept
    # One process: packing is a list copy, and the sequences then do not depend on num_proc
    known = {"max_length": config.max_length}
    return kept.map(_pack_rows, fn_kwargs=known, batched=True, batch_size=_PACK_ROWS, desc=f"pack {name}")


class _BadRow(ValueError):
    """Its index among the rows mapped, and what is wrong with it."""


def _rows_of(columns: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    """datasets' batch, columns, as rows."""
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _columns_of(rows: Sequence[Row]) -> dict[str, list]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def _tokenize_rows(
    columns: Mapping[str, list[Any]], indices: Sequence[int], tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> dict[str, list]:
    made: list[Row] = []
    for index, row in zip(indices, _rows_of(columns), strict=True):
        try:
            made += chunk(tokenize(row, tokenizer, config), config.max_length, tokenizer)
        except row_forms.MissingTemplate:
            raise
        except ValueError as error:
            raise _BadRow(index, str(error)) from error
    return _columns_of(made)


def _pack_rows(columns: Mapping[str, list[Any]], max_length: int) -> dict[str, list]:
    rows: Any = _rows_of(columns)
    return _columns_of(pack(rows, max_length))


def _supervised(labels: Sequence[int]) -> bool:
    return any(label != IGNORED for label in labels)


def token_counts(dataset: Iterable[Mapping[str, Any]], vocab_size: int) -> Tensor:
    """How often each token is supervised in the dataset: (V,) int64. Raises ValueError for a label outside V."""
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
