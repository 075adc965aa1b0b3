"""Loads rows from files, folders, the hub or memory into one datasets.Dataset, and checks its columns."""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specheads.data import row_forms
from specheads.hub import did_you_mean, hub_options
from specheads.options import require_packages

if TYPE_CHECKING:
    from datasets import Dataset

_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}


def load_dataset_rows(
    source: Any,
    split: str = "train",
    *,
    subset: str | None = None,
    text_column: str = "text",
    messages_column: str = "messages",
    prompt_column: str | None = None,
) -> Dataset:
    """The rows of `source` (see DataConfig.train). A .txt file is one row; JSON and Parquet have one row per record.

    Raises FileNotFoundError for a source that does not exist, ValueError for one that is empty, of an unknown kind or
    without a text, messages, input_ids or (if named) prompt column.
    """
    require_packages("train", "datasets")
    import datasets

    files = source_name(source)
    name = files or f"the {type(source).__name__} given"
    if isinstance(source, (str, os.PathLike)):
        source = [source]
    if files is not None:
        rows = _load_named([os.path.expanduser(s) for s in source], split, subset, text_column)
    elif isinstance(source, (datasets.Dataset, datasets.DatasetDict)):
        rows = _pick_split(source, split, name)
    elif isinstance(source, Iterable) and not isinstance(source, Mapping):
        listed = list(source)
        if bad := [row for row in listed if not isinstance(row, Mapping)]:
            raise ValueError(f"a row is {bad[0]!r:.80}: expected a dict with {text_column!r} or {messages_column!r}")
        names = dict.fromkeys(name for row in listed for name in row)
        columns = {name: _in_parts([row.get(name) for row in listed]) for name in names}
        rows = datasets.Dataset.from_dict(columns)
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


def _in_parts(column: list[Any]) -> list[Any]:
    """A column of messages in parts alone if some content is: a column cannot hold text beside them."""

    def is_chat(value: Any) -> bool:
        return isinstance(value, (list, tuple)) and all(isinstance(message, Mapping) for message in value)

    def part(message: Mapping[str, Any]) -> Mapping[str, Any]:
        text = message.get("content")
        return {**message, "content": [{"type": "text", "text": text}]} if isinstance(text, str) else message

    if not any(isinstance(m.get("content"), (list, tuple)) for chat in filter(is_chat, column) for m in chat):
        return column
    return [[part(message) for message in value] if is_chat(value) else value for value in column]


def _load_named(names: list[str], split: str, subset: str | None, text_column: str) -> Dataset:
    """The rows of a saved folder, a hub id, or files of one kind."""
    import datasets

    if len(names) == 1 and os.path.isdir(names[0]):
        entries = sorted(os.listdir(names[0]))
        if not {"state.json", "dataset_dict.json"} & set(entries):
            raise ValueError(
                f"folder {names[0]} holds {entries[:8]}: expected what save_to_disk wrote; "
                f"for loose files give a glob such as '{names[0]}/*.jsonl'"
            )
        return _pick_split(datasets.load_from_disk(names[0]), split, names[0])
    if len(names) == 1 and not _is_path(names[0]):
        hub_options(names[0], "dataset")  # FileNotFoundError at once if it does not exist
        try:
            return datasets.load_dataset(names[0], subset, split=split)
        except (FileNotFoundError, ConnectionError) as error:
            raise FileNotFoundError(
                f"{names[0]!r} is no file or folder here, and as a hub dataset it did not load: {error}"
            ) from error
    files: list[str] = []
    for name in names:
        matches = (
            sorted(glob.glob(name, recursive=True)) if glob.has_magic(name) and not os.path.exists(name) else [name]
        )
        if not matches or not all(os.path.isfile(file) for file in matches):
            hint = did_you_mean(name) or f" (looked from {os.getcwd()})"
            raise FileNotFoundError(f"no file {name!r}{hint}")
        files += matches
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
    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(logging.CRITICAL)  # it would log the errors that it also raises
    try:
        rows = datasets.load_dataset(kind, data_files=files, split="train", **options)
    except (ValueError, datasets.exceptions.DatasetGenerationError) as error:
        reason = undecodable_line(files) or (broken_line(files) if kind == "json" else None)
        reason = reason or f"{names[0]} holds no rows that read as {kind}: {error.__cause__ or error}"
        raise ValueError(reason) from error
    finally:
        datasets.logging.set_verbosity(verbosity)
    return rows.rename_column("text", text_column) if kind == "text" and text_column != "text" else rows


def source_name(source: Any) -> str | None:
    """The name of a source in error messages; None for rows in memory."""
    if isinstance(source, (str, os.PathLike)):
        return str(source)
    if isinstance(source, (list, tuple)) and source and all(isinstance(s, (str, os.PathLike)) for s in source):
        return ", ".join(map(str, source[:3])) + (", …" if len(source) > 3 else "")
    return None


@contextlib.contextmanager
def naming_undecodable_lines(source: Any) -> Iterator[None]:
    """In the block, bytes in `source` that are not UTF-8 raise ValueError with their file and line."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(undecodable_line(source) or f"{source_name(source)} is not UTF-8 text: {error}") from error


def undecodable_line(source: Any) -> str | None:
    """A message with the file and number of the first line that is not UTF-8, in JSON or text files; None if none."""
    names = [source] if isinstance(source, (str, os.PathLike)) else list(source)
    for name in map(os.path.expanduser, names):
        for file in [name] if os.path.isfile(name) else sorted(glob.glob(name, recursive=True)):
            if _FORMATS.get(Path(file).suffix.lower()) not in ("json", "text"):
                continue
            with open(file, "rb") as lines:
                for number, line in enumerate(lines, start=1):
                    try:
                        line.decode("utf8")
                    except UnicodeDecodeError as error:
                        byte = f"byte {line[error.start]:#04x} at column {error.start + 1}"
                        return f"{file}, line {number}: {byte} is not UTF-8; save the file as UTF-8"
    return None


def broken_line(files: Sequence[str]) -> str | None:
    """A message with the file and number of the first line that is not a JSON object; None if all lines are objects.

    A .json file may instead be a single value over many lines.
    """
    for file in files:
        text = Path(file).read_text("utf8")
        whole = Path(file).suffix.lower() == ".json" and text.lstrip()[:1] == "["
        for number, line in [(1, text)] if whole else enumerate(text.split("\n"), start=1):
            try:
                if line.strip() and not isinstance(value := json.loads(line), list if whole else dict):
                    return f"{file}, line {number}: {value!r:.60} is no object; expected {{…}} on each line"
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
    """Whether `name` must be a file: it exists, is a glob, has a file extension, or does not look like 'owner/name'."""
    looks_like_id = re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) is not None
    suffixes = {*_FORMATS, ".csv", ".tsv", ".gz", ".zst", ".xz", ".zip", ".arrow", ".md", ".py"}
    return os.path.exists(name) or not looks_like_id or Path(name).suffix.lower() in suffixes
