"""Text or chat → token ids and labels, packed into sequences and collated into batches.

labels[t] == input_ids[t] where token t is supervised, else -100: Hugging Face's convention, indexed by the predicted
token itself. labels[0] of every document is -100, because nothing predicts it. B batch rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import difflib
import glob
import json
import logging
import os
import random
import re
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

if TYPE_CHECKING:
    from datasets import Dataset

IGNORED = -100
Row = dict[str, list[int]]
Span = tuple[int, int]

_log = logging.getLogger(__name__)
_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PACK_ROWS = 1000  # rows packed together: enough that little is wasted, few enough that the order stays


@dataclass(frozen=True)
class DataConfig:
    """What to train on. train, eval: path, list of paths, glob, saved dataset folder, hub id, Dataset or rows.

    max_length in tokens; max_samples in rows of train, drawn with `seed`; eval_fraction of the rows of train is held
    out when there is no eval. split, eval_split and subset are read for hub ids and saved folders only.
    """

    train: Any
    eval: Any = None
    split: str = "train"
    eval_split: str = "test"
    subset: str | None = None
    text_column: str = "text"
    messages_column: str = "messages"
    max_length: int = 2048
    packing: bool = False
    num_proc: int | None = None
    max_samples: int | None = None
    seed: int = 0
    eval_fraction: float = 0.0

    def __post_init__(self) -> None:
        if self.train is None or (isinstance(self.train, (str, list, tuple)) and not self.train):
            raise ValueError(f"train={self.train!r}: give a path, a list of paths, a glob, a hub dataset id or rows")
        for name, least in {"max_length": 2, "num_proc": 1, "max_samples": 1, "seed": 0}.items():
            value = getattr(self, name)
            if value is None and name in ("num_proc", "max_samples"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}={value!r}: expected a whole number of at least {least}")
        if self.packing not in (True, False):
            raise ValueError(f"packing={self.packing!r}: expected true or false")
        if not isinstance(self.eval_fraction, (int, float)) or not 0 <= self.eval_fraction < 1:
            raise ValueError(f"eval_fraction={self.eval_fraction!r}: expected a number in [0, 1)")
        if self.eval is not None and self.eval_fraction:
            raise ValueError(f"eval and eval_fraction={self.eval_fraction} are both given: keep one of the two")
        if self.text_column == self.messages_column:
            raise ValueError(f"text_column and messages_column are both {self.text_column!r}: they must differ")

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> DataConfig:
        """Raises ValueError for an unknown key, naming the nearest known one, and for a missing `train`."""
        known = [field.name for field in fields(cls)]
        for key in options:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"the options are {', '.join(known)}"
                raise ValueError(f"unknown data option {key!r}; {hint}")
        if "train" not in options:
            raise ValueError("data option 'train' is missing: give a path, a list of paths, a glob or a hub dataset id")
        return cls(**options)


# ---------------------------------------------------------------------------------------------------------- loading


def load_dataset_rows(
    source: Any,
    split: str = "train",
    *,
    subset: str | None = None,
    text_column: str = "text",
    messages_column: str = "messages",
) -> Dataset:
    """The rows of `source` (see DataConfig.train). A .txt file is one row; JSON and Parquet hold one row per record.

    Raises FileNotFoundError for what is not there, ValueError for what is empty, of an unknown kind or without a
    text or messages column.
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
    if not {text_column, messages_column} & set(rows.column_names):
        raise ValueError(
            f"{name} has columns {rows.column_names}: expected {text_column!r} (text) or "
            f"{messages_column!r} (chat); name yours with text_column or messages_column"
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
            raise FileNotFoundError(f"no file {name!r} (looked from {os.getcwd()})")
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
    try:
        rows = datasets.load_dataset(kind, data_files=files, split="train", **options)
    except (ValueError, datasets.exceptions.DatasetGenerationError) as error:
        raise ValueError(f"{names[0]} holds no rows that read as {kind}: {error.__cause__ or error}") from error
    return rows.rename_column("text", text_column) if kind == "text" and text_column != "text" else rows


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


# ------------------------------------------------------------------------------------------------------- tokenizing


def tokenize(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Row:
    """One row → input_ids, labels. Chat wins where a row has both columns, and is cut to max_length; text is not cut.

    Text: every token but the first is supervised; eos is appended. Chat: the assistant's tokens with their end of
    turn. A `tools` column goes to the template. Raises ValueError for a malformed row.
    """
    if (messages := row.get(config.messages_column)) is not None:
        return truncate(_tokenize_chat(messages, row.get("tools"), tokenizer), config.max_length, tokenizer)
    text = row.get(config.text_column)
    if text is None or not isinstance(text, str):
        raise ValueError(
            f"a row with columns {sorted(row)} has {config.text_column}={text!r:.60}: expected a string there, "
            f"or a list of messages in {config.messages_column!r}"
        )
    ids = list(tokenizer(text, verbose=False)["input_ids"])
    eos = tokenizer.eos_token_id
    if eos is not None and ids[-1:] != [eos]:
        ids.append(eos)
    return {"input_ids": ids, "labels": [IGNORED, *ids[1:]] if ids else []}


def _tokenize_chat(messages: Any, tools: Any, tokenizer: PreTrainedTokenizerBase) -> Row:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ValueError(f"messages={messages!r:.80}: expected a list of {{'role': …, 'content': …}}")
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message:
            raise ValueError(f"message {message!r:.80}: expected a dict with 'role' and 'content'")
    messages = _without_none(messages)
    tools = _without_none(json.loads(tools) if isinstance(tools, str) else tools) or None
    template = tokenizer.get_chat_template(tools=tools)
    if _GENERATION_MARK.search(template):
        known: dict[str, Any] = {**tokenizer.special_tokens_map, "tools": tools, "chat_template": template}
        rendered: Any = render_jinja_template([messages], return_assistant_tokens_mask=True, **known)
        (text,), (spans,) = rendered
    else:
        text, spans = _spans_by_rendering(messages, tools, tokenizer)
    spans = [_to_end_of_turn(text, start, end, tokenizer) for start, end in spans]
    ids, token_spans = _token_spans(text, spans, tokenizer)
    labels = [IGNORED] * len(ids)
    for first, stop in token_spans:
        labels[first:stop] = ids[first:stop]
    labels[:1] = [IGNORED] * len(labels[:1])
    return {"input_ids": ids, "labels": labels}


def _without_none(value: Any) -> Any:
    # Arrow gives every struct the fields of all rows, None where a row had none: templates would print them
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, (list, tuple)) else value


def _spans_by_rendering(messages: list[Any], tools: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[Span]]:
    """The conversation as text, and the characters of each assistant turn: what follows its generation prompt.

    An assistant turn that opens the conversation answers no prompt and is left out. Raises ValueError where the
    template renders a turn differently once others follow it.
    """

    def render(turns: list[Any], prompt: bool = False) -> str:
        return str(tokenizer.apply_chat_template(turns, tools=tools, tokenize=False, add_generation_prompt=prompt))

    text, spans = render(messages), []
    for i in range(1, len(messages)):
        if messages[i]["role"] != "assistant":
            continue
        prompt, done = render(messages[:i], prompt=True), render(messages[: i + 1])
        # Qwen3 drops the thinking of a turn once another follows: its end is then the first end of turn
        eos_at = text.find(tokenizer.eos_token, len(prompt)) if tokenizer.eos_token else -1
        if text.startswith(prompt) and text.startswith(done):
            spans.append((len(prompt), max(len(prompt), len(done))))
        elif text.startswith(prompt) and eos_at >= 0:
            spans.append((len(prompt), eos_at + len(tokenizer.eos_token)))
        else:
            same = len(os.path.commonprefix([text, prompt if not text.startswith(prompt) else done]))  # noqa: RUF071
            raise ValueError(
                f"the chat template renders the turns up to message {i} differently when the whole conversation is "
                f"there (from {text[same : same + 40]!r} on), so the assistant's tokens cannot be found: put "
                "{% generation %} … {% endgeneration %} around them in the template, or keep one assistant turn a row"
            )
    return text, spans


def _to_end_of_turn(text: str, start: int, end: int, tokenizer: PreTrainedTokenizerBase) -> Span:
    """The span with the eos that follows it and without the white space after its last special token.

    The assistant emits the end of turn and stops there; the newline after it is the template's.
    """
    if tokenizer.eos_token and text.startswith(tokenizer.eos_token, end):
        end += len(tokenizer.eos_token)
    bare = text[start:end].rstrip()
    return (start, start + len(bare)) if bare.endswith(tuple(tokenizer.all_special_tokens)) else (start, end)


def _token_spans(text: str, spans: list[Span], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[Span]]:
    """Ids of the text, and for each span of characters the tokens [first, stop) that touch it."""
    # Not apply_chat_template's own mask: where a tokenizer trims white space from its offsets (GPT-2, Llama 3) a turn
    # that starts with a space loses every later turn, and one that ends with a space takes in the user's (HF 5.23)
    if not tokenizer.is_fast:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        counts = {0: 0, len(text): len(ids)}
        for edge in {edge for span in spans for edge in span} - set(counts):
            head = tokenizer(text[:edge], add_special_tokens=False, verbose=False)["input_ids"]
            if ids[: len(head)] != head:
                raise ValueError(
                    f"{type(tokenizer).__name__} has no offsets and merges tokens across the edge of an assistant turn "
                    f"at {text[max(0, edge - 20) : edge + 20]!r}: use the fast tokenizer"
                )
            counts[edge] = len(head)
        return ids, [(counts[start], counts[end]) for start, end in spans]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts, ends = [list(edge) for edge in zip(*encoded["offset_mapping"], strict=True)] or ([], [])
    token_spans = []
    for start, end in spans:
        first, stop = bisect_left(ends, start + 1), bisect_left(ends, end + 1)
        if stop < len(ends) and starts[stop] < end:  # a token that crosses the end belongs to the turn
            stop += 1
        token_spans.append((first, stop))
    return encoded["input_ids"], token_spans


def truncate(row: Row, max_length: int, tokenizer: PreTrainedTokenizerBase) -> Row:
    """The row if it fits, else its last max_length tokens up to the last supervised one, behind its bos if any."""
    ids, labels = row["input_ids"], row["labels"]
    if len(ids) <= max_length:
        return row
    end = max((t + 1 for t, label in enumerate(labels) if label != IGNORED), default=len(ids))
    bos = _leading_bos(ids, tokenizer)
    start = max(0, end - max_length)
    return _spliced(ids, labels, start + len(bos), end, bos)


def chunk(row: Row, max_length: int, tokenizer: PreTrainedTokenizerBase) -> list[Row]:
    """A long text as consecutive rows of at most max_length tokens, each after the text's bos if it has one.

    The first token of a chunk is not supervised; a lone last token, which nothing predicts, is left out.
    """
    ids, labels = row["input_ids"], row["labels"]
    bos = _leading_bos(ids, tokenizer)
    step = max_length - len(bos)
    rows = [{"input_ids": ids[:max_length], "labels": labels[:max_length]}]
    for start in range(max_length, len(ids) - 1, step):
        rows.append(_spliced(ids, labels, start, start + step, bos))
    return rows


def _leading_bos(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    # Kept in front of a cut row: Llama and Gemma attend to it everywhere, and their features are off without it
    return ids[:1] if ids and ids[0] == tokenizer.bos_token_id else []


def _spliced(ids: list[int], labels: list[int], start: int, end: int, bos: list[int]) -> Row:
    return {"input_ids": bos + ids[start:end], "labels": [IGNORED] * (len(bos) + 1) + labels[start + 1 : end]}


# ---------------------------------------------------------------------------------------------- packing and batching


def pack(rows: Iterable[Row], max_length: int) -> list[Row]:
    """Rows → sequences of at most max_length tokens, each row in the fullest open sequence that still takes it.

    Adds document_ids (1, 1, 2, 2, 2, …) and position_ids, which restart with each document. The first token of a
    document is never supervised. Raises ValueError for a row longer than max_length.
    """
    sequences: list[Row] = []
    room: list[tuple[int, int]] = []  # (free tokens, sequence), sorted
    for row in rows:
        length = len(row["input_ids"])
        if length > max_length:
            raise ValueError(f"a row of {length} tokens does not fit max_length={max_length}: truncate or chunk first")
        at = bisect_left(room, (length, -1))
        if at < len(room):
            free, index = room.pop(at)
        else:
            free, index = max_length, len(sequences)
            sequences.append({"input_ids": [], "labels": [], "document_ids": [], "position_ids": []})
        into = sequences[index]
        document = into["document_ids"][-1] + 1 if into["document_ids"] else 1
        into["input_ids"] += row["input_ids"]
        into["labels"] += [IGNORED, *row["labels"][1:]][:length]
        into["document_ids"] += [document] * length
        into["position_ids"] += range(length)
        if free > length:
            insort(room, (free - length, index))
    return sequences


@dataclass(frozen=True)
class Collator:
    """Rows → a batch padded on the right to its longest row: int64 tensors, (B, T) each.

    input_ids, attention_mask (1 on tokens), labels (-100 on padding), position_ids, document_ids (0 on padding; 1 on
    the tokens of a row that was not packed). T is rounded up to pad_to_multiple_of.
    """

    pad_token_id: int
    pad_to_multiple_of: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.pad_token_id, int) or self.pad_token_id < 0:
            raise ValueError(f"pad_token_id={self.pad_token_id!r}: expected a token id; eos_token_id will do")
        if self.pad_to_multiple_of is not None and self.pad_to_multiple_of < 1:
            raise ValueError(f"pad_to_multiple_of={self.pad_to_multiple_of}: expected None or at least 1")

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        longest, multiple = max(len(row["input_ids"]) for row in rows), self.pad_to_multiple_of or 1
        width = -(-longest // multiple) * multiple
        padding = {
            "input_ids": self.pad_token_id,
            "attention_mask": 0,
            "labels": IGNORED,
            "position_ids": 0,
            "document_ids": 0,
        }
        batch = {name: torch.full((len(rows), width), value) for name, value in padding.items()}
        for b, row in enumerate(rows):
            length = len(row["input_ids"])
            ones, order = torch.ones(length, dtype=torch.int64), torch.arange(length)
            columns = {"attention_mask": ones, "position_ids": order, "document_ids": ones, **row}
            for name in padding:
                batch[name][b, :length] = torch.as_tensor(columns[name], dtype=torch.int64)
        return batch


# --------------------------------------------------------------------------------------------------------- datasets


def build_datasets(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[Dataset, Dataset | None]:
    """(train, eval or None), tokenized, cut and, with packing, packed. The same for a seed, whatever num_proc is.

    A held-out row is held out whole. Rows with nothing to learn are dropped with a warning that counts them; raises
    ValueError if all are.
    """
    names = ("subset", "text_column", "messages_column")
    columns = {name: getattr(config, name) for name in names}
    train, evaluation = load_dataset_rows(config.train, config.split, **columns), None
    draw = random.Random(config.seed)
    if config.max_samples is not None and config.max_samples < len(train):
        train = train.select(sorted(draw.sample(range(len(train)), config.max_samples)))
    if config.eval is not None:
        evaluation = load_dataset_rows(config.eval, config.eval_split, **columns)
    elif config.eval_fraction:
        count = max(1, round(len(train) * config.eval_fraction))
        if count >= len(train):
            raise ValueError(
                f"eval_fraction={config.eval_fraction} of {len(train)} rows leaves none to train on: "
                "give eval=…, or more rows (a .txt file is one row)"
            )
        held_out = set(draw.sample(range(len(train)), count))
        evaluation = train.select(sorted(held_out))
        train = train.select([i for i in range(len(train)) if i not in held_out])
    return _prepare(train, "train", config, tokenizer), (
        None if evaluation is None else _prepare(evaluation, "eval", config, tokenizer)
    )


def _prepare(rows: Dataset, name: str, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    rows = rows.select_columns(
        [c for c in (config.text_column, config.messages_column, "tools") if c in rows.column_names]
    )
    options: dict[str, Any] = {"batched": True, "remove_columns": rows.column_names, "num_proc": config.num_proc}
    known = {"function": _tokenize_rows, "tokenizer": tokenizer, "config": config}
    done = rows.map(_on_rows, fn_kwargs=known, desc=f"tokenize {name}", **options)
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
    known = {"function": pack, "max_length": config.max_length}
    return kept.map(_on_rows, fn_kwargs=known, batched=True, batch_size=_PACK_ROWS, desc=f"pack {name}")


def _on_rows(columns: Mapping[str, list[Any]], function: Callable[..., list[Row]], **known: Any) -> dict[str, list]:
    """datasets' batch (columns) → rows → function → columns."""
    rows = function(
        [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)], **known
    )
    return {name: [row[name] for row in rows] for name in rows[0]}


def _tokenize_rows(
    rows: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> list[Row]:
    return [part for row in rows for part in chunk(tokenize(row, tokenizer, config), config.max_length, tokenizer)]


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
