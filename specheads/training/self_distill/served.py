"""Answers by servers: several questions at a time, each turn by turn, written in order."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from tqdm import tqdm

from specheads.data.conversation import Conversation
from specheads.data.row_forms import RowError
from specheads.data.rows import Row, truncate
from specheads.training.self_distill.local import cut_prompt
from specheads.training.self_distill.options import Options
from specheads.training.self_distill.questions import Ask
from specheads.training.self_distill.reply import Replies, chat_request
from specheads.training.self_distill.rows_file import RowsFile
from specheads.training.self_distill.server import Refused, ServerError, Servers

KEY = "OPENAI_API_KEY"
AHEAD = 1024  # most questions asked after the oldest unanswered one: a killed run asks them again
REFUSED_IN_A_ROW = 16  # after so many, the questions are not to blame


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
    asked: deque[tuple[Ask, asyncio.Task[list[Row | str]]]] = deque()
    running: set[asyncio.Task[list[Row | str]]] = set()
    failed = False  # an error is raised when its turn comes; meanwhile nothing more is asked
    answer = file.answers  # the number of the next question's first answer, which seeds its sampling
    try:
        while not file.finished:
            while (
                len(running) < options.concurrency and len(asked) < max(AHEAD, options.concurrency) and not failed
                and _possible_lines(file, asked) < file.stream.wanted
            ):  # fmt: skip
                if (ask := next(asks, None)) is None:
                    break
                seed = random.Random(f"{options.seed} {answer}").getrandbits(31)
                task = asyncio.create_task(_ask_turns(servers, ask, seed, options, replies))
                asked.append((ask, task))
                running.add(task)
                answer += ask.num_turns
            if not asked:
                return
            if asked[0][1].done():
                ask, task = asked.popleft()
                yield ask, task.result()
            else:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                failed |= any(task.exception() is not None for task in done)
    finally:
        for _, task in asked:
            task.cancel()
        await asyncio.gather(*(task for _, task in asked), return_exceptions=True)


def _possible_lines(file: RowsFile, asked: deque[tuple[Ask, Any]]) -> int:
    """How many lines there will be if every pending answer gives one."""
    return file.lines + sum(ask.num_turns for ask, _ in asked)


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
