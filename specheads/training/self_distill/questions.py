"""What is asked, in which order and at which temperature: the same for the same options, each question once a pass."""

from __future__ import annotations

import random
import sys
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar, cast

from specheads.data import corpus
from specheads.data.config import DataConfig
from specheads.data.conversation import Conversation
from specheads.data.row_forms import is_chat, messages_of
from specheads.data.rows import IGNORED, Row, tokenize
from specheads.data.sources import load_dataset_rows
from specheads.training.self_distill.options import WINDOWS, Options


@dataclass(frozen=True)
class TextPrompt:
    """Token ids that the base continues, and whether they are supervised themselves: a conversation of one turn."""

    ids: list[int]
    supervised: bool = False
    num_turns: ClassVar[int] = 1

    @property
    def key(self) -> Hashable:
        return tuple(self.ids)

    def prompt(self, answers: Sequence[str], tokenizer: Any) -> list[int]:
        return self.ids


Question = Conversation | TextPrompt


@dataclass(frozen=True)
class Ask:
    """A question, and the temperature of its answers."""

    question: Question
    temperature: float

    @property
    def num_turns(self) -> int:
        return self.question.num_turns

    def row(self, prompt: list[int], new: list[int]) -> Row:
        """The line that a prompt and its answer make."""
        text = isinstance(self.question, TextPrompt) and self.question.supervised
        front = prompt[1:] if text else [IGNORED] * (len(prompt) - 1)
        return {"input_ids": prompt + new, "labels": [IGNORED, *front, *new]}


@dataclass
class Stream:
    """asks: what to ask, in order, mostly without end. wanted: lines to make of it. cycle: asks that are a round of
    all, after which it is idle to go on if they brought nothing new."""

    asks: Iterator[Ask]
    wanted: int
    cycle: int


def stream(options: Options, tokenizer: Any) -> Stream:
    """What to ask. ValueError for rows that make no sense, and for more of them than there are."""
    if options.source is None:
        encoded = [tokenizer(text, verbose=False)["input_ids"] for _, text in corpus.texts(cast(Any, options.split))]
    else:
        rows = load_dataset_rows(options.source, prompt_column="prompt")
        if {"messages", "prompt"} & set(rows.column_names) or is_chat(rows.column_names):
            asked = questions(options, cast(Any, rows), tokenizer)
            turns = sum(one.num_turns for one in asked)
            wanted = options.num_rows or turns
            if wanted > turns and options.greedy:
                raise ValueError(
                    f"--num_rows {wanted}: {options.source} has {turns} turns, and greedy answers to the same are the "
                    "same; give fewer, or a --temperature"
                )
            cycle = len(asked) * len(options.temperature)
            return Stream(passes(asked, options.seed, options.temperature), wanted, cycle)
        config = DataConfig(train=options.source)
        encoded = [tokenize(row, tokenizer, config)["input_ids"] for row in cast(Any, rows)]
    if options.chat:
        raise ValueError("--chat: text is continued as it is; give rows with `prompt`, or with `messages`")
    if options.prompt_tokens + options.max_new_tokens > options.max_length:
        raise ValueError(
            f"--prompt_tokens {options.prompt_tokens} and --max_new_tokens {options.max_new_tokens} are over "
            f"--max_length {options.max_length}"
        )
    long_enough = [ids for ids in encoded if len(ids) >= options.prompt_tokens]
    if not long_enough:
        raise ValueError(
            f"no row of {options.source or 'the standard library'} has {options.prompt_tokens} tokens; "
            "give a lower --prompt_tokens"
        )
    cycle = len(options.temperature) * sum(len(ids) - options.prompt_tokens + 1 for ids in long_enough)
    asks = windows(long_enough, options.prompt_tokens, options.seed, options.temperature)
    return Stream(asks, options.num_rows or WINDOWS, cycle)


def questions(options: Options, rows: Sequence[dict[str, Any]], tokenizer: Any) -> list[Question]:
    """What the rows of messages or prompts ask, each once. ValueError with the row for one that makes no sense."""
    asked: dict[Hashable, Question] = {}
    silent = 0
    for number, row in enumerate(rows, start=1):
        try:
            one = question(row, tokenizer, options)
        except ValueError as error:
            raise ValueError(f"row {number} of {options.source}: {error}") from error
        if one.num_turns:
            asked.setdefault(one.key, one)
        else:
            silent += 1
    if not asked:
        raise ValueError(f"none of the {silent} rows of {options.source} has a message of the user")
    if silent:
        print(f"left out {silent} of {len(rows)} rows without a message of the user", file=sys.stderr)
    if again := len(rows) - silent - len(asked):
        print(f"asked once: {again} of {len(rows)} rows ask what another row asks", file=sys.stderr)
    return list(asked.values())


def question(row: dict[str, Any], tokenizer: Any, options: Options) -> Question:
    messages = messages_of(row) if row.get("prompt") is None or row.get("messages") is not None else None
    if messages is not None:
        return Conversation.from_messages(messages, row.get("tools")).with_template(options.template)
    text = row.get("prompt")
    if not isinstance(text, str) or not text:
        raise ValueError(f"expected messages or a prompt, and prompt={text!r:.60}; rows of text go into their own file")
    if options.chat:
        return Conversation.from_text(text).with_template(options.template)
    return TextPrompt(list(tokenizer(text, verbose=False)["input_ids"]))


def passes(asked: Sequence[Question], seed: int, temperatures: Sequence[float] = (0.0,)) -> Iterator[Ask]:
    """Every question once, in a seeded order, and all of them again and again, each time at its next temperature.

    The first temperature of a question goes by its place in the first pass: each has an equal share of the questions in
    every pass. A question is greedily answered once; ends where that leaves nothing to ask.
    """
    rng = random.Random(seed)
    first: dict[int, int] = {}  # question → its place in the first pass
    greedily: set[int] = set()
    for number in count():
        for place, index in enumerate(rng.sample(range(len(asked)), len(asked))):
            temperature = temperatures[(first.setdefault(index, place) + number) % len(temperatures)]
            if not temperature:
                if index in greedily:
                    continue
                greedily.add(index)
            yield Ask(asked[index], temperature)
        if not any(temperatures):
            return


def windows(
    rows: Sequence[list[int]], num_tokens: int, seed: int, temperatures: Sequence[float] = (0.0,)
) -> Iterator[Ask]:
    """A seeded stream of windows of text, each at the next temperature; long documents are drawn from more often.

    A window is greedily continued once; ends where that leaves none.
    """
    rng = random.Random(seed)
    weights = [len(row) for row in rows]
    greedily: set[tuple[int, int]] = set()
    num_windows = sum(length - num_tokens + 1 for length in weights)
    for place in count():
        if not any(temperatures) and len(greedily) == num_windows:
            return
        temperature = temperatures[place % len(temperatures)]
        index = rng.choices(range(len(rows)), weights)[0]
        start = rng.randrange(weights[index] - num_tokens + 1)
        if not temperature:
            if (index, start) in greedily:
                continue
            greedily.add((index, start))
        yield Ask(TextPrompt(rows[index][start : start + num_tokens], supervised=True), temperature)
