"""A server's answer → token ids: those it sent if it did, else its text through the base's tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig

from specheads.data.conversation import TOOL_ROLES, Conversation, Message
from specheads.decoding.drafters.retokenize import encode_after
from specheads.hub import hub_options
from specheads.models.base.loading import stop_ids
from specheads.training.self_distill.local import prompt_room
from specheads.training.self_distill.options import Options

_REASONING = ("reasoning_content", "reasoning")  # as servers call it; templates read one of these and `thinking`
_ENDED = {"stop": True, "tool_calls": True, "function_call": True, "length": False}


class Refused(ValueError):
    """One question has no usable answer; the others are unaffected."""


@dataclass(frozen=True)
class Reply:
    """prompt, new: token ids; `new` includes the end of text if the answer has ended. text: for the history.

    last: the reason why the chat cannot continue after this answer, if it cannot.
    """

    prompt: list[int]
    new: list[int]
    text: str = ""
    last: str = ""


class Replies:
    """Answers → token ids. Counts answers that came only as text, and prompts that the server rendered differently."""

    def __init__(self, options: Options, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        config = _config(options.base)
        self.prompt_room = prompt_room(config, options)
        self.ends = stop_ids(options.base, config, tokenizer, **hub_options(options.base))
        self.vocab_size = max(len(tokenizer), getattr(config, "vocab_size", None) or 0)
        self.count = self.as_text = self.other_prompts = 0

    def read_chat(
        self, choice: dict[str, Any], question: Conversation, history: Sequence[Message], prompt: list[int]
    ) -> Reply:
        """The answer to a chat. prompt: as rendered by the template of --base. Refused if the ids are uncertain."""
        message, ended = choice["message"], _ended(choice)
        text, calls = message.get("content") or "", _calls(message)
        reasoning = next((message[name] for name in _REASONING if message.get(name)), "")
        ids, written, end = self._sent_ids(choice, text), None, self.tokenizer.eos_token_id
        if not ids or (ended and ids[-1] not in self.ends):
            written, end = self._rendered(question, history, text, reasoning, calls)
        if ids is not None:
            prompt = self._server_prompt(choice, prompt)
        elif not reasoning and not calls:
            # Verbatim after the prompt, since a template may trim it or put something before it.
            ids = encode_after(self.tokenizer, question.text(history, self.tokenizer, generation_prompt=True), text)
        elif written is None:
            raise Refused(
                "the chat template does not write the answer's reasoning or calls after its prompt, and the server "
                "sends no token ids: use one that does (return_token_ids of vLLM and SGLang), or switch off its "
                "parsers"
            )
        elif not ended:
            raise Refused("the answer was cut inside its reasoning or a call, and the server sends no token ids")
        else:
            ids = written
        last = ""
        if calls:
            last = "the answer before it calls a tool, and the data has no result of that call"
        elif not ended and not text:
            last = "the answer before it was cut inside its reasoning"
        return Reply(prompt, self._with_end(ids, choice, ended, end), text, last)

    def read_text(self, choice: dict[str, Any], prompt: list[int]) -> Reply:
        text = choice.get("text") or ""
        ids = self._sent_ids(choice, text)
        if ids is None:
            ids = encode_after(self.tokenizer, self.tokenizer.decode(prompt, skip_special_tokens=False), text)
        return Reply(prompt, self._with_end(ids, choice, _ended(choice), self.tokenizer.eos_token_id))

    def summary(self) -> str:
        """How many answers or prompts may not be exactly what the server had."""
        notes = []
        if self.as_text:
            notes.append(f"{self.as_text} of {self.count} answers came as text alone and were tokenized here")
        if self.other_prompts:
            notes.append(
                f"{self.other_prompts} of {self.count} prompts are rendered differently by the server than by the chat "
                "template of --base: the server's were kept"
            )
        return "; ".join(notes)

    def _sent_ids(self, choice: dict[str, Any], text: str) -> list[int] | None:
        """The answer's ids as the server sent them, None if it did not. Refused if they are not this tokenizer's."""
        self.count += 1
        ids = choice.get("token_ids")
        if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
            self.as_text += 1
            return None
        spelled = self.tokenizer.decode(ids) if all(0 <= token < self.vocab_size for token in ids) else ""
        # White space is ignored, since servers trim it; texts that were cut inside a character are not compared.
        if "\ufffd" not in text and "".join(text.split()) not in "".join(spelled.split()):
            raise Refused(
                f"its token ids spell {spelled!r:.60} here, not {text!r:.60}: is --base the model that is served?"
            )
        return list(ids)

    def _server_prompt(self, choice: dict[str, Any], prompt: list[int]) -> list[int]:
        """The prompt's ids as the server sent them, if it did: it may use another template."""
        sent = choice.get("prompt_token_ids") or prompt
        self.other_prompts += sent != prompt
        if not all(isinstance(token, int) and 0 <= token < self.vocab_size for token in sent):
            raise Refused(f"its prompt has token ids from {self.vocab_size} on: is --base the model that is served?")
        return list(sent)

    def _rendered(
        self, question: Conversation, history: Sequence[Message], text: str, reasoning: str, calls: list[Any]
    ) -> tuple[list[int] | None, int | None]:
        """What the template writes for an answer after its prompt, and the end token; None if it drops parts of it."""
        before = question.text(history, self.tokenizer, generation_prompt=True)
        for name in (*_REASONING, "thinking") if reasoning else ("",):
            message: Message = {"role": "assistant", "content": text}
            message |= {name: reasoning} if reasoning else {}
            message |= {"tool_calls": calls} if calls else {}
            try:
                whole = question.text([*history, message], self.tokenizer, generation_prompt=False)
            except ValueError:
                continue
            written = whole[len(before) :]
            names = [str(call["function"].get("name")) for call in calls]
            if whole.startswith(before) and all(part.strip() in written for part in (reasoning, text, *names)):
                ids = encode_after(self.tokenizer, before, written)
                stop = next((i for i, token in enumerate(ids) if token in self.ends), len(ids))
                return ids[:stop], next(iter(ids[stop:]), self.tokenizer.eos_token_id)
        return None, self.tokenizer.eos_token_id

    def _with_end(self, ids: list[int], choice: dict[str, Any], ended: bool, end: int | None) -> list[int]:
        if ended and ids[-1:] != [end] and (not ids or ids[-1] not in self.ends):
            stops = [choice.get(name) for name in ("stop_reason", "matched_stop")]
            end = next((token for token in stops if isinstance(token, int) and token in self.ends), end)
            ids = ids if end is None else [*ids, end]
        if not ids:
            raise Refused("the answer is empty")
        return ids


def chat_request(question: Conversation, history: Sequence[Message]) -> dict[str, Any]:
    """A chat as fields of a request: calls get an id, a type and arguments as JSON, results the id of their call.

    Data written for chat templates usually lacks these.
    """
    sent, waiting, number = list[Message](), list[str](), 0
    for message in history:
        message = dict(message)
        if calls := message.get("tool_calls"):
            waiting, message["tool_calls"] = [], []
            for call in calls:
                function = call.get("function", call)
                arguments = function.get("arguments", {})
                text = arguments if isinstance(arguments, str) else json.dumps(arguments)
                waiting.append(call.get("id") or f"call{number:05d}")  # nine letters and digits, as Mistral requires
                number += 1
                message["tool_calls"].append({
                    "id": waiting[-1], "type": "function", "function": {"name": function.get("name"), "arguments": text}
                })  # fmt: skip
            message.setdefault("content", None)
        elif message["role"] in TOOL_ROLES:
            message["role"] = "tool"
            known = message.setdefault("tool_call_id", waiting[0] if waiting else f"call{max(0, number - 1):05d}")
            waiting = [one for one in waiting if one != known]
        sent.append(message)
    tools = [one if "function" in one else {"type": "function", "function": one} for one in question.tools or []]
    return {"messages": sent, "tools": tools or None, "chat_template_kwargs": question.template or None}


def _calls(message: Message) -> list[Any]:
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls
    ):
        raise Refused(f"tool_calls={calls!r:.80}: expected a list of {{'function': {{'name': …, 'arguments': …}}}}")
    return calls


def _ended(choice: dict[str, Any]) -> bool:
    reason = choice.get("finish_reason")
    if reason not in _ENDED:
        raise Refused(f"the answer ended with finish_reason {reason!r}: expected one of {', '.join(_ENDED)}")
    return _ENDED[reason]


def _config(base: str) -> Any:
    try:
        return AutoConfig.from_pretrained(base, **hub_options(base))
    except (OSError, ValueError):  # a folder with a tokenizer alone, or a model newer than transformers
        return None
