"""What a row asks a model: the assistant's turns in a chat, and the token ids before each."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specheads.data.chat_template import ChatTemplate
from specheads.data.images import (
    ImageError,
    NoImages,
    Stored,
    is_image_part,
    processor_of,
    read_text,
    store_image,
    take_images,
    tokenizer_of,
    written,
)
from specheads.data.row_forms import TOOL_ROLES, Message, parse_messages, tools_of, without_none


@dataclass(frozen=True)
class Conversation:
    """A chat without its answers. turns: the messages before each answer; the last is a user's or tool's.

    If a turn starts with assistant messages, these replace the model's answer to the turn before.
    template: further variables of the chat template, such as {"enable_thinking": False}. images: those that the parts
    {"type": "image"} of the turns stand for, in order.
    """

    turns: tuple[tuple[Message, ...], ...]
    tools: list[Any] | None = None
    template: Mapping[str, Any] | None = None
    images: tuple[Stored, ...] = ()

    @classmethod
    def from_messages(cls, messages: Any, tools: Any = None, *, images: Sequence[Any] | None = None) -> Conversation:
        """From a row's columns; images: its column of them, empty without one, or None where images are refused.

        The assistant is asked after each user message and each run of tool results.

        The row's answers are dropped, except messages that are followed by tool results: these stay, with calls and
        reasoning, because a data set's tools cannot be run again. The model still answers that turn, so that its own
        call can be learnt, but the chat continues with the row's call. Raises ValueError for malformed messages.
        """
        sources: list[Any] = []
        if images is not None:
            messages, sources = take_images(messages, {"images": images})
        turns: list[tuple[Message, ...]] = []
        turn: list[Message] = []
        answer: list[Message] = []  # the assistant's messages since the last message of anyone else
        for message in parse_messages(without_none(messages)):
            is_result = message["role"] in TOOL_ROLES
            if turn and turn[-1]["role"] in TOOL_ROLES and not is_result:
                turns.append(tuple(turn))
                turn = []
            if message["role"] == "assistant":
                if sources and any(map(is_image_part, message.get("content") or ())):
                    raise ImageError("an answer holds an image, and the base answers in text")
                answer.append(dict(message))
                continue
            if "content" not in message:
                raise ValueError(f"message {message!r:.80}: expected a dict with 'role' and 'content'")
            turn += [*answer, dict(message)] if is_result else [dict(message)]
            answer = []
            if message["role"] == "user":
                turns.append(tuple(turn))
                turn = []
        if turn and turn[-1]["role"] in TOOL_ROLES:
            turns.append(tuple(turn))
        return cls(tuple(turns), tools_of({"tools": tools}), images=tuple(map(store_image, sources)))

    @classmethod
    def from_text(cls, text: str) -> Conversation:
        """The text as the only message of the user."""
        return cls(turns=(({"role": "user", "content": text},),))

    @property
    def num_turns(self) -> int:
        return len(self.turns)

    @property
    def key(self) -> str:
        """A key that is equal for conversations that ask the same, up to Unicode composition and outer white space."""
        asked = [_normal(self.turns), _normal(self.tools), *map(written, self.images)]
        return json.dumps(asked, sort_keys=True, default=str)

    def with_template(self, template: Mapping[str, Any] | None) -> Conversation:
        return replace(self, template=template)

    def keeps_call(self, turn: int) -> bool:
        """Whether the row's own message replaces the model's answer to this turn in later prompts."""
        return turn + 1 < len(self.turns) and self.turns[turn + 1][0]["role"] == "assistant"

    def messages(self, answers: Sequence[str]) -> list[Message]:
        """The messages before the next answer, given the answers to earlier turns."""
        messages: list[Message] = []
        for turn, answer in enumerate(answers):
            messages += self.turns[turn]
            if not self.keeps_call(turn):
                messages.append({"role": "assistant", "content": answer})
        return [*messages, *self.turns[len(answers)]]

    def text(self, messages: Sequence[Message], tokenizer: Any, *, generation_prompt: bool) -> str:
        """The messages as the chat template writes them. ValueError if there is no template or it refuses them."""
        template = ChatTemplate(tokenizer, self.tools, self.template or {})
        return template.text(messages, generation_prompt=generation_prompt)

    def shown(self, answers: Sequence[str]) -> list[Stored]:
        """The images before the next answer."""
        if not self.images:
            return []
        contents = (message.get("content") for message in self.messages(answers))
        parts = [part for content in contents if isinstance(content, (list, tuple)) for part in content]
        return list(self.images[: sum(map(is_image_part, parts))])

    def prompt(self, answers: Sequence[str], processing: Any) -> list[int]:
        """Token ids before the next answer, including the generation prompt, given the answers to earlier turns.

        processing: the tokenizer, or the processor, which images need. Raises ValueError if the tokenizer has no chat
        template, or one that refuses these messages.
        """
        tokenizer, processor = tokenizer_of(processing), processor_of(processing)
        text = self.text(self.messages(answers), tokenizer, generation_prompt=True)
        if images := self.shown(answers):
            if processor is None:
                raise NoImages("the question shows images, and there is a tokenizer alone: give the processor")
            return read_text(processor, text, images).ids
        # The template already writes the special tokens; the model has never seen a second bos.
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _normal(value: Any) -> Any:
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value).strip()
    if isinstance(value, Mapping):
        return {key: _normal(item) for key, item in value.items()}
    return [_normal(item) for item in value] if isinstance(value, (list, tuple)) else value
