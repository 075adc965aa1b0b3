"""The questions, their order and temperatures, as determined by the options; each question comes once per pass."""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar, cast

from specheads.data import corpus
from specheads.data.chat_template import MissingTemplate
from specheads.data.config import DataConfig
from specheads.data.conversation import Conversation
from specheads.data.datasets import refuse_unknown_ids
from specheads.data.images import (
    NoImages,
    Stored,
    image_column,
    processor_of,
    take_images,
    tokenizer_of,
    written,
)
from specheads.data.row_forms import Dropped, RowError, is_chat, messages_of, reason_of
from specheads.data.rows import IGNORED, NO_PROCESSOR, Row, tokenize
from specheads.data.sources import load_dataset_rows, naming_undecodable_lines
from specheads.options import OptionError
from specheads.training.self_distill.options import WINDOWS, Options


@dataclass(frozen=True)
class TextPrompt:
    """Token ids for the base to continue, a conversation of one turn. supervised: are they learnt too?"""

    ids: list[int]
    supervised: bool = False
    num_turns: ClassVar[int] = 1

    @property
    def key(self) -> Hashable:
        return tuple(self.ids)

    def prompt(self, answers: Sequence[str], processing: Any) -> list[int]:
        return self.ids

    def shown(self, answers: Sequence[str]) -> list[Stored]:
        return []


Question = Conversation | TextPrompt


@dataclass(frozen=True)
class Ask:
    """A question, and the temperature at which to answer it."""

    question: Question
    temperature: float

    @property
    def num_turns(self) -> int:
        return self.question.num_turns

    def row(self, prompt: list[int], new: list[int], images: Sequence[Stored] = ()) -> Row:
        """A prompt, with its images, and its answer as a row."""
        learns_prompt = isinstance(self.question, TextPrompt) and self.question.supervised
        prompt_labels = prompt[1:] if learns_prompt else [IGNORED] * (len(prompt) - 1)
        row: Row = {"input_ids": prompt + new, "labels": [IGNORED, *prompt_labels, *new]}
        return row | ({"images": list(map(written, images))} if images else {})


@dataclass
class Stream:
    """asks: the questions in order, usually endless. wanted: lines of the file.

    cycle: the run ends after so many questions in a row without a new line; by then all have been asked.
    mark: the number of questions and their checksum, which determine the order; None for windows of text.
    """

    asks: Iterator[Ask]
    wanted: int
    cycle: int
    mark: str | None = None


def stream(options: Options, processing: Any) -> Stream:
    """The questions that the options ask for, for a base with this tokenizer or processor. ValueError for malformed
    rows, and if more lines are wanted than they can give."""
    with naming_undecodable_lines(options.source):
        return _stream(options, processing)


def _stream(options: Options, processing: Any) -> Stream:
    tokenizer = tokenizer_of(processing)
    if options.source is None:
        encoded = [tokenizer(text, verbose=False)["input_ids"] for _, text in corpus.texts(cast(Any, options.split))]
    else:
        rows = load_dataset_rows(options.source, prompt_column="prompt")
        if {"messages", "prompt"} & set(rows.column_names) or is_chat(rows.column_names):
            asked = questions(options, cast(Any, rows), processing)
            turns = sum(one.num_turns for one in asked)
            wanted = options.num_rows or turns
            if wanted > turns and options.greedy:
                raise OptionError(
                    f"{{num_rows}}: {options.source} has {turns} turns, and a greedy answer repeats itself; give "
                    "fewer, or a {temperature} above 0", num_rows=wanted, temperature=...,
                )  # fmt: skip
            cycle = len(asked) * len(options.temperature)
            return Stream(passes(asked, options.seed, options.temperature), wanted, cycle, _mark(asked))
        encoded = _texts(options, cast(Any, rows), tokenizer)
    if options.chat:
        raise OptionError(
            "{chat}: text is continued without a template; give rows with `prompt`, or with `messages`", chat=True
        )
    if options.prompt_tokens + options.max_new_tokens > options.max_length:
        raise OptionError(
            "{prompt_tokens} and {max_new_tokens} are over {max_length}", prompt_tokens=options.prompt_tokens,
            max_new_tokens=options.max_new_tokens, max_length=options.max_length,
        )  # fmt: skip
    long_enough = [ids for ids in encoded if len(ids) >= options.prompt_tokens]
    if not long_enough:
        raise OptionError(
            f"no row of {options.source or 'the standard library'} has {options.prompt_tokens} tokens; "
            "give a lower {prompt_tokens}",
            prompt_tokens=...,
        )
    cycle = len(options.temperature) * sum(len(ids) - options.prompt_tokens + 1 for ids in long_enough)
    asks = windows(long_enough, options.prompt_tokens, options.seed, options.temperature)
    return Stream(asks, options.num_rows or WINDOWS, cycle)


def _mark(asked: Sequence[Question]) -> str:
    checksum = 0
    for one in asked:
        checksum = zlib.crc32(str(one.key).encode("utf8", "surrogatepass"), checksum)
    return f"{len(asked)}, checksum {checksum:08x}"


def _texts(options: Options, rows: Iterable[dict[str, Any]], tokenizer: Any) -> list[list[int]]:
    """The rows of text as ids. Malformed ones are left out; ValueError names a row with ids the tokenizer lacks."""
    config, vocab_size = DataConfig(train=options.source), 1 + max(tokenizer.get_vocab().values())
    encoded, left_out = list[list[int]](), Dropped()
    for number, row in enumerate(rows, start=1):
        try:
            ids = tokenize(row, tokenizer, config)["input_ids"]
        except ValueError as error:
            left_out.add(reason_of(error), number, str(error))
            continue
        try:
            refuse_unknown_ids(ids, vocab_size)
        except ValueError as error:
            raise ValueError(f"row {number} of {options.source}: {error}") from error
        encoded.append(ids)
    _tell(left_out, len(encoded), options)
    return encoded


def questions(options: Options, rows: Sequence[dict[str, Any]], processing: Any) -> list[Question]:
    """The questions of rows of messages or prompts, each once. Rows without one are left out, and counted on stderr;
    ValueError if all are."""
    asked: dict[Hashable, Question] = {}
    left_out = Dropped()
    for number, row in enumerate(rows, start=1):
        try:
            conversation = question(row, processing, options)
            if conversation.num_turns == 0:
                left_out.add("without a message of the user", number)
                continue
            if isinstance(conversation, Conversation):  # the template may refuse it
                messages = conversation.messages(["x"] * (conversation.num_turns - 1))
                conversation.text(messages, tokenizer_of(processing), generation_prompt=True)
        except MissingTemplate:
            raise
        except ValueError as error:
            left_out.add(reason_of(error), number, str(error))
            continue
        asked.setdefault(conversation.key, conversation)
    kept = len(rows) - left_out.total
    _tell(left_out, kept, options)
    if again := kept - len(asked):
        print(f"asked once: {again} of {len(rows)} rows ask what another row asks", file=sys.stderr)
    return list(asked.values())


def _tell(left_out: Dropped, kept: int, options: Options) -> None:
    """Print which rows are left out. ValueError if none is kept."""
    if not left_out.total:
        return
    rows = left_out.total + kept
    if not kept:
        raise ValueError(f"none of the {rows} rows of {options.source} can be asked: {left_out}")
    print(f"{options.source}: left out {left_out.total} of {rows} rows: {left_out}", file=sys.stderr)


def question(row: dict[str, Any], processing: Any, options: Options) -> Question:
    messages = messages_of(row) if row.get("prompt") is None or row.get("messages") is not None else None
    if messages is not None:
        images = None if options.server or processor_of(processing) is None else image_column(row)
        if images is None and take_images(messages, row)[1]:
            raise NoImages("--server answers text alone" if options.server else NO_PROCESSOR)
        return Conversation.from_messages(messages, row.get("tools"), images=images).with_template(options.template)
    text = row.get("prompt")
    if not isinstance(text, str) or not text:
        raise RowError(f"expected messages or a prompt, not prompt={text!r:.60}; rows of text go into their own file")
    if options.chat:
        return Conversation.from_text(text).with_template(options.template)
    return TextPrompt(list(tokenizer_of(processing)(text, verbose=False)["input_ids"]))


def passes(asked: Sequence[Question], seed: int, temperatures: Sequence[float] = (0.0,)) -> Iterator[Ask]:
    """Passes over all questions, each in a seeded order, with each question at its next temperature every time.

    A question's position in the first pass sets its first temperature, so that temperatures share every pass equally.
    Greedily a question is asked only once; the stream ends if nothing is left to ask.
    """
    rng = random.Random(seed)
    first: dict[int, int] = {}  # question → its position in the first pass
    greedily: set[int] = set()
    for number in count():
        for position, index in enumerate(rng.sample(range(len(asked)), len(asked))):
            temperature = temperatures[(first.setdefault(index, position) + number) % len(temperatures)]
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
    """A seeded stream of windows of text, each at the next temperature; longer documents are drawn from more often.

    Greedily a window is continued only once; the stream ends if none is left.
    """
    rng = random.Random(seed)
    weights = [len(row) for row in rows]
    greedily: set[tuple[int, int]] = set()
    num_windows = sum(length - num_tokens + 1 for length in weights)
    for number in count():
        if not any(temperatures) and len(greedily) == num_windows:
            return
        temperature = temperatures[number % len(temperatures)]
        index = rng.choices(range(len(rows)), weights)[0]
        start = rng.randrange(weights[index] - num_tokens + 1)
        if not temperature:
            if (index, start) in greedily:
                continue
            greedily.add((index, start))
        yield Ask(TextPrompt(rows[index][start : start + num_tokens], supervised=True), temperature)
