"""What a batch gives each row besides its ids, and decoders of more prompts than a batch has rows.

A batch is input_ids and attention_mask (B, T). Keys of rows: `limits`, the most new tokens, if they differ; `seeds`,
for sampling; CONVERSATIONS, if any has a second turn.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from typing import Any

from specheads.bench.runner import Decoder, Output, Stopwatch
from specheads.data.conversation import Conversation
from specheads.decoding.generation import prompt_batches

CONVERSATIONS = "conversations"
COUNTS = ("gained", "rows_stepped", "steps", "accepted_nodes")


def draw_numbers(count: int, low: int, high: int, seed: int, use: str) -> list[int]:
    """`count` random integers from low to high, both included. The same seed and use give the same numbers; different
    uses give independent ones."""
    coin = random.Random(f"{seed} {use}")
    return [coin.randint(low, high) for _ in range(count)]


def take_row_options(batch: dict[str, Any], max_new_tokens: int) -> tuple[dict[str, Any], list[int], list[int] | None]:
    """The batch without its limits and seeds; each row's most new tokens; each row's seed, or None without seeds."""
    inputs = dict(batch)
    seeds = inputs.pop("seeds", None)
    return inputs, inputs.pop("limits", None) or [max_new_tokens] * len(inputs["input_ids"]), seeds


def cut(tokens: list[list[int]], limits: list[int]) -> list[list[int]]:
    """Each row's tokens up to its limit."""
    return [row[:limit] for row, limit in zip(tokens, limits, strict=True)]


def batch_by_batch(decode: Decoder, size: int) -> Decoder:
    """A decoder that runs `decode` on `size` rows at a time. Its output and time are those of all batches together."""

    def run(batch: dict[str, Any], watch: Stopwatch | None) -> Output:
        if len(batch["input_ids"]) <= size:
            return decode(batch, watch)
        return join_outputs([decode(part, None) for part in split(batch, size)])

    return run


def split(batch: dict[str, Any], size: int) -> Iterator[dict[str, Any]]:
    """Parts of `size` rows (the last may have fewer), each without columns that are padding in all its rows."""
    for start in range(0, len(batch["input_ids"]), size):
        part = {name: values[start : start + size] for name, values in batch.items()}
        real = part["attention_mask"].bool().any(0)
        for name in ("input_ids", "attention_mask"):
            part[name] = part[name][:, real]
        yield part


def join_outputs(outputs: Sequence[Output]) -> Output:
    """Several outputs joined into one, without what any of them does not report."""
    seconds = [output.seconds for output in outputs if output.seconds is not None]
    known = [name for name in COUNTS if all(name in output.statistics for output in outputs)]
    return Output(
        [row for output in outputs for row in output.tokens],
        {name: reduce(add, (output.statistics[name] for output in outputs)) for name in known},
        [row for output in outputs for row in output.gains] if all(output.gains for output in outputs) else [],
        {part: sum(output.parts.get(part, 0.0) for output in outputs) for part in outputs[0].parts},
        sum(seconds) if len(seconds) == len(outputs) else None,
        [row for output in outputs for row in output.accepted] if all(output.accepted for output in outputs) else [],
    )


def live_rows(conversations: Sequence[Conversation | None], turn: int) -> list[int]:
    """The rows whose conversation has this turn, counted from 0."""
    return [
        i
        for i, conversation in enumerate(conversations)
        if turn < (1 if conversation is None else conversation.num_turns)
    ]


def texts_of(batch: dict[str, Any]) -> list[int]:
    """The row of each text that a batch gives: the first turns of all rows, then the second ones of those that have
    one, and so on."""
    conversations = batch.get(CONVERSATIONS) or [None] * len(batch["input_ids"])
    most = max(1 if conversation is None else conversation.num_turns for conversation in conversations)
    return [row for turn in range(most) for row in live_rows(conversations, turn)]


def with_follow_ups(decode: Decoder, tokenizer: Any) -> Decoder:
    """A decoder of whole conversations. Its output has a text for each turn, in the order of `texts_of`."""

    def run(batch: dict[str, Any], watch: Stopwatch | None) -> Output:
        first = {name: values for name, values in batch.items() if name != CONVERSATIONS}
        conversations: list[Conversation] | None = batch.get(CONVERSATIONS)
        if conversations is None:
            return decode(first, watch)
        outputs = [decode(first, None)]
        answers = [[tokenizer.decode(row, skip_special_tokens=True)] for row in outputs[0].tokens]
        turn = 1
        while rows := live_rows(conversations, turn):
            prompts = [conversations[row].prompt(answers[row], tokenizer) for row in rows]
            asked: dict[str, Any] = {}
            for padded in prompt_batches.batches(tokenizer, prompts, first["input_ids"].device, len(rows)):
                asked |= padded
            for name in ("limits", "seeds"):
                if name in first:
                    asked[name] = [first[name][row] for row in rows]
            if "seeds" in first:
                asked["seeds"] = [seed ^ turn for seed in asked["seeds"]]
            outputs.append(decode(asked, None))
            for row, tokens in zip(rows, outputs[-1].tokens, strict=True):
                answers[row].append(tokenizer.decode(tokens, skip_special_tokens=True))
            turn += 1
        return replace(join_outputs(outputs), rows=len(conversations))

    return run
