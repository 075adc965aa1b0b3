"""Let the base model write its own training rows: heads learn best on the text they will draft.

rows with `messages`: the base answers every turn of the user, through the tokenizer's chat template. Earlier answers
  in a prompt are its own; those of the row are left out. One line a turn.
    python train/self_distill.py --base my/chat-model --source chats.jsonl --output own.jsonl
rows with `prompt`: the base answers the text as it is, or with --chat as a message of the user.
    python train/self_distill.py --base my/chat-model --source prompts.jsonl --output own.jsonl --chat --temperature 0.7
rows with `text`, and the standard library without --source: the base continues --prompt_tokens tokens from random
  places.
    python train/self_distill.py --base checkpoints/base --output runs/own.jsonl --num_rows 4000

Each line of the output is {"input_ids": […], "labels": […]}, as token ids, so that nothing is lost by decoding and
encoding again. An answer is supervised with its end of text and its prompt is not (-100); text is supervised from the
start of its window. A run that was stopped goes on where it was, if it is started with the same options.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

from specheads import corpus
from specheads.bench.decoders import batches, new_tokens
from specheads.conversation import Conversation
from specheads.data import IGNORED, DataConfig, Row, load_dataset_rows, tokenize, truncate

DTYPES = ("auto", "float32", "bfloat16", "float16")
WINDOWS = 4000  # rows made of text where --num_rows does not say


@dataclass(frozen=True)
class Options:
    base: str = field(metadata={"help": "the base model, a path or hub id"})
    output: str = field(metadata={"help": "JSONL file to write, or to go on with"})
    source: str | None = field(
        default=None, metadata={"help": "rows with messages, prompt or text: a file, glob or hub id (default: stdlib)"}
    )
    split: str = field(default="train", metadata={"help": "of the standard library: train or held_out"})
    num_rows: int | None = field(
        default=None, metadata={"help": f"lines of the finished file (default: every turn once; of text {WINDOWS})"}
    )
    chat: bool = field(default=False, metadata={"help": "put each `prompt` into the chat template"})
    prompt_tokens: int = field(default=64, metadata={"help": "tokens of a window of text"})
    max_new_tokens: int = field(default=128, metadata={"help": "tokens of an answer at most"})
    max_length: int = field(
        default=DataConfig.max_length, metadata={"help": "tokens of a line at most: longer prompts keep their end"}
    )
    temperature: float = field(default=0.0, metadata={"help": "0 is greedy"})
    batch_size: int = field(default=32, metadata={"help": "prompts the base continues at a time"})
    dtype: str = field(default="auto", metadata={"help": ", ".join(DTYPES)})
    seed: int = field(default=0, metadata={"help": "of the order of the prompts and of sampling"})

    def __post_init__(self) -> None:
        for name in ("num_rows", "prompt_tokens", "max_new_tokens", "batch_size"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name} {value} must be at least 1")
        if self.split not in ("train", "held_out"):
            raise ValueError(f"--split {self.split} must be train or held_out")
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype {self.dtype} must be one of {', '.join(DTYPES)}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"--temperature {self.temperature} must be a finite number of at least 0")
        if self.max_length <= self.max_new_tokens:
            raise ValueError(f"--max_length {self.max_length} must be above --max_new_tokens {self.max_new_tokens}")


@dataclass(frozen=True)
class Continued:
    """Token ids that the base continues, and whether they are supervised themselves: a conversation of one turn."""

    ids: list[int]
    supervised: bool = False
    num_turns: ClassVar[int] = 1

    def prompt(self, answers: Sequence[str], tokenizer: Any) -> list[int]:
        return self.ids


Asked = Conversation | Continued


# ------------------------------------------------------------------------------------------------------- what is asked


def questions(options: Options, rows: Sequence[dict[str, Any]], tokenizer: Any) -> list[Asked]:
    """What each row of messages or prompts asks. ValueError with the row for one that makes no sense."""
    asked: list[Asked] = []
    for number, row in enumerate(rows, start=1):
        try:
            asked.append(question(row, tokenizer, options.chat))
        except ValueError as error:
            raise ValueError(f"row {number} of {options.source}: {error}") from error
    some = [one for one in asked if one.num_turns]
    if not some:
        raise ValueError(f"none of the {len(asked)} rows of {options.source} has a message of the user")
    if len(some) < len(asked):
        print(f"left out {len(asked) - len(some)} of {len(asked)} rows without a message of the user", file=sys.stderr)
    return some


def question(row: dict[str, Any], tokenizer: Any, chat: bool) -> Asked:
    if row.get("messages") is not None:
        return Conversation.of(row["messages"], row.get("tools"))
    text = row.get("prompt")
    if not isinstance(text, str) or not text:
        raise ValueError(f"expected messages or a prompt, and prompt={text!r:.60}; rows of text go into their own file")
    return Conversation.of_text(text) if chat else Continued(list(tokenizer(text, verbose=False)["input_ids"]))


def passes(asked: Sequence[Asked], seed: int) -> Iterator[Asked]:
    """Every question once, in a seeded order, and all of them again and again."""
    rng = random.Random(seed)
    while True:
        yield from rng.sample(asked, len(asked))


def windows(options: Options, rows: Sequence[list[int]]) -> Iterator[Asked]:
    """An endless, seeded stream of windows of text; long documents are drawn from more often."""
    long_enough = [ids for ids in rows if len(ids) >= options.prompt_tokens]
    if not long_enough:
        raise ValueError(
            f"no row of {options.source or 'the standard library'} has {options.prompt_tokens} tokens; "
            "give a lower --prompt_tokens"
        )
    rng = random.Random(options.seed)
    weights = [len(row) for row in long_enough]
    while True:
        row = rng.choices(long_enough, weights)[0]
        start = rng.randrange(len(row) - options.prompt_tokens + 1)
        yield Continued(row[start : start + options.prompt_tokens], supervised=True)


def stream(options: Options, tokenizer: Any) -> tuple[Iterator[Asked], int]:
    """What to ask, endlessly, and how many lines to make of it."""
    if options.source is None:
        encoded = [tokenizer(text, verbose=False)["input_ids"] for _, text in corpus.texts(cast(Any, options.split))]
    else:
        rows = load_dataset_rows(options.source, prompt_column="prompt")
        if {"messages", "prompt"} & set(rows.column_names):
            asked = questions(options, cast(Any, rows), tokenizer)
            turns = sum(one.num_turns for one in asked)
            wanted = options.num_rows or turns
            if wanted > turns and not options.temperature:
                raise ValueError(
                    f"--num_rows {wanted}: {options.source} has {turns} turns, and greedy answers to the same are the "
                    "same; give fewer, or a --temperature"
                )
            return passes(asked, options.seed), wanted
        config = DataConfig(train=options.source)
        encoded = [tokenize(row, tokenizer, config)["input_ids"] for row in cast(Any, rows)]
    if options.chat:
        raise ValueError("--chat: text is continued as it is; give rows with `prompt`, or with `messages`")
    if options.prompt_tokens + options.max_new_tokens > options.max_length:
        raise ValueError(
            f"--prompt_tokens {options.prompt_tokens} and --max_new_tokens {options.max_new_tokens} are over "
            f"--max_length {options.max_length}"
        )
    return windows(options, encoded), options.num_rows or WINDOWS


# ------------------------------------------------------------------------------------------------------------- answers


@torch.no_grad()
def answer(base: Any, tokenizer: Any, asked: Sequence[Asked], options: Options) -> list[Row]:
    """The base's answers, turn by turn for all, as rows: those of one conversation after those of the one before."""
    room = min(options.max_length, getattr(base.config, "max_position_embeddings", None) or options.max_length)
    if room <= options.max_new_tokens:
        raise ValueError(f"--max_new_tokens {options.max_new_tokens}: the base takes {room} tokens, prompt included")
    sampling = {"do_sample": True, "temperature": options.temperature} if options.temperature else {"do_sample": False}
    rows: list[list[Row]] = [[] for _ in asked]
    answers: list[list[str]] = [[] for _ in asked]
    for turn in range(max(one.num_turns for one in asked)):
        live = [i for i, one in enumerate(asked) if turn < one.num_turns]
        prompts = []
        for i in live:
            ids = asked[i].prompt(answers[i], tokenizer)
            whole = {"input_ids": ids, "labels": ids}
            prompts.append(truncate(whole, room - options.max_new_tokens, tokenizer)["input_ids"])
        (inputs,) = batches(tokenizer, prompts, base.device, size=len(live))
        pad = tokenizer.pad_token_id or 0  # fills the rows that have ended, and is cut away
        made = base.generate(**inputs, max_new_tokens=options.max_new_tokens, pad_token_id=pad, **sampling)
        for i, prompt, new in zip(live, prompts, new_tokens(base, inputs, made), strict=True):
            one = asked[i]
            front = prompt[1:] if isinstance(one, Continued) and one.supervised else [IGNORED] * (len(prompt) - 1)
            rows[i].append({"input_ids": prompt + new, "labels": [IGNORED, *front, *new]})
            answers[i].append(tokenizer.decode(new, skip_special_tokens=True))
    return [row for some in rows for row in some]


def go_on(path: Path, asked: Iterator[Asked], wanted: int) -> tuple[Iterator[Asked], int]:
    """What is still to be asked, and how many lines the file has; a conversation that was cut short is taken away."""
    content = path.read_bytes() if path.exists() else b""
    lines = done = content.count(b"\n")
    if lines < wanted:
        done = 0
        while done + (one := next(asked)).num_turns <= lines:
            done += one.num_turns
        asked = chain([one], asked)
    whole = sum(map(len, content.splitlines(keepends=True)[:done]))
    if whole < len(content):
        os.truncate(path, whole)
    return asked, done


def run(options: Options) -> None:
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    asked, wanted = stream(options, tokenizer)
    out = Path(options.output)
    out.parent.mkdir(parents=True, exist_ok=True)
    asked, done = go_on(out, asked, wanted)
    dtype = options.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    base: Any = AutoModelForCausalLM.from_pretrained(options.base, dtype=dtype)
    base.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    with out.open("a", encoding="utf8") as file, tqdm(total=wanted, initial=done, unit="row") as bar:
        while done < wanted:
            # Of the place in the file, so that a run that goes on samples what it would have sampled.
            torch.manual_seed(random.Random(f"{options.seed} {done}").getrandbits(63))
            batch = list(islice(asked, min(options.batch_size, wanted - done)))
            rows = answer(base, tokenizer, batch, options)[: wanted - done]
            file.write("".join(json.dumps(row) + "\n" for row in rows))
            file.flush()
            done += len(rows)
            bar.update(len(rows))


class _Parser(HfArgumentParser):
    def error(self, message: str) -> Any:
        raise ValueError(message)


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The docstring as it is, and the default of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _Parser(cast(Any, [Options]), description=__doc__, formatter_class=_Help)
    try:
        (options,) = parser.parse_args_into_dataclasses(None if arguments is None else list(arguments))
        run(options)
    except (ValueError, OSError) as error:
        print(f"train/self_distill.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
