"""Finds what the assistant generates in a chat that a template wrote: the span of characters of each of its turns.

The template alone knows where a message is, and may write it otherwise once others follow: without its reasoning, say.
So each message gets a marker, a character that occurs nowhere else, inside its last word. Texts of the first messages
alone and of the whole chat are compared from a common marker on.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

from specheads.data.chat_template import ChatTemplate
from specheads.data.row_forms import Message, RowError, is_parts, is_text_parts

Span = tuple[int, int]
_MARKERS = range(0x20000, 0x2A6E0)  # rare CJK characters: printable, so that no template escapes them
_LAST_UNIT = re.compile(r"(?:<[^<>\s]*>|\[[^\[\]\s]*\]|/\w+|\S)$")  # templates look for tags and commands, whole
_LONGEST_UNIT = 80
_HALF_TAG = re.compile(r"[<\[][^<>\[\]]*$")


class UncertainSpans(RowError):
    """A chat whose answers cannot be told from the text around them."""

    reason = "with answers that cannot be told from the prompts for certain"


@dataclass(frozen=True)
class _Written:
    """A text without its markers, and where they were, by number: 2 i in message i's content, 2 i + 1 in its last call.
    -1 is at the start."""

    text: str
    at: Mapping[int, int]

    def after(self, marker: int) -> str:
        return self.text[self.at[marker] :] if marker in self.at else ""


def spans_of(messages: Sequence[Message], template: ChatTemplate, stops: Collection[str]) -> tuple[str, list[Span]]:
    """The chat as text, and what the assistant generates: the spans that the template marks, else one for each
    assistant turn but one that opens the chat, which answers no prompt.

    A span starts where the text leaves its prompt (the messages before, with the generation prompt), and ends with the
    turn's own end token, or after the text of a template that has none. One of `stops` that follows such a text belongs
    to it. UncertainSpans, a ValueError, if a span cannot be told for certain.
    """
    if template.marks_answers:
        text, marks = template.text_and_marks(messages)
        return text, [_to_end_of_turn(text, span, stops, specials_of(template.tokenizer)) for span in marks]
    chat = _Chat(messages, template)
    spans: list[Span] = []
    for i in range(1, len(messages)):
        if messages[i]["role"] == "assistant":
            start = chat.start(i)
            if spans and start < spans[-1][1]:
                raise chat.uncertain(i, "overlaps the one before")
            end = chat.end(i, start)
            is_closed = chat.whole.text[start:end].endswith(chat.specials)
            spans.append((start, end if is_closed else _stopped(chat.whole.text, end, stops)))
    return chat.whole.text, spans


def _stopped(text: str, end: int, stops: Collection[str]) -> int:
    """The end, after a stop that is written there."""
    return end + next((len(stop) for stop in stops if text.startswith(stop, end)), 0)


def _to_end_of_turn(text: str, span: Span, stops: Collection[str], specials: tuple[str, ...]) -> Span:
    """The marked span, after a stop that follows it and without white space after its last special token.

    The assistant emits the end of turn and stops there; the newline after it is the template's.
    """
    start, end = span[0], _stopped(text, span[1], stops)
    bare = text[start:end].rstrip()
    return (start, start + len(bare)) if bare.endswith(specials) else (start, end)


class _Chat:
    """A chat written in whole and in part, with markers. Turn i is that of message i."""

    def __init__(self, messages: Sequence[Message], template: ChatTemplate) -> None:
        self.template, self.specials = template, specials_of(template.tokenizer)
        text = template.text(messages)
        used = {*text, *str(messages)}
        self.markers = list(islice((mark for mark in map(chr, _MARKERS) if mark not in used), 2 * len(messages)))
        self._numbers = {marker: number for number, marker in enumerate(self.markers)}
        self._split = re.compile(f"[{''.join(self.markers)}]")
        for in_calls in (True, False):
            self.messages = [self._marked(message, i, in_calls) for i, message in enumerate(messages)]
            self.whole = self._written(len(messages))
            if self.whole.text == text:
                return
        raise UncertainSpans(
            "the chat template writes something else if a letter is added to a message, so the answers cannot be found "
            "for certain: put {% generation %} … {% endgeneration %} around them in the template"
        )

    def start(self, i: int) -> int:
        """Where the text leaves the prompt of turn i."""
        prompt = self._written(i, generation_prompt=True)
        marker = _last_common(prompt, self.whole, below=2 * i)
        shared, complete = _shared(prompt, self.whole, marker)
        if not complete:
            # Templates ask with <think>, say, and leave it out of the chat: but something that asks must be there.
            before = self._written(i)
            if marker not in before.at or shared <= _shared(prompt, before, marker)[0]:
                raise self.uncertain(i, "does not follow its prompt")
        return self.whole.at[marker] + shared

    def end(self, i: int, start: int) -> int:
        """Where turn i ends, with its end token."""
        is_last = i == len(self.messages) - 1
        done = self.whole if is_last else self._written(i + 1)
        follows = self.whole
        if is_last:  # what a template writes at the end of a chat is not the turn's: compare with another prompt there
            with suppress(ValueError):
                follows = self._written(i + 1, generation_prompt=True)
        marker = _last_common(done, follows, below=2 * i + 2)
        shared, complete = _shared(done, follows, marker)
        begin = self.whole.at[marker]
        closing = done.after(marker)[:shared]
        is_closed = closing.rstrip().endswith(self.specials)
        if not complete and not is_closed:
            closing = done.after(marker) if is_last else self._closing(i, marker)
        bare = closing.rstrip()
        end = begin + len(bare if bare.endswith(self.specials) else closing)
        if end < start or (end == start and not complete):
            raise self.uncertain(i, "is another one than without what follows")
        return end

    def _closing(self, i: int, marker: int) -> str:
        """The text from the marker to the end of turn i, of a template that ends turns otherwise at a chat's end: what
        it writes before another prompt, without that prompt."""
        roles = [message["role"] for message in self.messages]
        asked = next((k for k in range(i, 0, -1) if roles[k] == "assistant" != roles[k - 1]), i)
        prompt, before = self._written(asked, generation_prompt=True).text, self._written(asked).text
        asks = prompt[_shared_length(prompt, before) :]
        again = self._written(i + 1, generation_prompt=True)
        closing = again.after(marker).removesuffix(asks)
        if (
            not asks
            or (asks.startswith(self.specials) and not prompt.startswith(before))  # perhaps the end of the turn before
            or not again.text.endswith(asks)
            or marker not in again.at
            or not self.whole.after(marker).startswith(closing)
        ):
            raise self.uncertain(i, "ends otherwise than without what follows")
        return closing

    def uncertain(self, i: int, why: str) -> UncertainSpans:
        return UncertainSpans(
            f"message {i + 1}: as the chat template writes it, the answer {why}, so its tokens cannot be told for "
            "certain; put {% generation %} … {% endgeneration %} around answers in the template"
        )

    def _written(self, count: int, generation_prompt: bool = False) -> _Written:
        """The first `count` messages."""
        text = self.template.text(self.messages[:count], generation_prompt=generation_prompt)
        matches = list(self._split.finditer(text))
        names = [self._numbers[match[0]] for match in matches]
        at = {-1: 0}
        for before, (name, match) in enumerate(zip(names, matches, strict=True)):
            if names.count(name) == 1 or (name % 2 and name not in at):  # a call's name is repeated beside its result
                at[name] = match.start() - before
        return _Written(self._split.sub("", text), at)

    def _marked(self, message: Message, i: int, in_calls: bool) -> Message:
        content, calls = message.get("content"), message.get("tool_calls")
        if isinstance(content, str):
            message = {**message, "content": _with_marker(content, self.markers[2 * i])}
        elif content and is_parts(content):
            k = next((k for k in reversed(range(len(content))) if is_text_parts([content[k]])), None)
            if k is not None:
                text = {**content[k], "text": _with_marker(content[k]["text"], self.markers[2 * i])}
                message = {**message, "content": [*content[:k], text, *content[k + 1 :]]}
        if in_calls and isinstance(calls, list) and calls:
            *others, last = calls
            function = last.get("function", last) if isinstance(last, Mapping) else None
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                function = {**function, "name": _with_marker(function["name"], self.markers[2 * i + 1])}
                last = {**last, "function": function} if "function" in last else function
            message = {**message, "tool_calls": [*others, last]}
        return message


def _with_marker(text: str, marker: str) -> str:
    """The text with the marker in front of its last tag, command or character; the text itself if it is blank."""
    bare = text.rstrip()
    if (match := _LAST_UNIT.search(bare[-_LONGEST_UNIT:])) is None:
        return text
    position = max(0, len(bare) - _LONGEST_UNIT) + match.start()
    return text[:position] + marker + text[position:]


def _last_common(first: _Written, other: _Written, below: int) -> int:
    """The last marker under `below` that both texts have."""
    return max(marker for marker in first.at.keys() & other.at.keys() if marker < below)


def _shared(first: _Written, other: _Written, marker: int) -> tuple[int, bool]:
    """How many characters after the marker both texts share, and whether these are all that the first has."""
    a, b = first.after(marker), other.after(marker)
    shared = _shared_length(a, b)
    return shared, shared == len(a)


def _shared_length(a: str, b: str) -> int:
    """The length of the common prefix. If the texts part inside a tag, it ends before that: <| begins any tag."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle - 1)
    if low < min(len(a), len(b)) and (half := _HALF_TAG.search(a[:low])):
        return half.start()
    return low


def specials_of(tokenizer: Any) -> tuple[str, ...]:
    """The text of the tokenizer's special tokens."""
    return (*tokenizer.all_special_tokens, *_added_specials(tokenizer, len(tokenizer)))


@lru_cache(maxsize=8)
def _added_specials(tokenizer: Any, size: int) -> tuple[str, ...]:
    """size: of the tokenizer, which grows with added tokens. Thousands of them in Gemma's."""
    return tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
