"""Answers by OpenAI-compatible servers: several questions at a time, each turn by turn, written in order."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from itertools import count
from typing import Any

from tqdm import tqdm

from specheads.data.conversation import Conversation
from specheads.data.row_forms import RowError
from specheads.data.rows import Row, truncate
from specheads.training.self_distill.local import cut_prompt
from specheads.training.self_distill.options import Options
from specheads.training.self_distill.questions import Ask
from specheads.training.self_distill.reply import Refused, Replies, chat_request
from specheads.training.self_distill.rows_file import RowsFile

try:
    import openai
except ImportError as error:
    raise ImportError(f"--server needs a package that cannot be imported ({error}): pip install openai") from error

KEY = "OPENAI_API_KEY"
AHEAD = 1024  # most questions asked after the oldest unanswered one
REFUSED_IN_A_ROW = 16  # after so many, the questions are not to blame
FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0  # seconds
_RETRIED = {408, 409, 425, 429}  # and 5xx
_REFUSED = {400, 413, 422}
_IDS = "return_token_ids"


async def fill(file: RowsFile, asks: Iterator[Ask], options: Options, tokenizer: Any, bar: tqdm) -> None:
    """Ask until the file is full. ServerError if a server fails, or refuses everything."""
    replies = Replies(options, tokenizer)
    unwritten: list[tuple[Ask, list[Row | str]]] = []  # refusals, written once another question gets an answer
    servers = Servers(options.server, retries=options.retries, timeout=options.timeout, key=os.environ.get(KEY))
    async with servers, aclosing(_in_order(servers, file, asks, options, replies)) as answered:
        async for ask, results in answered:
            unwritten.append((ask, results))
            if any(not isinstance(result, str) for result in results):
                _write(file, unwritten)
                bar.update(file.lines - bar.n)
            elif len(unwritten) >= REFUSED_IN_A_ROW:
                raise ServerError(f"{len(unwritten)} questions in a row got no usable answer: {results[0]}")
    if unwritten and not file.lines:
        raise ServerError(f"none of {len(unwritten)} questions got a usable answer: {unwritten[-1][1][0]}")
    _write(file, unwritten)
    if summary := replies.summary():
        print(summary, file=sys.stderr)


def _write(file: RowsFile, answered: list[tuple[Ask, list[Row | str]]]) -> None:
    """Write each question, and empty the list."""
    for ask, results in answered:
        file.add(ask, results)
    answered.clear()


async def _in_order(
    servers: Servers, file: RowsFile, asks: Iterator[Ask], options: Options, replies: Replies
) -> AsyncGenerator[tuple[Ask, list[Row | str]], None]:
    """The questions in order, each with its results. Up to options.concurrency run at a time, and no more than could
    fill the file; results that finish before an earlier, slower one wait for it, up to AHEAD."""
    asked: deque[tuple[Ask, int, asyncio.Future[list[Row | str]]]] = deque()  # with the number of the first answer
    running: set[asyncio.Future[list[Row | str]]] = set()
    failed = False  # an error is raised when its turn comes; meanwhile nothing more is asked
    answer = file.answers  # the number of the next question's first answer, which seeds its sampling
    try:
        while not file.finished:
            while (
                len(running) < options.concurrency and len(asked) < max(AHEAD, options.concurrency) and not failed
                and file.has_room(ask for ask, _, _ in asked)
            ):  # fmt: skip
                if (ask := next(asks, None)) is None:
                    break
                if (kept := file.take_kept(answer)) is None:
                    seed = random.Random(f"{options.seed} {answer}").getrandbits(31)
                    task = asyncio.create_task(_ask_turns(servers, ask, seed, options, replies))
                    asked.append((ask, answer, task))
                    running.add(task)
                else:
                    known: asyncio.Future[list[Row | str]] = asyncio.get_running_loop().create_future()
                    known.set_result(kept)
                    asked.append((ask, answer, known))
                answer += ask.num_turns
            if not asked:
                return
            if asked[0][2].done():
                ask, _, head = asked.popleft()
                yield ask, head.result()
                continue
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            failed |= any(answers.exception() is not None for answers in done)
            for _, first, answers in list(asked)[1:]:
                if answers in done and answers.exception() is None:
                    file.keep(first, answers.result())
    finally:
        for _, _, answers in asked:
            answers.cancel()
        await asyncio.gather(*(answers for _, _, answers in asked), return_exceptions=True)


async def _ask_turns(servers: Servers, ask: Ask, seed: int, options: Options, replies: Replies) -> list[Row | str]:
    """A row for each turn, or the reason why there is none."""
    question, results, answers = ask.question, list[Row | str](), list[str]()
    body = {
        "model": options.model or options.base, "max_tokens": options.max_new_tokens, "seed": seed,
        **(options.sampling(ask.temperature) or {"temperature": 0}),
    }  # fmt: skip
    try:
        for turn in range(ask.num_turns):
            prompt = question.prompt(answers, replies.tokenizer)
            if isinstance(question, Conversation):
                history = question.messages(answers)
                chat = {**body, **chat_request(question, history)}
                choice = await servers.choice("chat/completions", _request(chat, options))
                answer = replies.read_chat(choice, question, history, prompt)
            else:
                prompt = cut_prompt(prompt, replies.prompt_room, replies.tokenizer)
                choice = await servers.choice("completions", _request({**body, "prompt": prompt}, options))
                answer = replies.read_text(choice, prompt)
            results.append(truncate(ask.row(answer.prompt, answer.new), options.max_length, replies.tokenizer))
            if answer.last and not (isinstance(question, Conversation) and question.keeps_call(turn)):
                raise Refused(answer.last)
            answers.append(answer.text)
    except (Refused, RowError) as refusal:
        results += [str(refusal)] * (ask.num_turns - len(results))
    return results


def _request(body: dict[str, Any], options: Options) -> dict[str, Any]:
    return {name: value for name, value in {**body, **options.request}.items() if value is not None}


class ServerError(OSError):
    """No answer, or an error that a retry would not fix. Rows written before it are safe."""


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
