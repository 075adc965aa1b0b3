"""Converts chats in the forms of data sets, such as ShareGPT's and Alpaca's, to messages with role and content."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, TypeGuard

from specheads.options import refuse_unknown

Message = dict[str, Any]
TOOL_ROLES = frozenset({"tool", "function", "ipython", "observation"})  # roles of a tool's result in various templates
ROLES = ("system", "developer", "user", "assistant", *sorted(TOOL_ROLES))
# Role names of ShareGPT and similar forms; function_call is a call by the assistant.
_NAMES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant", "function_call": "assistant", "function_response": "tool",
}  # fmt: skip
COLUMNS = ("conversations", "instruction", "input", "output", "history", "system")


class RowError(ValueError):
    """A row that nothing can be learnt from. reason: its kind, by which such rows are counted."""

    reason = "malformed"


class Dropped:
    """Rows left out. str() says how many for which reason, and the number and fault of the first with each."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def add(self, reason: str, number: int, fault: str = "") -> None:
        """number: of the row, from 1."""
        self.counts[reason] += 1
        self._first.setdefault(reason, f"row {number}" + (f": {fault}" if fault else ""))

    @property
    def total(self) -> int:
        return self.counts.total()

    def __str__(self) -> str:
        return "; ".join(
            f"{count:,} {reason} (the first is {self._first[reason]})" for reason, count in self.counts.most_common()
        )


def reason_of(error: ValueError) -> str:
    """The kind of fault of a row, by which it is counted."""
    return error.reason if isinstance(error, RowError) else RowError.reason


def is_chat(columns: Collection[str]) -> bool:
    """Whether rows with these columns hold chats in ShareGPT's or Alpaca's form."""
    return "conversations" in columns or {"instruction", "output"} <= set(columns)


def messages_of(row: Mapping[str, Any], column: str = "messages", text_column: str = "text") -> Any:
    """The messages of a row: those in `column`, else in `conversations` (ShareGPT), else made from instruction, input
    and output (Alpaca) unless one of these is the text_column; None if there are none. The latter two forms may also
    have a system column, and the last one history, pairs of earlier questions and answers. ValueError for an Alpaca row
    whose columns are not text."""
    if (messages := row.get(column)) is not None:
        return messages
    if (messages := row.get("conversations")) is None:
        if row.get("instruction") is None or row.get("output") is None or text_column in COLUMNS:
            return None
        asked = [row["instruction"], *([part] if (part := row.get("input")) else [])]
        pairs = [*(row.get("history") or ()), ("\n".join(map(_text, asked)), row["output"])]
        if odd := [pair for pair in pairs if not isinstance(pair, (list, tuple)) or len(pair) != 2]:
            raise ValueError(f"history holds {odd[0]!r:.80}: expected pairs of what was asked and answered")
        messages = [
            {"role": role, "content": _text(text)}
            for pair in pairs
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
    system = row.get("system")
    return [{"role": "system", "content": system}, *messages] if isinstance(system, str) and system else messages


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"instruction, input, output or history holds {value!r:.80}: expected text")
    return value


def parse_messages(messages: Any, known: Collection[str] = ROLES) -> list[Message]:
    """Messages with `role` and `content`, from any of the known forms. Raises ValueError for anything else and, with
    the number of the message, for an unknown role or content other than text or parts of text."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ValueError(f"messages={messages!r:.80}: expected a list of {{'role': …, 'content': …}}")
    parsed = [_parse_message(message, number, known) for number, message in enumerate(messages, start=1)]
    for number, message in enumerate(parsed, start=1):
        _refuse_no_text(message, number)
    return parsed


def _parse_message(message: Any, number: int, known: Collection[str]) -> Message:
    if not isinstance(message, Mapping) or not ({"role", "from"} & message.keys()):
        raise ValueError(f"message {message!r:.80}: expected a dict with 'role' and 'content', or 'from' and 'value'")
    rest = dict(message)
    is_sharegpt = "role" not in rest
    original = role = rest.pop("from" if is_sharegpt else "role")
    if not is_sharegpt and role in known:
        return dict(message)
    if is_sharegpt and "value" in rest:
        rest["content"] = rest.pop("value")
    elif is_sharegpt and "content" not in rest:
        raise ValueError(f"message {message!r:.80}: expected a dict with 'from' and 'value'")
    if role not in known and isinstance(role, str):
        role = _NAMES.get(role.lower(), role.lower() if role.lower() in known else role)
    try:
        refuse_unknown([role], [*known, *_NAMES], "role")
    except ValueError as error:
        raise ValueError(f"message {number}: {error}") from error
    if is_sharegpt and original == "function_call" and (call := _parse_call(rest["content"])) is not None:
        rest |= {"content": "", "tool_calls": [{"type": "function", "function": call}]}
    return {"role": role, **rest}


def _parse_call(text: Any) -> dict[str, Any] | None:
    """A tool call written as JSON; None for other text."""
    try:
        call = json.loads(text) if isinstance(text, str) else text
    except json.JSONDecodeError:
        return None
    return dict(call) if isinstance(call, Mapping) and {"name", "arguments"} <= call.keys() else None


def _refuse_no_text(message: Message, number: int) -> None:
    content = message.get("content")
    if content is None or isinstance(content, str) or is_parts(content):
        return
    if message["role"] in TOOL_ROLES:  # some templates write tool results as JSON
        return
    raise ValueError(
        f"message {number}: its content is {content!r:.80}: expected text, or a list of {{'type': 'text', 'text': …}}"
    )


def is_text_parts(content: Any) -> TypeGuard[list[Any]]:
    return isinstance(content, (list, tuple)) and all(
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    )


def is_parts(content: Any) -> TypeGuard[list[Any]]:
    """Parts of text, and {"type": "image"} where an image is, as `images.take_images` leaves them."""
    return isinstance(content, (list, tuple)) and all(
        is_text_parts([part]) or (isinstance(part, Mapping) and dict(part) == {"type": "image"}) for part in content
    )


def tools_of(row: Mapping[str, Any]) -> list[Any] | None:
    """The tools of a row, a list or JSON; None without any. ValueError for other text."""
    tools = row.get("tools")
    return without_none(json.loads(tools) if isinstance(tools, str) else tools) or None


def without_none(value: Any) -> Any:
    """The value without keys whose value is None, in nested dicts and lists."""
    # Arrow gives every struct the fields of all rows, None where a row had none: templates would print them.
    if isinstance(value, Mapping):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, (list, tuple)) else value
