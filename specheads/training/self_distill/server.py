"""Requests to OpenAI-compatible servers: in turn, again where they fail, and what cannot be helped said clearly."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import httpx2 as httpx

LONGEST_DELAY = 60.0
FIRST_DELAY = 1.0
_AGAIN = {408, 409, 425, 429}  # and 5xx
_OF_THIS_REQUEST = {400, 413, 422}
_IDS = "return_token_ids"


class ServerError(OSError):
    """No answer, or one that further tries would not change. What was written before is kept."""


class Refused(ValueError):
    """A question that has no answer that can be learnt, which says nothing of the others."""


class Servers:
    """OpenAI-compatible servers of one model: an asynchronous context manager.

    urls: up to /v1; each request goes to the next of them, and where it fails to the one after that. timeout: seconds
    without a word. key: sent as a bearer token.
    """

    def __init__(
        self, urls: Sequence[str], *, concurrency: int, retries: int, timeout: float, key: str | None = None
    ) -> None:
        self.urls = [url.rstrip("/") for url in urls]
        self.retries = retries
        self.wants_ids = True  # exact token ids: vLLM and SGLang send them, and a server that minds is not asked again
        self._count = 0
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(timeout, pool=None),
            limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )

    async def __aenter__(self) -> Servers:
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._client.aclose()

    async def choice(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """The first choice of the answer to POST `route`, with the answer's prompt_token_ids if it has them.

        Refused for what the server refuses of this request, ServerError where it is of no use to ask on.
        """
        at, tried = self._count, 0
        self._count += 1
        while True:
            url = f"{self.urls[(at + tried) % len(self.urls)]}/{route}"
            wanted, delay = self.wants_ids, 0.0
            try:
                response = await self._client.post(url, json=body | ({_IDS: True} if wanted else {}))
                status, said = response.status_code, f"HTTP {response.status_code}: {_short(response.text)}"
                if status == 200 and (choice := _choice(response)) is not None:
                    return choice
                if status in _OF_THIS_REQUEST and wanted and _IDS in response.text:
                    self.wants_ids = False
                    continue
                if status in _OF_THIS_REQUEST:
                    raise Refused(f"the server refuses it, {said}")
                if status != 200 and status not in _AGAIN and status < 500:
                    raise ServerError(f"{url}: {said}")
                if status == 200:
                    said = f"what is no answer in JSON: {_short(response.text)}"
                delay = _seconds(response.headers.get("retry-after"))
            except httpx.InvalidURL as error:
                raise ServerError(f"{url} is no address: {error}") from error
            except httpx.HTTPError as error:
                said = f"{type(error).__name__}: {error}"
            tried += 1
            if tried > self.retries:
                raise ServerError(
                    f"{url}: no answer in {tried} tries, at last {said}; what was written is kept: start again with "
                    "the same options to go on"
                )
            backoff = FIRST_DELAY * 2 ** (tried - 1)
            # Spread, or all that a server turned away at once come back at once.
            await asyncio.sleep(min(LONGEST_DELAY, max(delay, backoff)) * random.uniform(0.75, 1.25))


def _choice(response: httpx.Response) -> dict[str, Any] | None:
    try:
        body = response.json()
        choice = body["choices"][0]
        text = choice["message"].get("content") if "message" in choice else choice["text"]
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    if not isinstance(text, str | None):
        return None
    # vLLM has a chat's beside the choices, SGLang and /completions in each
    return {**choice, "prompt_token_ids": choice.get("prompt_token_ids") or body.get("prompt_token_ids")}


def _seconds(value: str | None) -> float:
    try:
        return float(value or 0)
    except ValueError:
        return 0.0  # a date, which is as well waited for by steps


def _short(text: str) -> str:
    return f"{' '.join(text.split())!r:.300}"
