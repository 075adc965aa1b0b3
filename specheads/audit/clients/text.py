"""Servers that answer with text alone: any OpenAI-compatible one, and `transformers serve`. Greedy text only."""

from __future__ import annotations

import json
from typing import Any

from specheads.audit.clients.client import Answer
from specheads.audit.clients.http import HttpClient, ServerError
from specheads.audit.settings import Settings


class TextClient(HttpClient):
    """Sends and reads text by the base's tokenizer; refuses prompts and answers whose tokens the text does not tell.

    Sampled text is refused: which tokens wrote a text is not certain, and to leave out those in doubt would change the
    distribution. tokenizer: the base's.
    """

    route = "/v1/completions"

    def __init__(self, url: str, model: str, tokenizer: Any, **options: Any) -> None:
        super().__init__(url, **options)
        self.model, self.tokenizer = model, tokenizer

    def body(self, prompt: list[int], settings: Settings) -> dict[str, Any]:
        if not settings.greedy:
            raise ValueError(f"{self.url} answers with text, which does not tell sampled tokens: ask at temperature 0")
        if settings.penalised:
            raise ValueError(f"{settings}: penalties are not part of this route")
        text = self.tokenizer.decode(prompt, skip_special_tokens=True)
        if self.tokenizer(text)["input_ids"] != prompt:
            raise ValueError(f"the prompt {text[:40]!r} has other tokens as text: an audit by text cannot ask it")
        stop = {"stop": list(settings.stop)} if settings.stop else {}
        return {"model": self.model, "prompt": text, "max_tokens": settings.max_tokens, "temperature": 0, **stop}

    def read(self, answer: dict[str, Any], settings: Settings) -> Answer:
        choice = (answer.get("choices") or [{}])[0]
        text, count = choice.get("text"), (answer.get("usage") or {}).get("completion_tokens")
        if not isinstance(text, str) or not isinstance(count, int):
            raise ServerError(f"{self.url} sent no text with its number of completion_tokens")
        tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if choice.get("finish_reason") == "stop" and not settings.stop:
            if len(settings.eos) != 1:
                raise ServerError(f"{self.url} does not say which of {len(settings.eos)} end tokens ended the text")
            tokens.append(*settings.eos)
        if len(tokens) not in (count, count + 1) or self.tokenizer.decode(tokens, skip_special_tokens=True) != text:
            return Answer([], text)
        return Answer(tokens, text)


class TransformersServe(TextClient):
    """`transformers serve`, which takes samplers and ends as a generation_config in JSON."""

    def body(self, prompt: list[int], settings: Settings) -> dict[str, Any]:
        body = super().body(prompt, settings)
        options = json.dumps({**settings.generate_options(), "pad_token_id": self.tokenizer.pad_token_id})
        return {"model": self.model, "prompt": body["prompt"], "generation_config": options}
