"""Writes chats with a tokenizer's template, whatever forms of content and calls the template takes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from specheads.data.row_forms import Message, RowError, is_text_parts
from specheads.options import shown

_Written = TypeVar("_Written")
_READS_PARTS = re.compile(r"""['"]text['"]""")  # a part's type or key, as a template refers to it
_READS_TEXT_TOO = re.compile(r"\bis\s+(?:not\s+)?(?:string|iterable|mapping)\b")
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class MissingTemplate(ValueError):
    """The tokenizer has no chat template, so no chat can be tokenized."""


class TemplateRefusal(RowError):
    """The chat template refuses a chat."""

    reason = "refused by the chat template"


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template. variables: further variables of it, such as {"enable_thinking": False}."""

    tokenizer: Any
    tools: list[Any] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def source(self) -> str:
        return template_of(self.tokenizer, self.tools)

    @property
    def marks_answers(self) -> bool:
        """Whether the template itself says what the assistant generates."""
        return _GENERATION_MARK.search(self.source) is not None

    def text(self, messages: Sequence[Message], *, generation_prompt: bool = False) -> str:
        """The messages as text. TemplateRefusal, a ValueError, if the template does not take them."""

        def write(taken: list[Message]) -> str:
            return str(
                self.tokenizer.apply_chat_template(
                    taken, tools=self.tools, tokenize=False, add_generation_prompt=generation_prompt, **self.variables
                )
            )

        return self._as_taken(messages, write)

    def text_and_marks(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """The messages as text, and the spans of characters that the template marks as generated."""

        def write(taken: list[Message]) -> Any:
            known: dict[str, Any] = {**self.tokenizer.special_tokens_map, "tools": self.tools, **self.variables}
            return render_jinja_template([taken], return_assistant_tokens_mask=True, chat_template=self.source, **known)

        (text,), (marks,) = self._as_taken(messages, write)
        return text, marks

    def _as_taken(self, messages: Sequence[Message], write: Callable[[list[Message]], _Written]) -> _Written:
        """Most templates take a call's arguments as a dict, as servers pass them; DeepSeek-V3's join them to text."""
        try:
            try:
                return write([for_template(message, self.source) for message in messages])
            except TypeError:
                return write([for_template(message, self.source, arguments=_as_json) for message in messages])
        except (TemplateError, TypeError) as error:  # TypeError: content that is not text
            first = f"{messages[0]!r:.80}, …" if len(messages) > 1 else f"{messages[0]!r:.80}"
            raise TemplateRefusal(f"the chat template refuses {first}: {error}") from error


def template_of(tokenizer: Any, tools: Any = None) -> str:
    """The tokenizer's chat template. MissingTemplate, which says where to put one, if it has none."""
    if not getattr(tokenizer, "chat_template", None):
        raise MissingTemplate(
            f"the tokenizer {shown(str(tokenizer.name_or_path))} has no chat template, in which messages are written: "
            "put that of the model it belongs to into its folder, as chat_template.jinja, or give rows of text"
        )
    return str(tokenizer.get_chat_template(tools=tools))


def _as_dict(arguments: Any) -> Any:
    """A call's arguments as a dict, if they are one in JSON. (OpenAI's format and most data have them so; most
    templates would write the string in quotes.)"""
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except json.JSONDecodeError:
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _as_json(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _reads_parts_alone(template: str) -> bool:
    return _READS_PARTS.search(template) is not None and _READS_TEXT_TOO.search(template) is None


def for_template(message: Message, template: str, arguments: Callable[[Any], Any] = _as_dict) -> Message:
    """The message in the form that this template expects.

    Parts of text are joined by newlines, as vLLM does, unless the template reads parts itself; text is a part if it
    reads nothing else, as Llava's. Content that is null or absent, as beside calls, is empty text. arguments: what a
    call's arguments become.
    """
    content = message.get("content")
    if content is None:
        message = {**message, "content": ""}
    elif is_text_parts(content) and not _READS_PARTS.search(template):
        message = {**message, "content": "\n".join(part["text"] for part in content)}
    if isinstance(content := message.get("content"), str) and _reads_parts_alone(template):
        message = {**message, "content": [{"type": "text", "text": content}]}
    if not isinstance(calls := message.get("tool_calls"), list):
        return message
    parsed = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and "arguments" in function:
            call = {**call, "function": {**function, "arguments": arguments(function["arguments"])}}
        parsed.append(call)
    return {**message, "tool_calls": parsed}
