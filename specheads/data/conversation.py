"""What a row asks a model: the assistant's turns in a chat, and the token ids before each."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specheads.data.chat_template import ChatTemplate
from specheads.data.row_forms import TOOL_ROLES, Message, parse_messages, tools_of, without_none


@dataclass(frozen=True)
class Conversation:
    """A chat without its answers. turns: the messages before each answer; the last is a user's or tool's.

    If a turn starts with assistant messages, these replace the model's answer to the turn before.
    template: further variables of the chat template, such as {"enable_thinking": False}.
    """

    turns: tuple[tuple[Message, ...], ...]
    tools: list[Any] | None = None
    template: Mapping[str, Any] | None = None

    @classmethod
    def from_messages(cls, messages: Any, tools: Any = None) -> Conversation:
        """From a row's columns. The assistant is asked after each user message and each run of tool results.

        The row's answers are dropped, except messages that are followed by tool results: these stay, with calls and
        reasoning, because a data set's tools cannot be run again. The model still answers that turn, so that its own
        call can be learnt, but the chat continues with the row's call. Raises ValueError for malformed messages.
        """
        turns: list[tuple[Message, ...]] = []
        turn: list[Message] = []
        answer: list[Message] = []  # the assistant's messages since the last message of anyone else
        for message in parse_messages(without_none(messages)):
            is_result = message["role"] in TOOL_ROLES
            if turn and turn[-1]["role"] in TOOL_ROLES and not is_result:
                turns.append(tuple(turn))
                turn = []
            if message["role"] == "assistant":
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
        return cls(tuple(turns), tools_of({"tools": tools}))

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
        return json.dumps([_normal(self.turns), _normal(self.tools)], sort_keys=True, default=str)

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

    def prompt(self, answers: Sequence[str], tokenizer: Any) -> list[int]:
        """Token ids before the next answer, including the generation prompt, given the answers to earlier turns.

        Raises ValueError if the tokenizer has no chat template, or one that refuses these messages.
        """
        text = self.text(self.messages(answers), tokenizer, generation_prompt=True)
        # The template already writes the special tokens; the model has never seen a second bos.
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _normal(value: Any) -> Any:
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value).strip()
    if isinstance(value, Mapping):
        return {key: _normal(item) for key, item in value.items()}
    return [_normal(item) for item in value] if isinstance(value, (list, tuple)) else value
