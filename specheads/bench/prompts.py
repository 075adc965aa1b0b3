"""Prompts to measure on: from the held-out files of the standard library, or from a file of one's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specheads.data import corpus
from specheads.data.conversation import Conversation
from specheads.data.row_forms import messages_of


def held_out_prompts(tokenizer: Any, count: int, num_tokens: int = 64, held_out: list[str] | None = None) -> list[str]:
    """`count` texts of about `num_tokens` tokens out of as many held-out files, each from the start of a line a third
    of the way in. The same for the same files; ValueError where too few files are long enough."""
    usable: list[str] = []
    for _, text in corpus.texts("held_out", held_out):
        start = text.find("\n", len(text) // 3) + 1
        # 12 characters a token is more than code has, so the piece is long enough where the file is.
        ids = tokenizer(text[start : start + 12 * num_tokens])["input_ids"][:num_tokens]
        if start and len(ids) == num_tokens:
            usable.append(tokenizer.decode(ids, skip_special_tokens=True))
    if len(usable) < count:
        raise ValueError(f"{count} prompts asked for, but only {len(usable)} held-out files are long enough")
    return [usable[i * len(usable) // count] for i in range(count)]


def prompts_from(path: Path, count: int | None = None, *, chat: bool = False) -> list[str | Conversation]:
    """Prompts of a .jsonl file (each line a string, or an object with `messages` or another form of chat, `prompt` or
    `text`), else one a line.

    `messages` are asked up to the first turn of the user; chat: the other prompts are such a turn too. OSError for a
    file that cannot be read, ValueError with the line for one that makes no sense.
    """
    prompts: list[str | Conversation] = []
    try:
        lines = path.read_text("utf8").split("\n")  # and not at U+2028, which JSON may hold
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if path.suffix in (".jsonl", ".json"):
            try:
                prompt = _asked(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
        else:
            prompt = line
        prompts.append(Conversation.from_text(prompt) if chat and isinstance(prompt, str) else prompt)
    if not prompts:
        raise ValueError(f"{path} holds no prompts; expected one a line")
    return prompts[:count]


def _asked(value: Any) -> str | Conversation:
    messages = None
    if isinstance(value, dict) and (value.get("prompt") is None or value.get("messages") is not None):
        messages = messages_of(value)
    if messages is not None:
        conversation = Conversation.from_messages(messages, value.get("tools"))
        if not conversation.turns:
            raise ValueError("expected a message of the user among the messages")
        return conversation
    if isinstance(value, dict):
        value = value["prompt"] if value.get("prompt") is not None else value.get("text")
    if not isinstance(value, str) or not value:
        raise ValueError("expected a string, or an object with 'messages', 'prompt' or 'text'")
    return value
