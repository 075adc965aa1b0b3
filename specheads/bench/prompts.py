"""Prompts for benchmarks: from the standard library's held-out files, from installed packages, or from a file."""

from __future__ import annotations

import gzip
import importlib.util
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from specheads.data import corpus
from specheads.data.conversation import Conversation
from specheads.data.row_forms import messages_of
from specheads.data.sources import undecodable_line

T = TypeVar("T")

PACKAGES = ("rich", "click", "markdown_it", "pygments", "typer", "httpx2")  # nothing here is ever trained on these

QUESTIONS = ("prompt", "question", "problem", "text")  # keys of a row's question: HumanEval, GSM8K, MATH, MBPP


@dataclass(frozen=True)
class Prompt:
    """A text, its token ids or a conversation, and its category, as given by its file or package."""

    asked: str | list[int] | Conversation
    category: str | None = None


def held_out_prompts(tokenizer: Any, count: int, num_tokens: int = 64, held_out: list[str] | None = None) -> list[str]:
    """`count` texts of about `num_tokens` tokens, each from a different held-out file, starting with a line a third of
    the way in. The same for the same files; ValueError if too few files are long enough."""
    usable = _pieces(tokenizer, (text for _, text in corpus.texts("held_out", held_out)), num_tokens)
    if len(usable) < count:
        raise ValueError(f"{count} prompts asked for, but only {len(usable)} held-out files are long enough")
    return evenly_spaced(usable, count)


def package_prompts(
    tokenizer: Any, count: int, num_tokens: int = 64, packages: Iterable[str] = PACKAGES
) -> tuple[list[Prompt], list[str]]:
    """`count` such texts from the source of installed packages, in equal shares as far as their files suffice, and the
    names of the packages that are not installed. A prompt's category is its package.

    ValueError if too few files are long enough."""
    pieces: dict[str, list[str]] = {}
    missing = []
    for name in packages:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            missing.append(name)
            continue
        files = sorted(Path(spec.submodule_search_locations[0]).rglob("*.py"))
        pieces[name] = _pieces(tokenizer, filter(None, map(corpus.read_text, files)), num_tokens)
    total = sum(map(len, pieces.values()))
    if total < count:
        without = f"; not installed: {', '.join(missing)}" if missing else ""
        raise ValueError(
            f"{count} prompts asked for, but only {total} files of installed packages are long enough" + without
        )
    shares = dict.fromkeys(pieces, 0)
    while sum(shares.values()) < count:
        for name in shares:
            if shares[name] < len(pieces[name]) and sum(shares.values()) < count:
                shares[name] += 1
    chosen = [Prompt(text, name) for name, share in shares.items() for text in evenly_spaced(pieces[name], share)]
    return chosen, missing


def _pieces(tokenizer: Any, texts: Iterable[str], num_tokens: int) -> list[str]:
    """From each text that is long enough: `num_tokens` tokens, starting with a line a third of the way in."""
    pieces = []
    for text in texts:
        start = text.find("\n", len(text) // 3) + 1
        # Code has fewer than 12 characters per token, so this much text suffices if the file is long enough.
        ids = tokenizer(text[start : start + 12 * num_tokens])["input_ids"][:num_tokens]
        if start and len(ids) == num_tokens:
            pieces.append(tokenizer.decode(ids, skip_special_tokens=True))
    return pieces


def evenly_spaced(items: Sequence[T], count: int | None) -> list[T]:
    """At most `count` of the items, evenly spaced, including the first. None: all."""
    return [items[i] for i in spaced_indices(len(items), count)]


def spaced_indices(size: int, count: int | None) -> list[int]:
    """At most `count` of the indices below `size`, evenly spaced. None: all."""
    count = size if count is None else min(count, size)
    return [i * size // count for i in range(count)]


def read_prompts(path: Path, count: int | None = None, *, chat: bool = False) -> list[Prompt]:
    """Prompts from a .jsonl file (each line a string, or an object with `messages` or another form of chat, `turns` as
    in Spec-Bench, MT-bench and SPEED-Bench, `prompt` as in HumanEval, `question` as in GSM8K, `problem` as in MATH, or
    `text` as in MBPP), or from a text file, one per line. It may be gzipped. If the name does not tell, as for a pipe,
    the first line does: a JSON object or a plain prompt.

    `messages` and `turns` become conversations; chat: other prompts become one of a single turn. A `category` is kept.
    OSError if the file cannot be read; ValueError, with the line, if a line cannot be used.
    """
    prompts: list[Prompt] = []
    try:
        whole = path.read_bytes()
        text = (gzip.decompress(whole) if path.suffix.lower() == ".gz" else whole).decode("utf-8-sig")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is no whole gzip file: {error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(undecodable_line(path) or f"{path} is not UTF-8 text: {error}") from error
    lines = text.replace("\r\n", "\n").split("\n")  # not at U+2028, which JSON strings may contain
    is_json = _is_json(path, lines)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        asked: str | Conversation = line
        category = None
        if is_json:
            try:
                value = json.loads(line)
                asked = _asked(value)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            category = value.get("category") if isinstance(value, dict) else None
        if chat and isinstance(asked, str):
            asked = Conversation.from_text(asked)
        prompts.append(Prompt(asked, None if category is None else str(category)))
    if not prompts:
        raise ValueError(f"{path} holds no prompts; expected one a line")
    return prompts[:count]


def _is_json(path: Path, lines: Iterable[str]) -> bool:
    name = path.name.lower().removesuffix(".gz")
    if name.endswith((".jsonl", ".json", ".txt")):
        return not name.endswith(".txt")
    try:
        return isinstance(json.loads(next(filter(str.strip, lines), "")), dict)
    except ValueError:
        return False


def _asked(value: Any) -> str | Conversation:
    messages = None
    if isinstance(value, dict) and (value.get("prompt") is None or value.get("messages") is not None):
        messages = messages_of(value)
    if messages is not None:
        conversation = Conversation.from_messages(messages, value.get("tools"))
        if not conversation.turns:
            raise ValueError("expected a message of the user among the messages")
        return conversation
    if isinstance(value, dict) and value.get("turns") is not None and value.get("prompt") is None:
        turns = value["turns"]
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
            raise ValueError(f"turns={turns!r:.80}: expected a list of the user's questions")
        return Conversation.from_messages([{"role": "user", "content": turn} for turn in turns])
    if isinstance(value, dict):
        value = next((value[name] for name in QUESTIONS if value.get(name) is not None), None)
    if not isinstance(value, str) or not value:
        raise ValueError(f"expected a string, or an object with 'messages', 'turns' or one of {', '.join(QUESTIONS)}")
    return value
