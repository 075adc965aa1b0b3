"""What a row asks a model: the user's turns of a chat, each as the token ids that stand in front of its answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from specheads.rows import without_none

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """A chat without its answers. turns: the messages in front of each answer, the last of them the user's."""

    turns: tuple[tuple[Message, ...], ...]
    tools: list[Any] | None = None

    @classmethod
    def of(cls, messages: Any, tools: Any = None) -> Conversation:
        """Of a row's columns, whose assistant messages are left out; no turns where the user says nothing.

        Ends in front of the first tool message: the model that is asked may not have made the call it answers.
        Raises ValueError for what are no messages.
        """
        if not isinstance(messages, (list, tuple)) or not messages:
            raise ValueError(f"messages={messages!r:.80}: expected a list of {{'role': …, 'content': …}}")
        turns: list[tuple[Message, ...]] = []
        turn: list[Message] = []
        for message in without_none(messages):
            if not isinstance(message, Mapping) or "role" not in message:
                raise ValueError(f"message {message!r:.80}: expected a dict with 'role'")
            if message["role"] == "tool":
                break
            if message["role"] == "assistant":
                continue
            if "content" not in message:
                raise ValueError(f"message {message!r:.80}: expected a dict with 'role' and 'content'")
            turn.append(dict(message))
            if message["role"] == "user":
                turns.append(tuple(turn))
                turn = []
        return cls(tuple(turns), without_none(json.loads(tools) if isinstance(tools, str) else tools) or None)

    @classmethod
    def of_text(cls, text: str) -> Conversation:
        """The text as the only message of the user."""
        return cls(turns=(({"role": "user", "content": text},),))

    @property
    def num_turns(self) -> int:
        return len(self.turns)

    def prompt(self, answers: Sequence[str], tokenizer: Any) -> list[int]:
        """Token ids in front of the next answer, where the earlier turns got `answers`, generation prompt included.

        Raises ValueError where the tokenizer has no chat template, or one that refuses these messages.
        """
        if not tokenizer.chat_template:
            raise ValueError(f"the tokenizer {tokenizer.name_or_path!r} has no chat template: give rows of 'prompt'")
        messages: list[Message] = []
        for turn, answer in zip(self.turns, answers, strict=False):
            messages += [*turn, {"role": "assistant", "content": answer}]
        messages += self.turns[len(answers)]
        try:
            text = tokenizer.apply_chat_template(messages, tools=self.tools, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            said = f"{messages[0]!r:.80}, …" if len(messages) > 1 else f"{messages[0]!r:.80}"
            raise ValueError(f"the chat template refuses {said}: {error}") from error
        # The template writes the special tokens: a second bos would be none the model has seen.
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
