"""Requests to OpenAI-compatible servers: round-robin, with retries and clear errors."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from itertools import count
from typing import Any

try:
    import openai
except ImportError as error:
    raise ImportError(f"--server needs a package that cannot be imported ({error}): pip install openai") from error

FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0  # seconds
_RETRIED = {408, 409, 425, 429}  # and 5xx
_REFUSED = {400, 413, 422}
_IDS = "return_token_ids"


class ServerError(OSError):
    """No answer, or an error that a retry would not fix. Rows written before it are safe."""


class Refused(ValueError):
    """One question has no usable answer; the others are unaffected."""


class Servers:
    """OpenAI-compatible servers of one model: an asynchronous context manager.

    urls: up to /v1; requests take them in turn, and a failed request moves to the next. timeout: seconds without data.
    key: sent as a bearer token.
    """

    def __init__(self, urls: Sequence[str], *, retries: int, timeout: float, key: str | None = None) -> None:
        self.retries = retries
        self.asks_for_ids = True  # vLLM and SGLang send exact token ids; off once a server rejects the field
        self._turns = count()
        self._clients = [
            openai.AsyncOpenAI(base_url=url, api_key=key or "EMPTY", timeout=timeout, max_retries=0) for url in urls
        ]

    async def __aenter__(self) -> Servers:
        return self

    async def __aexit__(self, *error: Any) -> None:
        await asyncio.gather(*(client.close() for client in self._clients))

    async def choice(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """The first choice of the answer to POST `route`, with prompt_token_ids if the server sends them.

        Refused if the server refuses this request, ServerError if further requests are pointless.
        """
        first = next(self._turns)
        for attempt in range(self.retries + 1):
            client, delay = self._clients[(first + attempt) % len(self._clients)], 0.0
            url = f"{client.base_url}{route}"
            try:
                answer = await self._post(client, route, body)
                if (choice := _choice(answer)) is not None:
                    return choice
                problem = f"what is no answer in JSON: {_short(str(answer))}"
            except openai.APIStatusError as error:
                problem = f"HTTP {error.status_code}: {_short(error.response.text)}"
                if error.status_code in _REFUSED:
                    raise Refused(f"the server refuses it, {problem}") from error
                if error.status_code not in _RETRIED and error.status_code < 500:
                    raise ServerError(f"{url}: {problem}") from error
                delay = _seconds(error.response.headers.get("retry-after"))
            except openai.APIConnectionError as error:
                problem = f"{type(error.__cause__).__name__}: {error.__cause__}"
            except ValueError as error:
                problem = f"what is no answer in JSON: {error}"
            if attempt < self.retries:
                # Jitter, so that requests that were turned away together do not come back together.
                wait = max(delay, FIRST_DELAY * 2**attempt)
                await asyncio.sleep(min(LONGEST_DELAY, wait) * random.uniform(0.75, 1.25))
        raise ServerError(
            f"{url}: no answer in {self.retries + 1} tries; the last error was {problem}; rows written so far are "
            "safe: start again with the same options to resume"
        )

    async def _post(self, client: openai.AsyncOpenAI, route: str, body: dict[str, Any]) -> object:
        asks_for_ids = self.asks_for_ids
        try:
            asked = body | ({_IDS: True} if asks_for_ids else {})
            return await client.post(f"/{route}", body=asked, cast_to=object)
        except openai.APIStatusError as error:
            if not (asks_for_ids and error.status_code in _REFUSED and _IDS in error.response.text):
                raise
        self.asks_for_ids = False
        return await client.post(f"/{route}", body=body, cast_to=object)


def _choice(answer: Any) -> dict[str, Any] | None:
    try:
        choice = answer["choices"][0]
        text = choice["message"].get("content") if "message" in choice else choice["text"]
    except (LookupError, TypeError, AttributeError):
        return None
    if not isinstance(text, str | None):
        return None
    # vLLM sends a chat's prompt ids beside the choices, SGLang and /completions in each
    return {**choice, "prompt_token_ids": choice.get("prompt_token_ids") or answer.get("prompt_token_ids")}


def _seconds(value: str | None) -> float:
    try:
        return float(value or 0)
    except ValueError:
        return 0.0  # an HTTP date: use the usual delays


def _short(text: str) -> str:
    return f"{' '.join(text.split())!r:.300}"
