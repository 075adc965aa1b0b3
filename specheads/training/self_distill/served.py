"""Answers by servers: several questions at a time, the turns of each one after the other, written in order."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from specheads.data.conversation import Conversation
from specheads.data.rows import Row, truncate
from specheads.training.self_distill.local import cut_prompt
from specheads.training.self_distill.options import Options
from specheads.training.self_distill.questions import Ask
from specheads.training.self_distill.reply import Replies, for_server
from specheads.training.self_distill.rows_file import RowsFile
from specheads.training.self_distill.server import Refused, ServerError, Servers

KEY = "OPENAI_API_KEY"
REFUSED_IN_A_ROW = 16  # then it is not the questions


async def fill(file: RowsFile, asks: Iterator[Ask], options: Options, tokenizer: Any, bar: tqdm) -> None:
    """Ask until the file is full. ServerError where a server fails, or refuses everything."""
    replies = Replies(options, tokenizer)
    in_flight: deque[tuple[Ask, asyncio.Task[list[Row | str]]]] = deque()
    held: list[tuple[Ask, list[Row | str]]] = []  # not written before another question got an answer
    servers = Servers(
        options.server, retries=options.retries, timeout=options.timeout,
        key=os.environ.get(KEY),
    )  # fmt: skip
    async with servers:
        place = file.answers
        try:
            while not file.finished:
                while len(in_flight) < options.concurrency and _lines(file, in_flight) < file.stream.wanted:
                    if (one := next(asks, None)) is None:
                        break
                    seed = random.Random(f"{options.seed} {place}").getrandbits(31)
                    in_flight.append((one, asyncio.create_task(_answers(servers, one, seed, options, replies))))
                    place += one.num_turns
                if not in_flight:
                    break
                one, task = in_flight[0]
                results = await task
                in_flight.popleft()
                held.append((one, results))
                if any(not isinstance(result, str) for result in results):
                    for waiting in held:
                        file.add([waiting[0]], [waiting[1]])
                    held = []
                    bar.update(file.lines - bar.n)
                elif len(held) >= REFUSED_IN_A_ROW:
                    raise ServerError(f"{len(held)} questions in a row got no answer to learn: {results[0]}")
        finally:
            for _, task in in_flight:
                task.cancel()
            await asyncio.gather(*(task for _, task in in_flight), return_exceptions=True)
    if held and not file.lines:
        raise ServerError(f"none of {len(held)} questions got an answer to learn: {held[-1][1][0]}")
    for waiting in held:
        file.add([waiting[0]], [waiting[1]])
    if said := replies.summary():
        print(said, file=sys.stderr)


def _lines(file: RowsFile, in_flight: deque[tuple[Ask, Any]]) -> int:
    """Lines there would be, if each answer that is on its way were one."""
    return file.lines + sum(one.num_turns for one, _ in in_flight)


async def _answers(servers: Servers, one: Ask, seed: int, options: Options, replies: Replies) -> list[Row | str]:
    """A row for each turn, or why there is none."""
    question, results, answers = one.question, list[Row | str](), list[str]()
    body = {
        "model": options.model or options.base, "max_tokens": options.max_new_tokens, "seed": seed,
        **(options.sampling(one.temperature) or {"temperature": 0}),
    }  # fmt: skip
    try:
        for turn in range(one.num_turns):
            prompt = question.prompt(answers, replies.tokenizer)
            if isinstance(question, Conversation):
                history = question.messages(answers)
                chat = {**body, **for_server(question, history)}
                choice = await servers.choice("chat/completions", _sent(chat, options))
                answer = replies.read_chat(choice, question, history, prompt)
            else:
                prompt = cut_prompt(prompt, replies.prompt_room, replies.tokenizer)
                choice = await servers.choice("completions", _sent({**body, "prompt": prompt}, options))
                answer = replies.read_text(choice, prompt)
            results.append(truncate(one.row(answer.prompt, answer.new), options.max_length, replies.tokenizer))
            if answer.last and not (isinstance(question, Conversation) and question.keeps_call(turn)):
                raise Refused(answer.last)
            answers.append(answer.text)
    except Refused as why:
        results += [str(why)] * (one.num_turns - len(results))
    return results


def _sent(body: dict[str, Any], options: Options) -> dict[str, Any]:
    return {name: value for name, value in {**body, **options.request}.items() if value is not None}
